"""From a run's value to everything a loop needs, in the one order that is right.

Load data, build the model, apply the variant, verify, shard, optimiser, step: frozen weights never reach an optimiser,
and nothing is wrapped before it is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oelm
from oelm.method.thaw import Schedule
from oelm.models.gpt import GPT
from oelm.train import optim
from oelm.train.clock import measured_ceiling
from oelm.train.frozen import frozen_digest
from oelm.train.parallel import World
from oelm.train.result import environment, parameters
from oelm.train.run import Run
from oelm.train.step import Step, make_step, pick_precision


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can step."""

    source: Any
    model: nn.Module
    objective: Any
    total: int  # steps
    factor: Callable[[int], float]  # of the learning rate, by step
    thaw: Schedule
    optimizers: optim.Optimizers
    step: Step
    known: dict[str, Any]  # of the record, already
    flops_per_token: float | None
    ceiling: float | None  # FLOP/s that this device reaches, where that could be measured

    def mfu(self, tokens_per_s: float | None, ranks: int) -> float | None:
        """The share of the measured ceiling that training reaches; None where there is no ceiling."""
        if tokens_per_s is None or self.flops_per_token is None or self.ceiling is None:
            return None
        return tokens_per_s * self.flops_per_token / self.ceiling / ranks


def prepare(run: Run, world: World, data_folder: Path | None) -> Prepared:
    """Everything, from nothing."""
    from oelm.data.open import load
    from oelm.models.build import build
    from oelm.train.objectives import objective_for

    source = load(run.data, folder=data_folder)
    torch.manual_seed(run.seed)
    labels = source.labels if isinstance(source.labels, int) else len(source.labels)
    model = build(run.model, vocab=source.vocab_size, labels=labels or None, seed=run.seed, context=run.data.context)
    report = oelm.apply(model, run.variant, seed=run.seed)
    oelm.verify(model)
    model.to(world.device).train()
    objective = objective_for(run.model, source)
    total = optim.total_steps(
        run.budget,
        steps_per_epoch=source.steps_per_epoch(run.budget.batch),
        tokens_per_step=run.budget.batch * run.data.context,
    )
    precision = pick_precision(run.precision, world.device)
    known = {
        "params": parameters(model),
        "logit_std": report.logit_std,
        "data": {
            "name": run.data.name,
            "status": source.provenance.get("status"),
            "fingerprint": source.fingerprint,
            "provenance": dict(source.provenance),
        },
        "environment": environment(world.device, precision),
        "frozen_digest": {"start": frozen_digest(model), "end": None},
    }
    flops_per_token, ceiling = _ceiling(run, model, world, precision)
    thaw = oelm.schedule(model, total_steps=total)
    world.shard(model)
    optimizers = optim.Optimizers(model, run.optimizer, world.device)
    if len(optimizers.each) == 1:
        oelm.verify(model, optimizers.each[0])
    step = make_step(
        model,
        objective,
        optimizers,
        device=world.device,
        precision=precision,
        accumulate=run.budget.accumulate,
        clip=run.optimizer.clip,
        world=world,
    )
    torch.manual_seed(run.seed + 1_000_003 * world.rank)  # of dropout: not the same on every rank
    return Prepared(
        source=source,
        model=model,
        objective=objective,
        total=total,
        factor=optim.schedule(run.optimizer, total),
        thaw=thaw,
        optimizers=optimizers,
        step=step,
        known=known,
        flops_per_token=flops_per_token,
        ceiling=ceiling,
    )


def _ceiling(run: Run, model: nn.Module, world: World, precision: str) -> tuple[float | None, float | None]:
    """What MFU is measured against: FLOPs of a token, where they can be counted, and FLOP/s this device reaches."""
    if not world.first:
        return None, None
    if world.device.type == "cpu":  # torch's own counter would load the compiler: seconds before the first step
        counted = flops_per_token(model, run.data.context) if isinstance(model, GPT) else None
        return counted, measured_ceiling(world.device, None)
    flops = oelm.account(model, length=run.data.context).flops
    ceiling = measured_ceiling(world.device, Step.dtypes.get(precision))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(world.device)
    return (flops.total / run.data.context if flops is not None else None), ceiling


def flops_per_token(model: GPT, length: int) -> float:
    """Those of training our own model on one token of a text of `length`, by the convention of `oelm.account`.

    A product costs two FLOPs a weight forward, two for its input's gradient, two for its own if it trains.
    """
    shape = model.shape
    lookups = [model.position.weight] if model.position is not None else []
    if shape.head != "lm" or not shape.tied:
        lookups.append(model.embed.weight)
    once = [model.head.weight] if model.head is not None and shape.head == "classify" else []  # a text, not a token
    left_out = {id(p) for p in (*lookups, *once)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in left_out]
    products = sum(p.numel() * (6 if p.requires_grad else 4) for p in matrices)
    return float(products + 12 * shape.layers * length * shape.width)
