"""A study file becomes runs with names and identities. No torch here.

Refuses rows that share a name or a run, and axes that expand to more than LIMIT runs. Every row is checked when the
study is read, so that a mistake is found before the first run.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from oelm.errors import ConfigError, nearest
from oelm.study.model import (
    BUDGETS,
    HIGHER_IS_BETTER,
    Contrast,
    Margin,
    Row,
    Slurm,
    Study,
    Tuning,
    axis_label,
    base_arm,
    matches,
    row_arm,
)
from oelm.study.settings import parse_overrides, with_overrides
from oelm.train.run import Run, run_id
from oelm.values import explain, load_toml


__all__ = [
    "BUDGETS",
    "HIGHER_IS_BETTER",
    "LIMIT",
    "Cell",
    "Contrast",
    "Margin",
    "Planned",
    "Row",
    "Slurm",
    "Study",
    "axis_label",
    "cell_name",
    "cells",
    "expand",
    "load_study",
    "parse_overrides",
    "read_study",
    "studies_here",
    "with_overrides",
]

LIMIT = 20_000  # runs of one study; more is a mistake in the axes
Purpose = Literal["original", "tune", "compare"]


@dataclass(frozen=True)
class Planned:
    """One run that a study wants: its unique row name, its arm, why it runs, and the run itself.

    `cell` names the arm at its axes: runs of one cell differ in rate and seed only. `at` holds the axes' values.
    """

    row: str
    arm: str
    purpose: Purpose
    run: Run
    id: str
    cell: str
    at: dict[str, Any] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Cell:
    """An arm at one point of the axes, before rate and seed."""

    name: str
    arm: str
    at: dict[str, Any]
    settings: dict[str, Any]
    tuned_by: str  # the cell whose tuning runs choose its rate


# ---- reading


def studies_here() -> dict[str, Path]:
    """Every study known by name: ./studies first, then those that come with the package."""
    found: dict[str, Path] = {}
    for folder in _study_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def _study_folders() -> list[Path]:
    packaged = Path(str(resources.files("oelm.study"))) / "builtin"
    checkout = Path(__file__).resolve().parents[3] / "studies"  # an editable installation
    return [folder for folder in (Path("studies"), packaged, checkout) if folder.is_dir()]


def load_study(path_or_name: str | Path) -> Study:
    """The study of a TOML file or of a name (./studies, then the package's own)."""
    text = str(path_or_name)
    path = Path(text)
    if path.suffix != ".toml" and not path.is_file():
        known = studies_here()
        if text not in known:
            raise ConfigError(f"study {text!r}: no such file and no study of that name; {nearest(text, known)}")
        path = known[text]
    return read_study(load_toml(path), where=str(path), name=path.stem)


def read_study(data: Mapping[str, Any], *, where: str, name: str) -> Study:
    """A study from plain data; every row is checked, so that a mistake is found before the first run."""
    try:
        study = Study.model_validate({"name": name} | dict(data))
    except ValidationError as error:
        raise ConfigError(explain(error, Study, where)) from None
    try:
        expand(study, rates=_every_rate(study))
        _refuse_untunable(study)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return study


def _refuse_untunable(study: Study) -> None:
    """A cell that takes the rate of one which is left out would wait for ever."""
    if study.tuning is None:
        return
    every = cells(study)
    there = {cell.name for cell in every}
    for cell in every:
        if is_compared(study, cell) and cell.tuned_by not in there:
            raise ConfigError(
                f"tuning.at: {cell.name} takes the rate of {cell.tuned_by}, which [[where]] skips;"
                " choose a point that every arm has, or skip both"
            )


def _every_rate(study: Study) -> dict[str, float]:
    rate = study.tuning.rates[0] if study.tuning else None
    return {} if rate is None else {cell.name: rate for cell in cells(study)}


# ---- expansion


def cells(study: Study) -> list[Cell]:
    """Arms x axes, with `where` applied."""
    if not study.arms and not study.axes:
        return []
    arms = study.arms or {base_arm(study.base): {}}
    count = len(arms) * math.prod(len(options) for options in study.axes.values())
    per_cell = len(study.comparison.seeds) if study.comparison else 1
    per_cell += len(study.tuning.rates) * len(study.tuning.seeds) if study.tuning else 0
    if count * per_cell > LIMIT:
        raise ConfigError(
            f"the axes expand to {count * per_cell:,} runs (limit {LIMIT:,}); shorten an axis or split the study"
        )
    result = []
    for arm, changes in arms.items():
        for point in itertools.product(*study.axes.values()):
            at = {key: axis_label(value) for key, value in zip(study.axes, point, strict=True)}
            settings = with_overrides(study.base, changes)
            for key, value in zip(study.axes, point, strict=True):
                settings = with_overrides(settings, _axis_overrides(key, value))
            chosen = [where for where in study.where if matches(where.when, arm, at)]
            if any(where.skip for where in chosen):
                continue
            for where in chosen:
                settings = with_overrides(settings, where.set)
            fixed = at | (study.tuning.at if study.tuning else {})
            result.append(Cell(cell_name(arm, at), arm, at, settings, cell_name(arm, fixed)))
    return result


def _axis_overrides(key: str, value: Any) -> dict[str, Any]:
    """What one axis value changes: a key of a run, or (any other key) a table of such keys."""
    if key.split(".")[0] in Run.model_fields:
        if isinstance(value, Mapping):
            value = {k: v for k, v in value.items() if k != "label"}
        return {key: value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"axes.{key}: {nearest(key, Run.model_fields)} (or give tables with label and what they set)")
    return {k: v for k, v in value.items() if k != "label"}


def cell_name(arm: str, at: Mapping[str, Any]) -> str:
    """The arm and its axes as a name that a folder can have."""
    parts = [arm]
    for key, value in at.items():
        last = key.split(".")[-1]
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(_slug(shown) if isinstance(value, str) else _slug(f"{last}{shown}"))
    return "-".join(parts)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "_", text.replace("+", "")).strip("_") or "x"


