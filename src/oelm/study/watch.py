"""Watching: one snapshot of every run of a folder, cheap enough to take every second. Reads only; no torch here.

Files are read from where the last look stopped, and curves are thinned, so that long runs cost no more than short ones.
A trainer is never asked anything: its files say it all.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from oelm.errors import ConfigError, OelmError, nearest
from oelm.study import cost
from oelm.study.folder import Look, look, run_folders, study_folders
from oelm.train.run import Run
from oelm.values import load_toml


POINTS = 400  # of a curve; beyond it every second point is dropped
WANTED = ".wanted.json"  # what the runner has queued, beside the run folders
BLOCKS = "▁▂▃▄▅▆▇█"
ORDER = ("running", "stalled", "failed", "foreign", "diverged", "partial", "queued", "done")


class Series:
    """The curves of one metrics.jsonl, read on from where the last look stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._every = 1
        self._seen = 0
        self.train: list[tuple[int, float]] = []
        self.evals: list[tuple[int, float]] = []
        self.last_train: dict[str, Any] = {}
        self.last_eval: dict[str, Any] = {}
        self._pace: tuple[int, float] | None = None
        self.step_seconds: float | None = None

    def update(self) -> None:
        """Read what was appended; start again when the file was cut back (a resumed run does that)."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:
                self.__init__(self.path)  # type: ignore[misc]
            if size == self._offset:
                return
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(16_000_000)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1  # the last line may still be being written
        self._offset += whole
        for raw in data[:whole].splitlines():
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        loss = line.get("loss")
        number = float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None
        if line.get("kind") == "train":
            self.last_train = line
            self._keep_pace(line)
            self._seen += 1
            if number is not None and self._seen % self._every == 0:
                self.train.append((line["step"], number))
            if len(self.train) > POINTS:
                self.train = self.train[1::2]
                self._every *= 2
        elif line.get("kind") == "eval" and line.get("split", "validation") == "validation":
            self.last_eval = line
            if number is not None:
                self.evals.append((line["step"], number))
            if len(self.evals) > POINTS:
                self.evals = self.evals[1::2]

    def _keep_pace(self, line: dict[str, Any]) -> None:
        seconds = line.get("seconds")
        if not isinstance(seconds, int | float):
            return
        if self._pace is not None and line["step"] > self._pace[0] and seconds > self._pace[1]:
            self.step_seconds = (seconds - self._pace[1]) / (line["step"] - self._pace[0])
        self._pace = (line["step"], float(seconds))


class Watcher:
    """Snapshots of the runs of one folder (or of one study in it)."""

    def __init__(self, runs: Path, study: str | None = None) -> None:
        self.runs = runs
        self.study = study
        self._series: dict[Path, Series] = {}
        self._runs: dict[Path, tuple[float, Run | None]] = {}

    def snapshot(self, *, curves: bool = False) -> dict[str, Any]:
        """Every run as plain data, active ones first."""
        rows: list[dict[str, Any]] = []
        for folder in self._studies():
            here = run_folders(folder)
            rows += [self._row(look(path), curves) for path in here]
            there = {path.name for path in here}
            rows += [_queued(folder.name, one) for one in _wanted(folder) if one.get("id") not in there]
        rows.sort(key=lambda row: (ORDER.index(row["state"]), row["study"], row["id"]))
        return {"time": time.time(), "runs": rows, "states": dict(Counter(row["state"] for row in rows))}

    def _studies(self) -> list[Path]:
        folders = study_folders(self.runs)
        if self.study is None:
            return folders
        chosen = [folder for folder in folders if folder.name == self.study]
        if not chosen and folders:
            raise ConfigError(
                f"study {self.study!r}: no runs under {self.runs}; {nearest(self.study, [f.name for f in folders])}"
            )
        return chosen

    def _row(self, seen: Look, curves: bool) -> dict[str, Any]:
        series = self._series.setdefault(seen.folder, Series(seen.folder / "metrics.jsonl"))
        series.update()
        run = self._run(seen.folder)
        record = seen.record or {}
        beat = _heartbeat(seen.folder)
        step = (
            max((_whole(one.get("step")) or 0 for one in (beat, series.last_train, series.last_eval)), default=0)
            or None
        )
        steps = _whole(beat.get("total")) or (cost.steps(run) if run else None)
        moving = seen.state == "running"
        left = (steps - step) if steps and step is not None and moving else None
        row: dict[str, Any] = {
            "study": seen.folder.parent.name,
            "id": seen.id,
            "state": seen.state,
            "step": step,
            "steps": steps,
            "loss": _number(series.last_train.get("loss")),
            "validation": _validation(record, series),
            "tokens_per_s": _number(series.last_train.get("tokens_per_s")) if moving else None,
            "eta_s": left * series.step_seconds if left is not None and series.step_seconds else None,
            "device": _device(seen.folder, record),
            "heartbeat_age": seen.heartbeat_age if seen.state in ("running", "stalled", "partial") else None,
            "host": seen.claim.host if seen.claim and moving else None,
            "error": str(record["error"]) if record.get("error") else (seen.problem or None),
            "spark": sparkline([loss for _, loss in series.train]),
        }
        if curves:
            row["curve"] = series.train[-POINTS:]
            row["evals"] = series.evals
        return row

    def _run(self, folder: Path) -> Run | None:
        """The run of a folder, read once."""
        path = folder / "run.toml"
        try:
            at = path.stat().st_mtime
        except OSError:
            return None
        kept = self._runs.get(folder)
        if kept is None or kept[0] != at:
            try:
                kept = (at, Run.read(load_toml(path), where=str(path)))
            except OelmError:
                kept = (at, None)
            self._runs[folder] = kept
        return kept[1]


def _wanted(folder: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads((folder / WANTED).read_bytes())
    except (OSError, ValueError):
        return []
    return [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []


def _queued(study: str, one: dict[str, Any]) -> dict[str, Any]:
    empty = dict.fromkeys(("step", "loss", "validation", "tokens_per_s", "eta_s", "device", "heartbeat_age", "host"))
    row = {"study": study, "id": str(one.get("id")), "state": "queued", "steps": one.get("steps"), **empty}
    return row | {"error": None, "spark": "", "curve": [], "evals": []}


def _validation(record: dict[str, Any], series: Series) -> dict[str, float] | None:
    said = (record.get("metrics") or {}).get("validation") or series.last_eval
    names = ("loss", "perplexity", "accuracy", "f1", "exact_match")
    found = {name: _number(said.get(name)) for name in names if isinstance(said, dict) and name in said}
    return {name: value for name, value in found.items() if value is not None} or None


def _heartbeat(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / "heartbeat").read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _device(folder: Path, record: dict[str, Any]) -> str | None:
    said = (record.get("environment") or {}).get("device")
    if said is None:
        try:
            said = json.loads((folder / "environment.json").read_bytes()).get("device")
        except (OSError, ValueError, AttributeError):
            return None
    return str(said) if said is not None else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def sparkline(values: Iterable[float], width: int = 16) -> str:
    """A curve in block characters: the mean of each of `width` parts."""
    numbers = list(values)
    if not numbers:
        return ""
    size = max(1, math.ceil(len(numbers) / width))
    means = [sum(part) / len(part) for part in (numbers[i : i + size] for i in range(0, len(numbers), size))]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


def main_metric(validation: dict[str, float] | None) -> str:
    """The one number of an evaluation that a person reads first."""
    for name, form in (
        ("accuracy", "acc {:.2%}"),
        ("f1", "f1 {:.2%}"),
        ("perplexity", "ppl {:.2f}"),
        ("loss", "{:.3f}"),
    ):
        if validation and name in validation:
            return form.format(validation[name])
    return ""


def study_states(runs: Path, study: str | None = None) -> list[dict[str, Any]]:
    """Counts of states by study, for `oelm status`."""
    rows = Watcher(runs, study).snapshot()["runs"]
    result = []
    for name in dict.fromkeys(sorted(row["study"] for row in rows)):
        states = Counter(row["state"] for row in rows if row["study"] == name)
        try:
            changed = max(path.stat().st_mtime for path in run_folders(runs / name))
            when = datetime.fromtimestamp(changed).isoformat(" ", "minutes")
        except (ValueError, OSError):
            when = ""
        ordered = {state: states[state] for state in ORDER if states[state]}
        result.append({"study": name, "runs": sum(states.values()), "states": ordered, "changed": when})
    return result
