"""Optimisers and schedules: from settings to constant parameter groups and a pure function of the step.

Parameters that are frozen for good are never given to an optimiser; those that will thaw are in it from the start.
Optimiser state is named after parameters, so that a checkpoint needs no pickle and no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import CheckpointError, ConfigError
from oelm.method.thaw import param_groups
from oelm.train.parallel import put
from oelm.train.run import Budget, Optimizer


def total_steps(budget: Budget, *, steps_per_epoch: int, tokens_per_step: int) -> int:
    """The number of optimiser steps that the budget buys; at least one."""
    if budget.steps is not None:
        return budget.steps
    if budget.epochs is not None:
        return max(1, math.ceil(budget.epochs * steps_per_epoch - 1e-9))
    assert budget.tokens is not None
    return max(1, math.ceil(budget.tokens / tokens_per_step))


def warmup_steps(settings: Optimizer, total: int) -> int:
    """Warm-up in steps; a longer one than the whole budget is refused."""
    steps = settings.warmup if isinstance(settings.warmup, int) else round(settings.warmup * total)
    if steps > total:
        raise ConfigError(f"optimizer.warmup: {steps} steps are more than the budget's {total}; make warmup shorter")
    return steps


def schedule(settings: Optimizer, total: int) -> Callable[[int], float]:
    """The factor on the learning rate of step n = 0, 1, …, total - 1: a pure function."""
    warmup = warmup_steps(settings, total)
    floor = settings.floor

    def falling(share: float) -> float:
        share = min(max(share, 0.0), 1.0)
        if settings.schedule == "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))
        return floor + (1 - floor) * (1 - share)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.schedule == "constant":
            return 1.0
        start = warmup
        if settings.schedule == "wsd":
            start = max(warmup, total - round(settings.cooldown * total))
            if step < start:
                return 1.0
        return falling((step - start) / max(1, total - start))

    return factor


class Optimizers:
    """One or two torch optimisers over constant groups, with one rate and one named state."""

    def __init__(self, model: nn.Module, settings: Optimizer, device: torch.device) -> None:
        self.settings = settings
        groups = _groups(model, settings)
        fused = device.type in ("cuda", "cpu")
        adamw: list[dict[str, Any]] = []
        muon: list[dict[str, Any]] = []
        blocks = _block_matrices(model) if settings.name == "muon" else set()
        for group in groups:
            for chosen, params in (
                (muon, [p for p in group["params"] if id(p) in blocks]),
                (adamw, [p for p in group["params"] if id(p) not in blocks]),
            ):
                if params:
                    chosen.append({"params": params, "lr": group["lr"], "weight_decay": group["weight_decay"]})
        self.each: list[torch.optim.Optimizer] = []
        if adamw:
            self.each.append(
                torch.optim.AdamW(
                    adamw, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=fused
                )
            )
        if muon:
            # match_rms_adamw: the update has AdamW's size, so that one rate serves both kinds of parameter.
            self.each.append(
                torch.optim.Muon(muon, lr=settings.lr, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
            )
        if not self.each:
            raise ConfigError("nothing would train: every parameter is frozen for good; change the variant's freeze")
        self._scales = [[g["lr"] / settings.lr for g in optimizer.param_groups] for optimizer in self.each]
        self._names = {id(p): name for name, p in model.named_parameters()}

    @property
    def params(self) -> list[nn.Parameter]:
        """Every parameter that trains now or will."""
        return [p for o in self.each for g in o.param_groups for p in g["params"]]

    def set_rate(self, factor: float) -> None:
        """The schedule's factor times every group's own rate."""
        for optimizer, scales in zip(self.each, self._scales, strict=True):
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = self.settings.lr * scale * factor

    @property
    def rates(self) -> list[float]:
        """Every parameter's own rate at factor 1, in the order of `params`."""
        return [
            self.settings.lr * scale
            for optimizer, scales in zip(self.each, self._scales, strict=True)
            for group, scale in zip(optimizer.param_groups, scales, strict=True)
            for _ in group["params"]
        ]

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>|<key>` -> tensor."""
        found: dict[str, Tensor] = {}
        for optimizer in self.each:
            for param, state in optimizer.state.items():
                for key, value in state.items():
                    if value is not None:
                        found[f"{self._names[id(param)]}|{key}"] = torch.as_tensor(value)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The state put back; a name that is foreign here is refused."""
        by_name = {self._names[id(p)]: (o, p) for o in self.each for g in o.param_groups for p in g["params"]}
        for optimizer in self.each:
            optimizer.state.clear()
        for full, tensor in tensors.items():
            name, _, key = full.rpartition("|")
            if name not in by_name:
                raise CheckpointError(
                    f"optimiser state of {name!r} belongs to no parameter that trains here; was the checkpoint of another run?"
                )
            optimizer, param = by_name[name]
            if key != "step":  # where the parameter is, and sharded as it is
                value = torch.zeros_like(param, dtype=tensor.dtype, requires_grad=False)
                put(value, tensor)
            else:
                value = tensor.to(param.device) if optimizer.defaults.get("fused") else tensor.clone()
            optimizer.state[param][key] = value


def _groups(model: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    everything = settings.decay == "all"
    return param_groups(
        model,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
        no_decay=(lambda name, parameter: False) if everything else None,
    )


def _block_matrices(model: nn.Module) -> set[int]:
    """Ids of the 2-D weights inside numbered layers: Muon's. Embeddings and heads stay with AdamW."""
    return {
        id(p)
        for name, p in model.named_parameters()
        if p.ndim == 2 and any(part.isdigit() for part in name.split(".")[:-1])
    }
