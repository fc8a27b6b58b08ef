"""Runs a study on this machine's devices: one worker a slot, until nothing is left to do or the time is over.

Idempotent and resumable: what is done is left alone, what is partial continues, a row that another runner holds is
waited for. Only what a retry can mend is tried again. The runner never trains; killed, it takes its workers along.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.errors import MachineError, Preempted
from oelm.study import claim, cost, sharing
from oelm.study.child import Options, Worker, task_of
from oelm.study.folder import SCHEMA, look, records
from oelm.study.rates import chosen_rates, rates_that_failed, waiting_cells
from oelm.study.rows import Planned, Study, expand
from oelm.study.schedule import Schedule
from oelm.study.watch import WANTED
from oelm.train.folder import machine_error, write_atomically


__all__ = ["Options", "Outcome", "Runner", "task_of", "wanted"]

MENDABLE = {75, 6}  # preempted, busy: the same run may succeed a moment later
PATIENCE = 2  # further tries of a run whose worker was killed, or that was preempted
WAIT = 2.0  # seconds between looks at rows that other runners hold


@dataclass
class Outcome:
    """What became of every run that was wanted."""

    finished: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # row -> one line
    blocked: list[str] = field(default_factory=list)  # one line each: why some runs could not start

    @property
    def complete(self) -> bool:
        return not self.failed and not self.blocked


def wanted(study: Study, folder: Path, options: Options | None = None) -> list[Planned]:
    """Every run that can be named now, given what the folder's records say about rates."""
    options = options or Options()
    rates = chosen_rates(study, records(folder), options.overrides)
    return expand(study, rates, options.overrides, options.rows)


