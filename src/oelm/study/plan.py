"""What a study wants, what of it there is, what the rest will cost, and what will not work. No torch here.

Costs are estimates until runs were measured, and say which. Warnings name seeds that cannot reach significance after
the family's Holm correction, data and models that are missing, rows whose settings were edited after they had results.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.study import cost
from oelm.study.archive import adopt, twin
from oelm.study.folder import folder_bytes, look, records, run_folders
from oelm.study.needs import missing, partial
from oelm.study.rates import chosen_rates
from oelm.study.rows import Planned, Study, cells, expand
from oelm.study.runner import Options, wanted


ALPHA = 0.05
STATES = ("done", "diverged", "running", "stalled", "partial", "queued", "waiting", "failed", "foreign")


@dataclass
class ArmPlan:
    """One arm: how many runs, in which states, and how large its model is."""

    name: str
    states: Counter[str] = field(default_factory=Counter)
    sizes: list[cost.Parameters] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return sum(self.states.values())


@dataclass
class Plan:
    """A study and its folder, compared."""

    study: Study
    folder: Path
    rows: list[tuple[Planned, str]]
    arms: dict[str, ArmPlan]
    kind: str  # of the device whose speed is reckoned with: cuda or cpu
    seconds: float  # of what is left, on one device
    seconds_all: float
    measured: int  # runs that corrected the estimate
    bytes_left: int
    bytes_measured: bool
    smallest_p: float | None
    tests: int
    notes: list[str]
    warnings: list[str]

    @property
    def states(self) -> Counter[str]:
        return sum((arm.states for arm in self.arms.values()), Counter())

    def to_dict(self) -> dict[str, Any]:
        """The plan for machines."""
        return {
            "study": self.study.name,
            "question": self.study.question,
            "folder": str(self.folder),
            "wanted": len(self.rows),
            "states": {state: self.states[state] for state in STATES if self.states[state]},
            "device": self.kind,
            "device_hours_left": self.seconds / 3600,
            "device_hours_all": self.seconds_all / 3600,
            "measured_runs": self.measured,
            "disk_bytes_left": self.bytes_left,
            "arms": [
                {
                    "arm": arm.name,
                    "runs": arm.wanted,
                    "states": dict(arm.states),
                    "parameters": [{"total": size.total, "frozen": size.frozen} for size in arm.sizes],
                }
                for arm in self.arms.values()
            ],
            "tests": self.tests,
            "smallest_p": self.smallest_p,
            "notes": self.notes,
            "warnings": self.warnings,
            "rows": [
                {"row": one.row, "id": one.id, "arm": one.arm, "purpose": one.purpose, "state": state}
                for one, state in self.rows
            ],
        }


def make_plan(study: Study, runs: Path, options: Options | None = None) -> Plan:
    """Compare what the study wants with what its folder holds."""
    options = options or Options()
    folder = runs / study.name
    found = records(folder)
    rates = chosen_rates(study, found, options.overrides)
    rows = _rows(study, folder, rates, options)
    estimator = cost.Estimator(found, options.devices[0])
    by_id = {record.get("run_id"): record for record in found}
    arms: dict[str, ArmPlan] = {}
    seconds = seconds_all = 0.0
    left: list[Planned] = []
    for one, state in rows:
        arm = arms.setdefault(one.arm, ArmPlan(one.arm))
        arm.states[state] += 1
        size = cost.parameters(one.run, by_id.get(one.id))
        if size is not None and (size.total, size.frozen) not in {(s.total, s.frozen) for s in arm.sizes}:
            arm.sizes.append(size)
        needed = estimator.seconds(one.run)
        seconds_all += needed
        if state not in ("done", "diverged"):
            seconds += needed
            left.append(one)
    per_run = _bytes_per_run(folder, [one for one, state in rows if state == "done"])
    bytes_left = sum(per_run if per_run else cost.disk_bytes(one.run, cost.KEPT[options.keep]) for one in left)
    tests, smallest, said = significance(study)
    return Plan(
        study=study,
        folder=folder,
        rows=rows,
        arms=arms,
        kind=estimator.kind,
        seconds=seconds,
        seconds_all=seconds_all,
        measured=estimator.measured,
        bytes_left=bytes_left,
        bytes_measured=per_run > 0,
        smallest_p=smallest,
        tests=tests,
        notes=[*_notes(study, rates, rows, options), *_twins(folder, rows), *partial(left, options.data_folder)],
        warnings=[
            *said,
            *_edited(folder, rows),
            *_problems(folder, rows),
            *missing(left, options.data_folder),
            *_no_room(runs, bytes_left),
        ],
    )


def take_over(study: Study, runs: Path, options: Options) -> int:
    """Copy what other studies have finished of this one into its folder; how many runs. A run is a value, whoever wanted it."""
    folder, count, new = runs / study.name, 0, 1
    while new:  # tuning that was taken over names the comparisons that are wanted next
        new = sum(adopt(folder / one.id) is not None for one in wanted(study, folder, options))
        count += new
    return count


def _rows(study: Study, folder: Path, rates: Mapping[str, float], options: Options) -> list[tuple[Planned, str]]:
    """Every run with its state; a comparison whose rate is not chosen yet is `waiting`, under a rate that stands in."""
    stand_in = {} if study.tuning is None else dict.fromkeys(_tuned_cells(study), study.tuning.rates[0])
    every = expand(study, stand_in | dict(rates), options.overrides, options.rows)
    result: list[tuple[Planned, str]] = []
    for one in every:
        waiting = study.tuning is not None and one.purpose == "compare" and one.cell not in rates
        result.append((one, "waiting" if waiting else look(folder / one.id).state))
    return result


def _tuned_cells(study: Study) -> list[str]:
    return [cell.name for cell in cells(study)]


def _bytes_per_run(folder: Path, done: list[Planned]) -> int:
    """What finished runs take on disk, on average; 0 when there are none."""
    sample = done[:20]
    return round(sum(folder_bytes(folder / one.id) for one in sample) / len(sample)) if sample else 0


# ---- significance


def smallest_p(seeds: int) -> float:
    """The smallest p that a two-sided sign-flip test over paired seeds can give."""
    return float(2.0 ** (1 - seeds))


def seeds_needed(tests: int, alpha: float = ALPHA) -> int:
    """The fewest seeds whose smallest p passes Holm's first step in a family of that many tests."""
    return 1 + math.ceil(math.log2(max(1, tests) / alpha))


