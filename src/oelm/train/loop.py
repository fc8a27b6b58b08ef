"""THE loop: a run and a folder in, result.json out. Everything else in this package serves it.

Order: load data, build the model, apply the variant, verify, wrap, optimiser, loop. It resumes by itself from the newest
intact checkpoint of its folder, and does nothing for a run that is over. It refuses a folder in use or of another run.
"""

from __future__ import annotations

import hashlib
import math
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

import oelm
from oelm.errors import DataError, OelmError, OutOfMemory, Preempted
from oelm.train import optim
from oelm.train.checkpoint import Checkpoints, Loaded, load_weights, snapshot
from oelm.train.clock import Clock
from oelm.train.folder import RunFolder
from oelm.train.parallel import World, pick_device
from oelm.train.progress import Progress, open_sinks
from oelm.train.result import environment, parameters, record
from oelm.train.run import Run, run_id
from oelm.train.signals import Signals, StopAsked
from oelm.train.step import Step, examples_in, tokens_in


EXPLODED = 3.0  # times the first loss, at least EXPLODED nats, as the mean of ...
EXPLODED_STEPS = 20  # ... so many steps in a row: the run has diverged though every number is finite

Event = Callable[[Mapping[str, Any]], None]


def train(
    run: Run,
    folder: Path,
    *,
    device: str = "auto",
    data_folder: Path | None = None,
    progress: str = "auto",
    study: str | None = None,
    row: str | None = None,
    checkpoint_every: int | None = None,
    keep_last: int = 2,
    on_event: Event | None = None,
    parallel: str = "ddp",
) -> dict[str, Any]:
    """Train a run in its folder and return what result.json holds; a finished run is returned as it is.

    Raises Preempted after a signal (all is saved; the same call continues) and KeyboardInterrupt after Ctrl-C.
    A diverged run returns, with status "diverged".
    """
    folder = Path(folder)
    name = run_id(row, run) if row else folder.absolute().name
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        world = stack.enter_context(World(pick_device(device), parallel))
        home = stack.enter_context(RunFolder(folder, run, first=world.first))
        done = home.result()
        if done is not None:
            return done
        session = _Session(run, home, world, signals, name, study, row, data_folder, on_event)
        session.checkpoint_every = checkpoint_every
        session.keep_last = keep_last
        session.progress_mode = progress
        try:
            return session.whole(stack)
        except (StopAsked, Preempted, KeyboardInterrupt):
            session.leave("stopped", None)
            if signals.asked is not None and signals.asked.name == "SIGINT":
                raise KeyboardInterrupt from None
            said = f"saved step {session.saved_step}" if session.saved_step else "before the first checkpoint"
            by = signals.asked.name if signals.asked else "a signal"
            raise Preempted(f"{folder}: stopped by {by}, {said}; run the same command again to continue") from None
        except OelmError as error:
            session.leave("failed", str(error))
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            message = session.memory_message(error)
            session.leave("failed", message)
            raise OutOfMemory(message) from None
        except BaseException as error:
            session.leave("failed", f"{type(error).__name__}: {error}")
            raise