class Runner:
    """One pass over a study; `run` returns when every run is finished, failed or blocked."""

    def __init__(self, study: Study, runs: Path, options: Options, say: Callable[[str], None] = print) -> None:
        self.study = study
        self.folder = runs / study.name
        self.options = options
        self.say = say
        self.outcome = Outcome()
        self.tries: dict[str, int] = {}
        self.alone: set[str] = set()  # runs that were too big beside others on one device
        self.workers: list[Worker] = []
        self.environment: dict[str, str] = {}  # of workers, beside their device
        self.selector = selectors.DefaultSelector()
        self.schedule = Schedule(options.devices[0], options.minutes)
        self.stopping: int = 0
        self._queue: list[Planned] = []
        self._elsewhere: set[str] = set()
        self._late = 0  # runs that are left when the time is over
        self._failed_before: dict[str, int] = {}  # run -> when its record of a failure was written, before this pass
        self._beat = 0.0
        self._look = 0.0

    # ---- the loop

    def run(self) -> Outcome:
        """Everything that can be run, run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".workers").mkdir(exist_ok=True)
        except OSError as error:
            raise machine_error(error, self.folder, "opening the study's folder") from None
        old = {number: signal.signal(number, self._asked) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            self._refill(first=True)
            with sharing.shared(self.options.devices, self.options.per_device, self.say) as self.environment:
                try:
                    self._until_settled()
                finally:
                    self._shut_down()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        if self.stopping == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stopping or self._late:
            word = "asked to stop" if self.stopping else f"the time is over with {self._late} runs or more to do"
            raise Preempted(f"study {self.study.name}: {word}; what ran is saved, the same command continues")
        self._say_what_waits()
        return self.outcome

    def _say_what_waits(self) -> None:
        """Comparisons that got no rate, where no failure that was said already is the reason."""
        found = records(self.folder)
        dead = rates_that_failed(self.study, found, self.options.overrides)
        rates = chosen_rates(self.study, found, self.options.overrides)
        for cell, tuned_by in waiting_cells(self.study, rates, self.options.rows).items():
            if cell in dead:
                self.outcome.blocked.append(f"{cell}: diverged at every rate that was tuned; add smaller tuning.rates")
            elif not any(row.startswith(f"{tuned_by}-tune-") for row in self.outcome.failed):
                self.outcome.blocked.append(
                    f"{cell}: waits for its rate; run its tuning too (--rows '{tuned_by}-tune-*')"
                )

    def _until_settled(self) -> None:
        while (self._queue or self._elsewhere or self._busy()) and not self.stopping:
            self._start_what_can_start()
            if self.schedule.over or not (self._elsewhere or self._busy()):
                self._late = len(self._queue) + len(self._elsewhere) + sum(1 for one in self.workers if one.run)
                return
            self._wait_for_answers()
            self._beat_claims()
            self._look_elsewhere()

    def _asked(self, number: int, frame: object) -> None:
        if self.stopping:  # a second time: at once
            for worker in self.workers:
                worker.process.kill()
        self.stopping = number

    def _busy(self) -> bool:
        return any(worker.run for worker in self.workers)

    def _refill(self, *, first: bool = False) -> None:
        """Queue what is wanted and not finished."""
        known = {one.id for one in self._queue} | {worker.run.id for worker in self.workers if worker.run}
        settled = {*self.outcome.finished, *self.outcome.already, *self.outcome.diverged, *self.outcome.failed}
        for one in wanted(self.study, self.folder, self.options):
            if one.id in known or one.row in settled or one.id in self._elsewhere:
                continue
            seen = look(self.folder / one.id)
            if seen.state in ("done", "diverged"):
                if first:
                    self.outcome.already.append(one.row)
                else:
                    (self.outcome.finished if seen.state == "done" else self.outcome.diverged).append(one.row)
            elif seen.state == "foreign":
                self._fail(one, seen.problem)
            else:
                if first and seen.state == "failed":
                    self._failed_before[one.id] = self._recorded(one)
                self._queue.append(one)
        self.schedule.learn(records(self.folder))
        self._queue = self.schedule.ordered(self._queue)
        queued = [{"id": one.id, "row": one.row, "steps": cost.steps(one.run)} for one in self._queue]
        with contextlib.suppress(OSError, MachineError):  # for the monitor only
            write_atomically(self.folder / WANTED, json.dumps(queued))

    # ---- starting

    def _start_what_can_start(self) -> None:
        for device in self.options.devices:
            while self._queue and self._free_slot(device):
                if not self._start_next(device):
                    return

    def _free_slot(self, device: str) -> bool:
        here = [worker for worker in self.workers if worker.device == device and worker.run]
        if any(worker.run and worker.run.id in self.alone for worker in here):
            return False
        return len(here) < self.options.per_device

    def _start_next(self, device: str) -> bool:
        """Claim and start the next run that may start on the device; False when there is none just now."""
        busy_here = any(worker.device == device and worker.run for worker in self.workers)
        for one in list(self._queue):
            if (one.id in self.alone and busy_here) or not self.schedule.fits(one, self.folder / one.id):
                continue
            room = self._room(one)
            self._queue.remove(one)
            if room:
                self._block(one, room)
                continue
            try:
                held = claim.take(self.folder, one.id)
            except OSError as error:
                self._fail(one, str(machine_error(error, self.folder, "claiming a row")))
                continue
            if held is None:
                self._elsewhere.add(one.id)
                continue
            seen = look(self.folder / one.id)
            if seen.state in ("done", "diverged"):  # finished since we looked
                held.release()
                self._settle(one, 0, "")
                continue
            if seen.record is not None and self._failed_elsewhere(one, seen.record):
                held.release()
                self._fail(one, str(seen.record.get("error")))
                continue
            self._start(one, held, device)
            return True
        return False

    def _failed_elsewhere(self, one: Planned, record: Mapping[str, Any]) -> bool:
        """Whether another runner has just failed the row: to try it again here would mend nothing."""
        ours = one.id in self.tries
        return record.get("status") == "failed" and not ours and self._recorded(one) != self._failed_before.get(one.id)

    def _recorded(self, one: Planned) -> int:
        try:
            return (self.folder / one.id / "result.json").stat().st_mtime_ns
        except OSError:
            return 0

    def _room(self, one: Planned) -> str:
        """Why the disk has no room for the run; empty when it has."""
        needed = cost.disk_bytes(one.run)
        free = shutil.disk_usage(self.folder).free
        if free >= needed:
            return ""
        return (
            f"{free / 1e6:,.0f} MB free in {self.folder}, needs about {needed / 1e6:,.0f} MB; free space and run again"
        )

    def _start(self, one: Planned, held: claim.Held, device: str) -> None:
        task = task_of(one, self.study.name, self.folder, "cpu" if device == "cpu" else "cuda", self.options)
        idle = (w for w in self.workers if w.device == device and not w.run and not w.retired)
        worker = next((w for w in idle if w.process.poll() is None), None)
        if worker is None:
            try:
                worker = self._new_worker(device)
            except OSError as error:
                held.release()
                raise MachineError(f"a worker cannot be started ({error.strerror}); check memory and limits") from None
        worker.give(one, held, task)

    def _new_worker(self, device: str) -> Worker:
        name = f"{socket.gethostname()}-{os.getpid()}-{device}.log"
        worker = Worker(device, self.options, self.folder / ".workers" / name, self.environment)
        self.workers.append(worker)
        self.selector.register(worker.answers, selectors.EVENT_READ, worker)
        return worker

    # ---- answers

    def _wait_for_answers(self) -> None:
        for key, _ in self.selector.select(timeout=1.0 if self._busy() else 0.2):
            worker: Worker = key.data
            answer = worker.answer()
            if answer is not None:
                self._answered(worker, int(answer["code"]), str(answer["message"]))
            elif worker.gone:
                self._ended(worker)

    def _ended(self, worker: Worker) -> None:
        """The process is over: fine when it had no run, else its run was cut off."""
        self.selector.unregister(worker.answers)
        self.workers.remove(worker)
        status = worker.close()
        if worker.run is None:
            return
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if -status == signal.SIGKILL else ""
            self._answered(worker, -1, f"the trainer was killed by {name}{hint}; see {self.folder / worker.run.id}")
        else:
            self._answered(worker, 1, f"the trainer ended with status {status}; see {self.folder / '.workers'}")

    def _answered(self, worker: Worker, code: int, message: str) -> None:
        one, held = worker.run, worker.held
        if one is None or held is None:
            return
        seconds = time.monotonic() - worker.started
        worker.run = worker.held = None
        worker.retired = code not in (0, 7)  # it ends after trouble: no run may start in its remains
        if self.stopping:
            held.release()
            return
        tries = self.tries[one.id] = self.tries.get(one.id, 0) + 1
        shared = self.options.per_device > 1 and one.id not in self.alone
        if code == 9 and shared:
            self.alone.add(one.id)
            self.say(f"{one.row}: out of memory beside other runs; tried again alone")
            self._queue.append(one)
        elif (code in MENDABLE or code < 0) and tries <= PATIENCE:
            self.say(f"{one.row}: {message}; try {tries + 1} of {PATIENCE + 1}")
            self._queue.insert(0, one)
        else:
            self._settle(one, code, message, seconds)
        held.release()
        if one.purpose == "tune":
            self._refill()

    def _settle(self, one: Planned, code: int, message: str, seconds: float = 0.0) -> None:
        state = look(self.folder / one.id).state
        if code in (0, 7) and state == "diverged":
            self.outcome.diverged.append(one.row)
            self._progress(one, "diverged", seconds)
        elif code == 0:
            self.outcome.finished.append(one.row)
            if seconds:
                self.schedule.took(one, seconds)
            self._progress(one, "done", seconds)
        else:
            self._fail(one, message or f"exit code {code}", code)

    def _progress(self, one: Planned, word: str, seconds: float) -> None:
        settled = len(self.outcome.finished) + len(self.outcome.diverged) + len(self.outcome.failed)
        left = len(self._queue) + sum(1 for worker in self.workers if worker.run)
        self.say(f"{word:<9}{one.id}  {seconds:,.0f} s  ({settled} settled, {left} left)")

    def _fail(self, one: Planned, message: str, code: int = 1) -> None:
        self.outcome.failed[one.row] = message
        self._record_failure(one, message)
        self._progress(one, "failed", 0.0)
        self.say(f"  {message}")

    def _block(self, one: Planned, why: str) -> None:
        self.outcome.blocked.append(f"{one.row}: {why}")
        self.say(f"not started {one.row}: {why}")

    def _record_failure(self, one: Planned, message: str) -> None:
        """A failed run is a result too; the trainer that died could not write it."""
        folder = self.folder / one.id
        if look(folder).record is not None or look(folder).state == "foreign":
            return
        record = {
            "schema": SCHEMA,
            "run_id": one.id,
            "study": self.study.name,
            "row": one.row,
            "status": "failed",
            "run": one.run.model_dump(mode="json"),
            "metrics": {"validation": None, "test": None, "best": None},
            "error": message,
        }
        with contextlib.suppress(OSError, MachineError):  # the disk may be what failed
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "result.json", json.dumps(record, indent=1) + "\n")

    # ---- other runners

    def _beat_claims(self) -> None:
        if time.monotonic() - self._beat < claim.BEAT:
            return
        self._beat = time.monotonic()
        for worker in self.workers:
            if worker.run and worker.held and not worker.held.beat():
                self.say(f"{worker.run.row}: taken over by another runner while this one stood still; left to it")
                self._elsewhere.add(worker.run.id)
                worker.run = worker.held = None
                worker.process.kill()

    def _look_elsewhere(self) -> None:
        """Rows that other runners held: finished ones are settled, abandoned ones queued again."""
        if not self._elsewhere or time.monotonic() - self._look < WAIT:
            return
        if not self._look:
            self.say(f"{len(self._elsewhere)} rows are held by another runner; waiting for them")
        self._look = time.monotonic()
        before = len(self._elsewhere)
        for run in list(self._elsewhere):
            held = claim.holder(self.folder, run)
            if held is None or not held.alive:
                self._elsewhere.discard(run)
        if len(self._elsewhere) != before:
            self._refill()

    # ---- the end

    def _shut_down(self) -> None:
        """Ask busy workers to save, wait a while, then end them; give the claims back."""
        for worker in self.workers:
            if worker.run:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.terminate()
            elif worker.process.stdin is not None:
                with contextlib.suppress(OSError):
                    worker.process.stdin.close()
        for worker in self.workers:
            with contextlib.suppress(KeyError):
                self.selector.unregister(worker.answers)
            worker.close()
            if worker.held:
                worker.held.release()
        self.workers = []
        self.selector.close()