def significance(study: Study) -> tuple[int, float | None, list[str]]:
    """Tests of the family, the smallest p its seeds can reach, and a warning where that is not enough."""
    tests = len(study.contrasts())
    if not tests:
        return 0, None, []
    seeds = _paired_seeds(study)
    if not seeds:
        return tests, None, []
    least, needed = smallest_p(seeds), seeds_needed(tests)
    if seeds >= needed:
        return tests, least, []
    return (
        tests,
        least,
        [
            f"{seeds} seed{'s' if seeds > 1 else ''} cannot reach significance: the smallest sign-flip p is {least:.3g},"
            f" Holm over {tests} comparison{'s' if tests > 1 else ''} needs {ALPHA / tests:.3g}; use {needed} seeds"
        ],
    )


def _paired_seeds(study: Study) -> int:
    if study.comparison is not None:
        return len(study.comparison.seeds)
    if "seed" in study.axes:
        return len(study.axes["seed"])
    per_arm = Counter(row.arm for row in study.rows)
    return min(per_arm.values()) if per_arm and not study.arms else 1


# ---- notes and warnings


def _notes(study: Study, rates: Mapping[str, float], rows: list[tuple[Planned, str]], options: Options) -> list[str]:
    notes = list(study.notes)
    if options.rows:
        picked = [note for one, _ in rows for note in (f"{one.row}: {text}" for text in one.notes)]
        notes += picked
    if study.tuning:
        grid = sorted(study.tuning.rates)
        for cell, rate in rates.items():
            if len(grid) > 1 and rate in (grid[0], grid[-1]):
                end = "smallest" if rate == grid[0] else "largest"
                notes.append(f"{cell}: chose {rate:g}, the {end} rate tried; the best may lie beyond it")
    return notes


def _twins(folder: Path, rows: list[tuple[Planned, str]]) -> list[str]:
    found = sum(twin(folder / one.id) is not None for one, state in rows if state == "queued")
    return [f"{found} of these runs are finished in other studies; `oelm run` takes them over"] if found else []


def _edited(folder: Path, rows: list[tuple[Planned, str]]) -> list[str]:
    """Rows that have results under other settings than the study now asks for."""
    wanted = {one.id for one, _ in rows}
    by_row = {one.row: one.id for one, _ in rows}
    said, strangers = [], 0
    for path in run_folders(folder):
        if path.name in wanted:
            continue
        row = path.name[:-9]
        if row in by_row:
            said.append(
                f"{row}: has results under other settings ({path.name}), kept but not used;"
                f" `oelm runs diff {path.name} {by_row[row]}` once the new one exists, `oelm runs rm` to drop it"
            )
        else:
            strangers += 1
    if len(said) > 3:
        said = [*said[:3], f"and {len(said) - 3} more rows have results under other settings"]
    if strangers:
        said.append(f"{strangers} run folder{'s' if strangers > 1 else ''} in {folder} belong to no row asked for here")
    return said


def _problems(folder: Path, rows: list[tuple[Planned, str]]) -> list[str]:
    return [look(folder / one.id).problem for one, state in rows if state == "foreign"]


def _no_room(runs: Path, needed: int) -> list[str]:
    with contextlib.suppress(OSError):
        place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if free < needed:
            return [
                f"disk: {needed / 1e9:,.1f} GB wanted, {free / 1e9:,.1f} GB free in {place}; free space or use --runs"
            ]
    return []
