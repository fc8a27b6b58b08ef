"""THE loop: a run and a folder in, result.json out. Everything else in this package serves it.

Order: load data, build the model, apply the variant, verify, wrap, optimiser, loop. It resumes by itself from the newest
intact checkpoint of its folder, and does nothing for a run that is over. It refuses a folder in use or of another run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import oelm
from oelm.errors import CheckpointError, MethodError, OelmError, OutOfMemory, Preempted
from oelm.train import examples
from oelm.train.checkpoint import Checkpoints, Loaded, disk_room, load_weights, put_weights
from oelm.train.clock import Clock
from oelm.train.folder import RunFolder
from oelm.train.frozen import frozen_digest, frozen_hashes, regenerable
from oelm.train.memory import is_out_of_memory, memory_message, peak_bytes
from oelm.train.objectives import reading_batch
from oelm.train.parallel import World, lost_process, pick_device, stored
from oelm.train.prepare import Prepared, prepare
from oelm.train.progress import Progress, open_sinks
from oelm.train.result import cost, record, timing
from oelm.train.run import Run, run_id
from oelm.train.signals import Signals, StopAsked
from oelm.train.state import Diverged, State
from oelm.train.step import Batch, autocast, examples_in, tokens_in
from oelm.train.watched import Watched


LOOKS = 200  # train lines of a short run; a long one has one every ...
LOOK_EVERY = 50  # ... so many steps, and the host waits for the device no more often


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how a run runs: nothing here changes its result."""

    device: str = "auto"
    data_folder: Path | None = None
    progress: str = "auto"
    study: str | None = None
    row: str | None = None
    checkpoint_every: int | None = None
    keep_last: int = 2
    compact: bool = False
    parallel: str = "ddp"
    on_event: Callable[[Mapping[str, Any]], None] | None = None


def train(run: Run, folder: Path | str, **options: Any) -> dict[str, Any]:
    """Train a run in its folder and return what result.json holds; a run that is over is returned as it is.

    Options: those of `Options`. Raises Preempted after a signal (all is saved; the same call continues) and
    KeyboardInterrupt after Ctrl-C. A run that diverges returns, with status "diverged".
    """
    chosen = Options(**options)
    folder = Path(folder)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(_deterministic(run.deterministic))
        world = stack.enter_context(World(pick_device(chosen.device), chosen.parallel))
        home = stack.enter_context(RunFolder(folder, run, first=world.first))
        done = home.result()
        if done is not None:
            return done
        session = _Session(run, home, world, signals, chosen)
        try:
            return session.train(stack)
        except (StopAsked, Preempted, KeyboardInterrupt):
            session.leave_quietly("stopped", None)
            asked = signals.asked.name if signals.asked else "SIGINT"
            if asked == "SIGINT":
                raise KeyboardInterrupt from None
            where = f"step {session.saved_at} is saved" if session.saved_at else "before the first step was saved"
            raise Preempted(f"{folder}: stopped by {asked}, {where}; run the same command again to continue") from None
        except OelmError as error:
            session.leave_quietly("failed", str(error))
            raise
        except BaseException as error:
            known = _translated(error, session)
            session.leave_quietly("failed", str(known) if known else f"{type(error).__name__}: {error}")
            if known is not None:
                raise known from None
            raise