class _Session:
    """One process's life of one run."""

    def __init__(
        self,
        run: Run,
        home: RunFolder,
        world: World,
        signals: Signals,
        name: str,
        study: str | None,
        row: str | None,
        data_folder: Path | None,
        on_event: Event | None,
    ) -> None:
        self.run, self.home, self.world, self.signals = run, home, world, signals
        self.name, self.study, self.row = name, study, row
        self.data_folder = data_folder
        self.on_event = on_event
        self.device = world.device
        self.checkpoint_every: int | None = None
        self.keep_last = 2
        self.progress_mode = "auto"
        self.saved_step = 0
        self.known: dict[str, Any] = {}
        self.clock = Clock()
        # what a checkpoint's state.json carries
        self.step_number = 0
        self.tokens = 0
        self.examples = 0
        self.lines = 0
        self.evaluated_at = 0
        self.pending: list[list[float]] = []  # [loss, norm] of steps since the last line
        self.recent: list[float] = []  # losses the explosion rule looks at
        self.first_loss: float | None = None
        self.curve: list[list[float]] = []
        self.best: dict[str, Any] | None = None
        self.worse = 0  # evaluations since the best one
        self.stopped_early = False
        self.validation: dict[str, Any] | None = None

    # -- from nothing to a session that can step

    def whole(self, stack: ExitStack) -> dict[str, Any]:
        with self.signals.interruptible():
            self._prepare()
            self._build()
        sinks = open_sinks(self.home.path, self.name, self.run.model_dump(mode="json")) if self.world.first else []
        self.progress = stack.enter_context(
            Progress(self.progress_mode, self.home.path, self.name, self.total, quiet=not self.world.first, sinks=sinks)
        )
        self.checkpoints = Checkpoints(
            self.home.path,
            identity=self.run.identity(),
            fingerprint=self.source.fingerprint,
            keep_last=self.keep_last,
            say=self.progress.say,
        )
        stack.callback(self.checkpoints.close)
        self._resume()
        try:
            self._steps()
        except _Diverged as found:
            return self._diverged(str(found))
        return self._finish()

    def _prepare(self) -> None:
        from oelm.data.open import load

        if self.world.first:
            self.home.forget("result.json")
        self.home.beat(state="loading data")
        self.source = load(self.run.data, self.data_folder)

    def _build(self) -> None:
        from oelm.models.build import build
        from oelm.train.objectives import objective_for

        run, source = self.run, self.source
        labels = getattr(source, "labels", None)
        count = len(labels) if labels is not None and not isinstance(labels, int) else labels
        if run.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=False)
        torch.manual_seed(run.seed)
        self.model = build(
            run.model, vocab=source.vocab_size, labels=count or None, seed=run.seed, context=run.data.context
        )
        report = oelm.apply(self.model, run.variant, seed=run.seed)
        oelm.verify(self.model)
        self.model.to(self.device).train()
        self.objective = objective_for(run.model, source)
        budget = run.budget
        self.total = optim.total_steps(
            budget,
            steps_per_epoch=source.steps_per_epoch(budget.batch),
            tokens_per_step=budget.batch * run.data.context,
        )
        self.factor = optim.schedule(run.optimizer, self.total)
        self.thaw = oelm.schedule(self.model, total_steps=self.total)
        self.precision = _precision(run.precision, self.device)
        self.optimizers = optim.Optimizers(self.model, run.optimizer, self.device)
        self.step = Step(
            self.model,
            self.objective,
            self.optimizers,
            device=self.device,
            precision=self.precision,
            accumulate=budget.accumulate,
            clip=run.optimizer.clip,
            world=self.world,
        )
        self.log_every = max(1, min(50, self.total // 200))
        provenance = dict(source.provenance)
        self.known = {
            "params": parameters(self.model, (id(p) for p in self.optimizers.params)),
            "logit_std": _logit_std(report),
            "data": {
                "name": provenance.get("name", run.data.name),
                "status": provenance.get("status"),
                "fingerprint": source.fingerprint,
                "tokens_seen": None,
                "examples_seen": None,
                "provenance": provenance,
            },
            "environment": environment(self.device, self.precision),
            "frozen_digest": {"start": _digest(self.model), "end": None},
        }
        # Dropout draws from here on; the ranks of one run must differ.
        torch.manual_seed(run.seed + 1_000_003 * self.world.rank)
        if self.world.first:
            self.home.write("environment.json", self.known["environment"])

    # -- resume

    def _resume(self) -> None:
        if self.world.first:
            self.checkpoints.sweep()
        self.world.barrier()
        found = self.checkpoints.load()
        if found is not None:
            self._restore(found)
            self.progress.say(f"resumed at step {self.step_number} of {self.total}")
        if self.world.first:
            self.home.open_metrics(self.lines)

    def _restore(self, found: Loaded) -> None:
        state = found.state
        for name in _STATE:
            setattr(self, name, state[name])
        if self.step_number:
            self.thaw.step(self.step_number - 1)  # what is due at this very step, the loop thaws and logs
        weights = found.tensors["model"]
        self.model.load_state_dict(weights, strict=False)
        oelm.verify(self.model)
        self.optimizers.load(found.tensors["optimizer"])
        self.step.load(found.tensors["extra"])
        self.step.thawed()
        extra = found.tensors["extra"]
        self.clock.restore(
            seconds=state["seconds"],
            steps=extra["clock|steps"].tolist(),
            tokens=extra["clock|tokens"].tolist(),
            evaluations=extra["clock|evaluations"].tolist(),
        )
        torch.set_rng_state(extra["rng|cpu"])
        if self.device.type == "cuda" and "rng|cuda" in extra:
            torch.cuda.set_rng_state(extra["rng|cuda"], self.device)
        self.saved_step = found.step

    # -- stepping

    def _steps(self) -> None:
        run, source, batch = self.run, self.source, self.run.budget.batch
        if self._evaluation_due():  # a stop came between a step and its evaluation
            self._evaluate()
        while self.step_number < self.total and not self.stopped_early:
            if self.signals.asked is not None:
                raise self._preempted()
            n = self.step_number
            if self.thaw.step(n):
                self.step.thawed()
                self._log({"kind": "event", "event": "thaw"})
            arrays = source.train_batch(seed=run.seed, step=n, batch=batch, rank=self.world.rank, world=self.world.size)
            began = time.perf_counter()
            self.step(n, arrays, self.factor(n))
            self.step_number = n + 1
            here = tokens_in(arrays)
            self.tokens += here * self.world.size
            self.examples += examples_in(arrays) * self.world.size
            self.clock.steps.append(time.perf_counter() - began)
            self.clock.step_tokens.append(here * self.world.size)
            if self.step_number % self.log_every == 0 or self.step_number == self.total or self.step.full:
                self._look()
            if self._evaluation_due():
                self._look()
                self._evaluate()
            elif self._save_due():
                self._save()
            self.home.beat(step=self.step_number, total=self.total)

    def _look(self) -> None:
        """Read the device: a train line at every log_every steps, divergence at once."""
        look = self.step.look()
        bad = look.bad_at
        good = look.losses if bad is None else look.losses[: max(0, len(look.losses) - (self.step_number - bad))]
        self.pending += [[loss, norm] for loss, norm in zip(good, look.norms, strict=False)]
        if self.first_loss is None and good:
            self.first_loss = good[0]
        self.recent = (self.recent + good)[-EXPLODED_STEPS:]
        if bad is not None:
            self.tokens -= self.clock.forget_after(bad)
            self.step_number = bad  # the steps before it are the last that happened
            raise _Diverged(f"step {bad + 1}: the loss or a gradient is not finite; the update was not made")
        if self.step_number % self.log_every == 0 or self.step_number == self.total:
            self._train_line()
        limit = EXPLODED * max(1.0, self.first_loss or 1.0)
        if len(self.recent) == EXPLODED_STEPS and min(self.recent) > limit:
            raise _Diverged(
                f"step {self.step_number}: the loss exploded ({self.recent[-1]:.3g} after {self.first_loss:.3g})"
            )

    def _train_line(self) -> None:
        if not self.pending:
            return
        losses = [p[0] for p in self.pending]
        norms = [p[1] for p in self.pending]
        self.pending = []
        line = {
            "kind": "train",
            "loss": math.fsum(losses) / len(losses),
            "lr": self.run.optimizer.lr * self.factor(self.step_number - 1),
            "grad_norm": math.fsum(norms) / len(norms),
            "tokens_per_s": self.clock.tokens_per_s(),
            "seconds": round(self.clock.seconds, 3),
        }
        self._log(line)
        typical = self.clock.typical()
        self.progress.show(
            {
                "step": self.step_number,
                "loss": line["loss"],
                "validation": (self.validation or {}).get("loss"),
                "lr": line["lr"],
                "tokens_per_s": line["tokens_per_s"],
                "memory": _peak(self.device),
                "seconds": self.clock.seconds,
                "eta": typical * (self.total - self.step_number) if typical else None,
                "frozen": _frozen_words(self.known["params"]),
            }
        )

    def _diverged(self, why: str) -> dict[str, Any]:
        """Divergence is a result: the last good weights are kept, the record says where it ended."""
        self._log({"kind": "event", "event": "diverged", "why": why})
        self.progress.say(f"diverged: {why}")
        self.checkpoints.wait()
        if self.step_number:
            self._save(wait=True)
        self.known["frozen_digest"]["end"] = _digest(self.model)
        return self.leave("diverged", why)

    def _log(self, line: dict[str, Any]) -> None:
        whole = {**line, "step": self.step_number, "tokens": self.tokens}
        if self.world.first:
            self.home.log(whole)
            self.progress.track({f"{line['kind']}/{k}": v for k, v in line.items()}, self.step_number)
        self.lines += 1
        if self.on_event is not None:
            self.on_event(whole)

    # -- evaluation

    def _evaluation_due(self) -> bool:
        every, n = self.run.eval_every, self.step_number
        if n == 0 or self.evaluated_at == n:
            return False
        return n == self.total or (every > 0 and n % every == 0)

    def _evaluate(self) -> None:
        began = time.perf_counter()
        limit = self.run.eval_tokens if self.step_number < self.total else None
        metrics = self._measure("validation", limit)
        self.clock.evaluations.append(time.perf_counter() - began)
        self.evaluated_at = self.step_number
        self.validation = metrics
        self._log({"kind": "eval", "split": "validation", **metrics})
        loss = metrics["loss"]
        self.curve.append([self.tokens, loss])
        better = loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best["metrics"]["loss"])
        if better:
            self.best = {"step": self.step_number, "metrics": metrics}
            self.worse = 0
        else:
            self.worse += 1
            if self.run.budget.patience and self.worse >= self.run.budget.patience:
                self.stopped_early = True
                self._log({"kind": "event", "event": "early stop", "best_step": (self.best or {}).get("step")})
        if better or self.step_number == self.total or self.stopped_early or self._save_due():
            self._save(best=better)

    def _measure(self, split: str, limit: int | None = None) -> dict[str, Any]:
        self.home.beat(step=self.step_number, total=self.total, state=f"evaluating {split}")
        mixed = (
            torch.autocast(self.device.type, dtype=self.step.dtype) if self.step.dtype is not None else nullcontext()
        )
        try:
            with self.signals.interruptible(), mixed:
                return dict(
                    self.objective.evaluate(
                        self.model, self.source, split, device=self.device, batch=self.run.budget.batch, limit=limit
                    )
                )
        except StopAsked:
            self.model.train()
            raise self._preempted() from None

    # -- saving

    def _save_due(self) -> bool:
        every = self.checkpoint_every or self.run.eval_every or max(1, self.total // 10)
        return self.step_number % every == 0 and self.step_number != self.saved_step

    def _save(self, *, best: bool = False, wait: bool = False) -> None:
        """Snapshot on the host, then written behind the loop's back."""
        self._look()
        oelm.verify(self.model)
        self.checkpoints.poll()
        self.saved_step = self.step_number
        if self.world.first:
            self.checkpoints.save(
                self.step_number, self._files(), self._state(), best=best, before=self.home.sync_metrics
            )
        if wait:
            self.checkpoints.wait()

    def _files(self) -> dict[str, dict[str, torch.Tensor]]:
        extra = {
            "rng|cpu": torch.get_rng_state(),
            "clock|steps": torch.tensor(self.clock.steps, dtype=torch.float64),
            "clock|tokens": torch.tensor(self.clock.step_tokens, dtype=torch.float64),
            "clock|evaluations": torch.tensor(self.clock.evaluations, dtype=torch.float64),
            **self.step.tensors(),
        }
        if self.device.type == "cuda":
            extra["rng|cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "model": snapshot(self._weights()),
            "optimizer": snapshot(self.optimizers.tensors()),
            "extra": snapshot(extra),
        }

    def _weights(self) -> dict[str, torch.Tensor]:
        """Each stored tensor once, under its first name."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach()
        return found

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE} | {"seconds": self.clock.seconds}

    def _preempted(self) -> Preempted:
        """Save and leave, at a step boundary."""
        self.checkpoints.wait()
        if self.step_number and (self.step_number != self.saved_step or not self.checkpoints.known()):
            self._save(wait=True)
        return Preempted(f"{self.home.path}: stopped at step {self.step_number}")

    # -- the end

    def _finish(self) -> dict[str, Any]:
        self.checkpoints.wait()
        test = self._test()
        self.known["frozen_digest"]["end"] = _digest(self.model)
        return self.leave("done", None, test=test)

    def _test(self) -> dict[str, Any] | None:
        """The test split, read once, with the weights that validation chose."""
        if self.best is not None and self.best["step"] != self.step_number:
            weights, step = load_weights(self.home.path, "best")
            if step == self.best["step"]:
                self.model.load_state_dict(weights, strict=False)
        try:
            return self._measure("test")
        except DataError:
            return None  # a data set without a test split

    def leave(self, status: str, error: str | None, *, test: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write the record; whatever happened, every field is there."""
        known = dict(self.known)
        if "data" in known:
            known["data"] = known["data"] | {"tokens_seen": self.tokens, "examples_seen": self.examples}
        known["metrics"] = {
            "validation": self.validation,
            "test": test,
            "best": None if self.best is None else {"step": self.best["step"], **self.best["metrics"]},
        }
        known["curve"] = self.curve
        known["cost"] = {
            "seconds": self.clock.seconds,
            "train_seconds": float(sum(self.clock.steps)),
            "step_seconds_median": self.clock.typical(),
            "tokens_per_s": self.clock.tokens_per_s(),
            "peak_bytes": _peak(self.device),
            "energy_j": None,
            "steps": self.step_number,
        }
        result = record(self.run, run_id=self.name, study=self.study, row=self.row, status=status, error=error, **known)
        if self.world.first:
            self.home.write("result.json", result)
        return result

    def memory_message(self, error: BaseException) -> str:
        return str(error)


# What state.json carries of a session; all plain data.
_STATE = (
    "step_number",
    "tokens",
    "examples",
    "lines",
    "evaluated_at",
    "pending",
    "recent",
    "first_loss",
    "curve",
    "best",
    "worse",
    "stopped_early",
    "validation",
)


class _Diverged(Exception):
    """Where and how; never leaves this module."""


def _precision(wanted: str, device: torch.device) -> str:
    """What is computed in: float32 on the CPU, float16 with a scaler on GPUs without bfloat16."""
    if device.type == "cpu":
        return "fp32"
    if wanted == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16"
    return wanted


def _digest(model: torch.nn.Module) -> str | None:
    """SHA-256 over the names and bytes of what does not train; None where everything does."""
    digest = hashlib.sha256()
    frozen = sorted((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    for name, parameter in frozen:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if frozen else None


def _logit_std(report: Any) -> float | None:
    found = getattr(report, "logit_std", None)
    return float(found) if isinstance(found, int | float) else None


def _peak(device: torch.device) -> int:
    """The most memory used so far: of the device, or of this process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _frozen_words(params: Mapping[str, int]) -> str:
    share = params["frozen"] / params["total"] if params["total"] else 0.0
    return f"{share:.1%}" if share else ""