def expand(
    study: Study,
    rates: Mapping[str, float] | None = None,
    overrides: Mapping[str, Any] | None = None,
    names: Iterable[str] = (),
) -> list[Planned]:
    """Every run that can be named now: rows, tuning runs, and comparison runs of cells whose rate is known.

    `rates` is what `chosen_rates` returns; without tuning every comparison run is known from the start.
    `names` keeps rows, arms, cells and axis labels of these names (or patterns, as in baseline-*-s11); `overrides`
    (the --set of a command) then change every run that is kept.
    """
    rates = rates or {}
    planned = [_row(study, row) for row in study.rows]
    every = cells(study)
    for cell in every:
        if study.tuning and cell.tuned_by == cell.name:
            planned += tuning_runs(study.tuning, cell)
    for cell in every:
        planned += _comparison_runs(study, cell, rates)
    _refuse_doubles(planned)
    return [overridden(one, overrides) for one in _named(planned, tuple(names), study)]


def _named(planned: list[Planned], names: tuple[str, ...], study: Study) -> list[Planned]:
    if not names:
        return planned
    known = {word for one in planned for word in _words(one)}
    for cell in cells(study):  # comparisons whose rate is not chosen yet have their names already
        known |= cell_words(cell) | (fresh_rows(study, cell) if is_compared(study, cell) else set())
    for name in names:
        if not fits(known, (name,)):
            raise ConfigError(
                f"--rows: {name!r} is no row, arm, cell or axis label of {study.name}; {nearest(name, known)}"
            )
    return [one for one in planned if fits(_words(one), names)]


def fits(words: Iterable[str], names: tuple[str, ...]) -> bool:
    """Whether one of the words is one of the names, or fits one that is a pattern."""
    return any(word == name or fnmatch.fnmatchcase(word, name) for word in words for name in names)