def _translated(error: BaseException, session: _Session) -> OelmError | None:
    """The one line for a foreign exception that has one."""
    if is_out_of_memory(error):
        return OutOfMemory(memory_message(error, session.run, session.world.device, session.home.path))
    return lost_process(error, session.world)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms for the life of one run. Not called without need: it imports the compiler."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Session:
    """One process's life of one run."""

    def __init__(self, run: Run, home: RunFolder, world: World, signals: Signals, options: Options) -> None:
        self.run, self.home, self.world, self.signals, self.options = run, home, world, signals, options
        self.device = world.device
        self.name = run_id(options.row, run) if options.row else home.path.name
        self.state = State()
        self.clock = Clock(self.device)
        self.saved_at = 0
        self.ready: Prepared | None = None
        self.known: dict[str, Any] = {}  # of the record
        self.right: dict[int, int] = {}  # a classifier's test examples: which were right

    def train(self, stack: ExitStack) -> dict[str, Any]:
        """The whole of it, from data to the record."""
        self.home.forget("result.json")
        self.home.beat(state="preparing")
        with self.signals.interruptible():
            ready = self.ready = prepare(self.run, self.world, self.options.data_folder)
        self.source, self.objective, self.model = ready.source, ready.objective, ready.model
        self.step, self.optimizers, self.thaw = ready.step, ready.optimizers, ready.thaw
        self.total, self.factor, self.known = ready.total, ready.factor, dict(ready.known)
        self.look_every = max(1, min(LOOK_EVERY, self.total // LOOKS))
        self.home.write("environment.json", self.known["environment"])
        sinks = open_sinks(self.home.path, self.name, self.run.model_dump(mode="json")) if self.world.first else []
        self.progress = stack.enter_context(
            Progress(
                self.options.progress,
                self.home.path,
                self.name,
                self.total,
                quiet=not self.world.first,
                sinks=sinks,
            )
        )
        self.checkpoints = Checkpoints(
            self.home.path,
            identity=self.run.identity(),
            fingerprint=self.source.fingerprint,
            keep_last=self.options.keep_last,
            say=self.progress.say,
            world=self.world,
        )
        stack.callback(self.checkpoints.close)
        self._resume()
        try:
            self._steps()
        except Diverged as why:
            return self._diverged(why)
        return self._finish()

    # -- resume

    def _resume(self) -> None:
        if self.world.first:
            self.checkpoints.sweep()
        self.world.barrier()
        found = self.checkpoints.load()
        if found is not None:
            self._restore(found)
            if self.world.first:
                self.checkpoints.mend_pointers(found, (self.state.best or {}).get("step"))
            self.progress.say(f"resumed at step {self.state.step:,} of {self.total:,}")
        elif self.world.first and (warning := disk_room(self.home.path, self._checkpoint_bytes())):
            self.progress.say(f"warning: {warning}")
        self.home.open_metrics(self.state.lines)

    def _checkpoint_bytes(self) -> int:
        params = self.known["params"]
        return int(4 * params["total"] + 8 * params["trainable"])

    def _restore(self, found: Loaded) -> None:
        """Put everything back: weights, what is thawed, optimiser, scaler, clock, random states, counts."""
        self.state = State.from_dict(found.state)
        self.saved_at = found.step
        if self.state.step:
            self.thaw.step(self.state.step - 1)  # what is due at this very step, the loop thaws and logs
        put_weights(self.model, found.tensors["model"], found.path, skip=self._left_out())
        oelm.verify(self.model)
        self.optimizers.load(found.tensors["optimizer"])
        extra = found.tensors["extra"]
        self.step.load(extra)
        self.step.thawed()
        self.clock.load(extra, self.state.seconds)
        self.world.restore_random_states(extra)

    def _left_out(self) -> frozenset[str]:
        return regenerable(self.model) if self.options.compact else frozenset()

    # -- stepping

    def _steps(self) -> None:
        state, fresh = self.state, True  # whether the next step may compile
        if self._evaluation_due():  # a stop came between a step and its evaluation
            self._evaluate()
        while state.step < self.total and not state.stopped_early:
            if self.world.agree(self.signals.asked is not None, state.step):
                raise self._stop()
            self.checkpoints.poll()
            thawed = self.thaw.step(state.step)
            if thawed:
                self.step.thawed()
                fresh = True
                self._log({"kind": "event", "event": "thaw", "parameters": thawed})
            arrays = self._batch(state.step)
            self.clock.start()
            with self.clock.compiling(if_new=fresh):
                self.step(state.step, arrays, self.factor(state.step))
            fresh = False
            if self.step.lacking:
                self._no_gradient(self.step.lacking)
            tokens = tokens_in(arrays) * self.world.size
            self.clock.stop(tokens)
            state.step += 1
            state.tokens += tokens
            state.examples += examples_in(arrays) * self.world.size
            if self._look_due():
                self._look()
            if self._evaluation_due():
                self._evaluate()
            elif self._save_due():
                self._save()
            self.home.beat(step=state.step, total=self.total)

    def _no_gradient(self, names: list[str]) -> None:
        """A tensor that should train and cannot: an error in our models, a warning where a hub's has spare parts."""
        said = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: trains but got no gradient"
        self.step.lacking = []
        if not self.run.is_hub:
            raise MethodError(f"{said} at step {self.state.step}; check the variant and the model's head")
        self.progress.say(f"warning: {said}; this model does not use it for {self.run.data.name}")

    def _batch(self, step: int) -> Batch:
        found: Batch = self.source.train_batch(
            seed=self.run.seed,
            step=step,
            batch=self.run.budget.batch,
            rank=self.world.rank,
            world=self.world.size,
        )
        return found

    def _look_due(self) -> bool:
        return self.state.step % self.look_every == 0 or self.state.step == self.total or self.state.step == 1

    def _look(self) -> None:
        """Wait for the device and read it: losses, divergence; a train line where one is due."""
        state = self.state
        look = self.step.look()
        self.clock.settle()
        if look.bad_at is not None:
            lost = state.step - look.bad_at  # masked: the bad step and what came after it
            state.tokens -= self.clock.forget_after(look.bad_at)
            state.examples -= lost * self.run.budget.batch
            state.step = look.bad_at
            state.took(look.losses[:-lost], look.norms[:-lost])
            raise Diverged(
                f"step {look.bad_at + 1}: the loss or a gradient is not finite; the update was not made",
                good=state.last_good,
            )
        state.took(look.losses, look.norms)
        if state.step % self.look_every == 0 or state.step == self.total:
            self._train_line()
        if look.losses:
            state.check_explosion()

    def _train_line(self) -> None:
        means = self.state.means()
        if means is None:
            return
        loss, norm = means
        rate = self.run.optimizer.lr * self.factor(self.state.step - 1)
        seconds, tokens_per_s = self.clock.speed() or (None, None)
        self._log(
            {
                "kind": "train",
                "loss": loss,
                "lr": rate,
                "grad_norm": norm,
                "tokens_per_s": tokens_per_s,
                "seconds": round(self.clock.seconds, 3),
            }
        )
        self.progress.show(
            {
                "step": self.state.step,
                "loss": loss,
                "validation": (self.state.validation or {}).get("loss"),
                "lr": rate,
                "tokens_per_s": tokens_per_s,
                "mfu": self._mfu(tokens_per_s),
                "memory": peak_bytes(self.device),
                "seconds": self.clock.seconds,
                "eta": seconds * (self.total - self.state.step) if seconds else None,
                "frozen": self._frozen_now(),
            }
        )

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        return self.ready.mfu(tokens_per_s, self.world.size) if self.ready is not None else None

    def _frozen_now(self) -> str:
        total = self.known["params"]["total"]
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        return f"{frozen / total:.1%}" if frozen else ""

    def _log(self, line: dict[str, Any]) -> None:
        whole = {**line, "step": self.state.step, "tokens": self.state.tokens}
        self.home.log(whole)
        self.state.lines += 1
        self.progress.track({f"{line['kind']}/{key}": value for key, value in line.items()}, self.state.step)
        if self.options.on_event is not None:
            self.options.on_event(whole)

    # -- evaluation

    def _evaluation_due(self) -> bool:
        step, every = self.state.step, self.run.eval_every
        due = step == self.total or (every > 0 and step % every == 0)
        return due and 0 < step != self.state.evaluated_at

    def _evaluate(self) -> None:
        """Validation: a line, the curve, the best so far, early stopping; then a checkpoint where one is due.
        Every evaluation reads the same part of the split, the last one too: else the text would choose the best."""
        self._look()
        with self.clock.evaluating():
            metrics = self._measure("validation", self.run.eval_tokens)
        best = self.state.judge(metrics, self.run.budget.patience)
        self._log({"kind": "eval", "split": "validation", **metrics})
        if self.state.stopped_early:
            self._log({"kind": "event", "event": "early stop", "best_step": (self.state.best or {}).get("step")})
        if best or self.state.stopped_early or self.state.step == self.total or self._save_due():
            self._save(best=best)

    def _measure(self, split: str, limit: int | None = None) -> dict[str, Any]:
        """A split's metrics; a signal ends it at once, for it can be measured again."""

        def between(number: int) -> None:
            self.home.beat(step=self.state.step, total=self.total, state=split)
            if self.world.size > 1 and self.world.agree(self.signals.asked is not None, number):
                raise StopAsked  # on all ranks at once

        source = Watched(self.source, between)
        rows = reading_batch(self.run.budget.batch, self.run.data.context, self.device)
        watch = self.signals.interruptible() if self.world.size == 1 else contextlib.nullcontext()
        try:
            with watch, autocast(self.device, self.step.dtype):
                found = self.objective.evaluate(self.model, source, split, device=self.device, batch=rows, limit=limit)
        except StopAsked:
            self.model.train()
            raise self._stop() from None
        self.right = source.right
        return dict(found)

    # -- saving

    def _save_due(self) -> bool:
        every = self.options.checkpoint_every or self.run.eval_every or max(1, self.total // 10)
        if self.state.step % every or self.state.step == self.saved_at:
            return False
        self._look()
        return self.state.high_since is None  # weights that may be exploding must not push out the good ones

    def _save(self, *, best: bool = False, wait: bool = False) -> None:
        """A snapshot on the host; hashing and writing happen behind the loop's back."""
        self._look()
        self.state.seconds = self.clock.seconds
        weights = stored(self.model, skip=self._left_out())
        if self.options.compact or self.world.sharded:  # else the writer compares the copies
            oelm.verify(self.model)
        self.checkpoints.save(
            self.state.step,
            {
                "model": weights,
                "optimizer": self.optimizers.tensors(),
                "extra": {**self.step.tensors(), **self.clock.tensors(), **self.world.random_states()},
            },
            self.state.to_dict(),
            best=best,
            check=self.home.sync_metrics,
            frozen=frozen_hashes(self.model),
        )
        self.saved_at = self.state.step
        if wait:
            self.checkpoints.wait()

    def _stop(self) -> Preempted:
        """Save and leave, at a step boundary."""
        self.checkpoints.wait()
        if self.state.step and self.state.step != self.saved_at:
            self._save(wait=True)
        return Preempted(f"stopped at step {self.state.step}")

    # -- the end

    def _finish(self) -> dict[str, Any]:
        self.checkpoints.wait()
        self.world.barrier()
        oelm.verify(self.model)
        self.known["frozen_digest"]["end"] = frozen_digest(self.model)
        if self.run.eval_tokens is not None:  # of the last weights, the whole split
            self.state.validation = self._measure("validation")
        test = self._test()
        if self.right:
            text = examples.contents(self.right)
            self.home.write_text(examples.FILE, text)
            self.known["examples"] = examples.named(text)
        return self.leave("done", None, test=test)

    def _test(self) -> dict[str, Any]:
        """The test split, read once, with the weights that validation chose."""
        best = self.state.best
        if best is not None and best["step"] != self.state.step:
            weights, step = load_weights(self.home.path, "best")
            if step != best["step"]:
                raise CheckpointError(
                    f"{self.home.path}: the best checkpoint is of step {step}, validation chose {best['step']}; run again in a new folder"
                )
            put_weights(self.model, weights, self.home.path, skip=self._left_out())
        return self._measure("test")

    def _diverged(self, why: Diverged) -> dict[str, Any]:
        """Divergence is a result: the last good weights are kept, the record says where it ended."""
        self._train_line()
        self._log({"kind": "event", "event": "diverged", "why": str(why)})
        self.progress.say(f"diverged: {why}")
        self.checkpoints.wait()
        if why.good == self.state.step:  # masked
            if self.state.step and self.state.step != self.saved_at:
                self._save(wait=True)
        elif not self.checkpoints.step_back(why.good) and self.state.step != self.saved_at:
            self._save(wait=True)  # it went wrong before anything was saved
        self.known["frozen_digest"]["end"] = frozen_digest(self.model)
        return self.leave("diverged", str(why))

    def leave(self, status: str, error: str | None, *, test: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write the record; whatever happened, every field is there."""
        state = self.state
        known = dict(self.known)
        if "data" in known:
            known["data"] = known["data"] | {"tokens_seen": state.tokens, "examples_seen": state.examples}
        result = record(
            self.run,
            run_id=self.name,
            study=self.options.study,
            row=self.options.row,
            status=status,
            error=error,
            metrics={"validation": state.validation, "test": test, "best": state.best},
            cost=cost(self.clock, self.device, state.step),
            curve=state.curve,
            **known,
        )
        ceiling = self.ready.ceiling if self.ready is not None else None
        mfu = self._mfu(self.clock.cost()[1])
        self.home.write("timing_stats.json", timing(self.clock, state, self.device, mfu=mfu, ceiling=ceiling))
        self.home.write("result.json", result)
        return result

    def leave_quietly(self, status: str, error: str | None) -> None:
        """The record of a run that did not end by itself; a full disk must not hide why."""
        with contextlib.suppress(OelmError):
            self.leave(status, error)