def _words(one: Planned) -> set[str]:
    return {one.row, one.arm, one.cell, *(value for value in one.at.values() if isinstance(value, str))}


def cell_words(cell: Cell) -> set[str]:
    return {cell.arm, cell.name, *(value for value in cell.at.values() if isinstance(value, str))}


def is_compared(study: Study, cell: Cell) -> bool:
    fresh = study.comparison
    return fresh is not None and (fresh.arms is None or cell.arm in fresh.arms)


def fresh_rows(study: Study, cell: Cell) -> set[str]:
    return {f"{cell.name}-s{seed}" for seed in (study.comparison.seeds if study.comparison else ())}


def overridden(one: Planned, overrides: Mapping[str, Any] | None) -> Planned:
    if not overrides:
        return one
    run = Run.read(with_overrides(one.run.model_dump(), overrides), where=f"row {one.row} with --set")
    return replace(one, run=run, id=run_id(one.row, run))


def _row(study: Study, row: Row) -> Planned:
    arm = row.arm or row_arm(study, row)
    settings = with_overrides(study.base, row.set)
    return _planned(row.name, arm, "original", settings, row.name, {}, tuple(row.notes))


def tuning_runs(tuning: Tuning, cell: Cell) -> Iterator[Planned]:
    for rate in tuning.rates:
        for seed in tuning.seeds:
            settings = with_overrides(cell.settings, {"optimizer.lr": rate, "seed": seed})
            if tuning.share < 1:
                settings["budget"] = _shared(settings.get("budget", {}), tuning.share)
            name = f"{cell.name}-tune-lr{rate:g}-s{seed}"
            yield _planned(name, cell.arm, "tune", settings, cell.name, cell.at)


def _comparison_runs(study: Study, cell: Cell, rates: Mapping[str, float]) -> Iterator[Planned]:
    fresh = study.comparison
    if fresh is None:
        yield _planned(cell.name, cell.arm, "compare", cell.settings, _without(cell, study), cell.at)
        return
    if not is_compared(study, cell) or (study.tuning and cell.name not in rates):
        return
    for seed in fresh.seeds:
        changes: dict[str, Any] = {"seed": seed}
        if study.tuning:
            changes["optimizer.lr"] = rates[cell.name]
        settings = with_overrides(cell.settings, changes)
        yield _planned(f"{cell.name}-s{seed}", cell.arm, "compare", settings, cell.name, cell.at)


def _without(cell: Cell, study: Study) -> str:
    """The cell's name without its seed, when the seed is an axis: runs that differ in it belong together."""
    return cell_name(cell.arm, {key: value for key, value in cell.at.items() if key != "seed"})


def _planned(
    row: str,
    arm: str,
    purpose: Purpose,
    settings: Mapping[str, Any],
    cell: str,
    at: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> Planned:
    run = Run.read(settings, where=f"row {row}")
    return Planned(row, arm, purpose, run, run_id(row, run), cell, at, notes)


def _shared(budget: Mapping[str, Any], share: float) -> dict[str, Any]:
    scaled = dict(budget)
    for key in ("steps", "tokens"):
        if key in scaled:
            scaled[key] = max(1, round(scaled[key] * share))
    if "epochs" in scaled:
        scaled["epochs"] = scaled["epochs"] * share
    return scaled


def _refuse_doubles(planned: list[Planned]) -> None:
    """No row twice, no run under two names (a --set may make runs equal; they then have folders of their own)."""
    rows: set[str] = set()
    ids: dict[str, str] = {}
    for one in planned:
        if one.row in rows:
            raise ConfigError(f"row {one.row!r} is there twice; rename one or remove it")
        rows.add(one.row)
        same = ids.setdefault(one.run.identity(), one.row)
        if same != one.row:
            raise ConfigError(
                f"rows {same!r} and {one.row!r} are the same run (identity {one.run.identity()}); remove one"
            )
