"""Studies: a TOML file becomes runs with names and identities. No torch here.

A study holds its question, the comparisons it will test and the margin it calls "no worse", all fixed before running,
and the runs it wants: named rows, or arms x axes, with rates tuned on their own seeds before fresh seeds compare.
Refuses rows that share a name or an identity, and axes that expand to more than LIMIT runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from oelm.errors import ConfigError, nearest
from oelm.train.run import Run, run_id
from oelm.values import Value, explain, load_toml, parse_toml


LIMIT = 20_000  # runs of one study; more is a mistake in the axes
HIGHER_IS_BETTER = frozenset({"accuracy", "f1", "exact_match"})
ORIGINS = frozenset({"preset", "path", "base"})  # a table with one of these says what it is, not what it changes
BUDGETS = ("budget.steps", "budget.tokens", "budget.epochs")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)]
Metric = Literal["loss", "perplexity", "accuracy", "f1", "exact_match"]
Purpose = Literal["original", "tune", "compare"]


class Margin(Value):
    """What "no worse" means: per cent of the reference's value, or points on the metric's scale of 100."""

    percent: Annotated[float, Field(gt=0, le=100)] | None = None
    points: Annotated[float, Field(gt=0, le=100)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Margin:
        if (self.percent is None) == (self.points is None):
            raise ValueError("give exactly one of percent and points")
        return self


class Contrast(Value):
    """One comparison of the family: an arm against another, on a metric and a split.

    `at` fixes axes; one that it leaves out means every value in turn, or of a budget the largest that both arms have.
    """

    arm: str
    against: str
    metric: Metric
    split: Literal["validation", "test"] = "test"
    at: dict[str, Any] = Field(default_factory=dict)


class Tuning(Value):
    """The rates every arm may try, on seeds of their own; the best by `select` on validation is taken."""

    rates: Annotated[list[Annotated[float, Field(gt=0, le=10)]], Field(min_length=1)]
    seeds: Seeds
    select: Metric = "loss"
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the cell's budget that a tuning run gets
    at: dict[str, Any] = Field(default_factory=dict)  # tune only here; cells that differ in these axes take its rate


class Fresh(Value):
    """The comparison: seeds that no tuning run has seen, at the chosen rate."""

    seeds: Seeds
    arms: list[str] | None = None  # None: all


class Where(Value):
    """Cells whose axes equal `when` (a list: any of them) get `set`, or are left out with `skip`."""

    when: dict[str, Any]
    set: dict[str, Any] = Field(default_factory=dict)
    skip: bool = False


class Row(Value):
    """One named run: what it changes of the base, what the original reported, and what is wrong with it."""

    name: str
    arm: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    reported: dict[str, float] = Field(default_factory=dict)


class Slurm(Value):
    """Defaults of `oelm run --slurm`; a flag wins."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    time: Annotated[int, Field(ge=1)] = 240  # minutes of one job
    cpus: Annotated[int, Field(ge=1)] = 4
    memory_gb: Annotated[int, Field(ge=1)] | None = None
    at_once: Annotated[int, Field(ge=1)] = 64  # jobs of the array that run together
    nodes: Annotated[int, Field(ge=1)] = 1


class Study(Value):
    """A question, its comparisons, its margin and the runs that will answer it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
    question: Annotated[str, Field(min_length=10)]
    margin: Margin | None = None
    notes: list[str] = Field(default_factory=list)
    family: list[Contrast] = Field(default_factory=list)
    base: dict[str, Any]
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    where: list[Where] = Field(default_factory=list)
    rows: list[Row] = Field(default_factory=list)
    tuning: Tuning | None = None
    comparison: Fresh | None = None
    slurm: Slurm = Slurm()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """`arms` as names or as a table of overrides; `axes.variant` is another way to write it."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        axes = data.get("axes")
        if isinstance(axes, dict) and "variant" in axes:
            if "arms" in data:
                raise ValueError("arms and axes.variant say the same thing; keep arms")
            data["axes"] = {key: value for key, value in axes.items() if key != "variant"}
            data["arms"] = axes["variant"]
        if "arms" in data:
            data["arms"] = _arms(data["arms"])
        return data

    @field_validator("arms")
    @classmethod
    def _arm_names(cls, arms: dict[str, Any]) -> dict[str, Any]:
        for label in arms:
            if not _NAME.fullmatch(label):
                raise ValueError(f"arm {label!r}: use letters, digits, '.', '_' and '-' (it becomes a folder's name)")
        return arms

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        if not self.rows and not self.arms and not self.axes:
            raise ValueError("has no rows, arms or axes: nothing would run")
        if self.tuning and not self.comparison:
            raise ValueError("tuning chooses rates for a comparison; add [comparison] with seeds")
        if self.tuning and "optimizer.lr" in self.axes:
            raise ValueError("optimizer.lr is an axis and tuned at once; keep one of axes and tuning.rates")
        if self.tuning and self.comparison:
            both = sorted(set(self.tuning.seeds) & set(self.comparison.seeds))
            if both:
                raise ValueError(f"seed {both[0]} is in tuning and in comparison; the comparison needs fresh seeds")
        if self.comparison and "seed" in self.axes:
            raise ValueError("seed is an axis and listed in comparison.seeds; keep comparison.seeds")
        for seeds in (self.tuning and self.tuning.seeds, self.comparison and self.comparison.seeds):
            if seeds and len(set(seeds)) != len(seeds):
                raise ValueError("a seed is listed twice; each may run once")
        self._known_arms()
        return self

    def _known_arms(self) -> None:
        known = self.arm_names()
        asked = [(f"family[{i}]", name) for i, c in enumerate(self.family) for name in (c.arm, c.against)]
        if self.comparison and self.comparison.arms:
            asked += [("comparison.arms", name) for name in self.comparison.arms]
        for where, name in asked:
            if name not in known:
                raise ValueError(f"{where}: arm {name!r} is not in this study; {nearest(name, known)}")
        keys = {*self.axes, "arm"}
        tables = [(f"where[{i}].when", w.when) for i, w in enumerate(self.where)]
        tables += [(f"family[{i}].at", c.at) for i, c in enumerate(self.family)]
        tables += [("tuning.at", self.tuning.at)] if self.tuning else []
        for where, table in tables:
            for key, value in table.items():
                if key not in keys:
                    raise ValueError(f"{where}: {key!r} is not an axis of this study; {nearest(key, keys)}")
                options = known if key == "arm" else [axis_label(option) for option in self.axes[key]]
                for one in value if isinstance(value, list) else [value]:
                    if one not in options:
                        raise ValueError(
                            f"{where}: {key} = {one!r} is not one of its values ({', '.join(map(str, options))})"
                        )

    def arm_names(self) -> list[str]:
        """The arms in the order of the file; rows bring theirs."""
        names = list(self.arms) if self.arms else ([_base_arm(self.base)] if self.axes else [])
        return list(dict.fromkeys([*names, *(row.arm or _row_arm(self, row) for row in self.rows)]))

    def contrasts(self) -> list[Contrast]:
        """The family with every axis filled in: the number of tests that Holm's correction counts."""
        return [full for one in self.family for full in self._filled(one)]

    def _filled(self, one: Contrast) -> Iterator[Contrast]:
        free = [key for key in self.axes if key not in ("seed", "optimizer.lr") and key not in one.at]
        every = [key for key in free if key not in BUDGETS]
        budgets = [key for key in free if key in BUDGETS]
        for choice in itertools.product(*([axis_label(value) for value in self.axes[key]] for key in every)):
            at = one.at | dict(zip(every, choice, strict=True))
            sizes = [sorted((axis_label(value) for value in self.axes[key]), reverse=True) for key in budgets]
            for largest in itertools.product(*sizes):
                full = at | dict(zip(budgets, largest, strict=True))
                if not any(self._skipped(arm, full) for arm in (one.arm, one.against)):
                    yield one.changed(at={key: full[key] for key in self.axes if key in full})
                    break

    def _skipped(self, arm: str, at: Mapping[str, Any]) -> bool:
        return any(where.skip and matches(where.when, arm, at) for where in self.where)


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
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return study


def _every_rate(study: Study) -> dict[str, float]:
    rate = study.tuning.rates[0] if study.tuning else None
    return {} if rate is None else {cell.name: rate for cell in cells(study)}


def _arms(value: Any) -> Any:
    """Label -> overrides, from a list of variants or a table."""
    if isinstance(value, list):
        arms: dict[str, Any] = {}
        for one in value:
            label = axis_label(one) if isinstance(one, str | dict) else ""
            if not label:
                raise ValueError(f"arms: {one!r} needs a label")
            if label in arms:
                raise ValueError(f"arm {label!r} is listed twice; remove one or give it another label")
            rest = {k: v for k, v in one.items() if k != "label"} if isinstance(one, dict) else one
            arms[label] = {"variant": rest}
        return arms
    if isinstance(value, dict):
        return {label: {"variant": one} if isinstance(one, str) else one for label, one in value.items()}
    return value


def axis_label(value: Any) -> Any:
    """What an axis value is called: itself, or the `label` of a table."""
    if not isinstance(value, dict):
        return value
    label = value.get("label", value.get("name", value.get("preset", value.get("base"))))
    if not isinstance(label, str):
        raise ValueError(f"an axis value that is a table needs a label: {value!r}")
    return label


# ---- settings


def with_overrides(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with some changed, by dotted keys or nested tables.

    A table merges into what is there; one that names its origin (preset, path, base) replaces it. One of steps, epochs
    and tokens replaces the others.
    """
    result = _copied(base)
    for dotted, value in overrides.items():
        if isinstance(value, Mapping) and dotted in Run.model_fields and not ORIGINS & set(value):
            result = with_overrides(result, {f"{dotted}.{key}": one for key, one in value.items()})
            continue
        *path, last = dotted.split(".")
        table = result
        for part in path:
            table[part] = _as_table(part, table.get(part))
            table = table[part]
        if path == ["budget"] and last in ("steps", "epochs", "tokens"):
            for other in ("steps", "epochs", "tokens"):
                table.pop(other, None)
        table[last] = _copied(value) if isinstance(value, Mapping) else value
    return result


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _as_table(key: str, value: Any) -> dict[str, Any]:
    """The table a short form stands for, so that a dotted key can change one entry of it."""
    if isinstance(value, Mapping):
        return dict(value)
    short = {"model": "preset", "data": "name", "variant": "base"}
    return {short[key]: value} if isinstance(value, str) and key in short else {}


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """`--set optimizer.lr=1e-3`: values as TOML, bare words as strings."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {pair!r}: write key=value, as in --set optimizer.lr=1e-3")
        if key in result:
            raise ConfigError(f"--set {key}: is given twice; keep one")
        try:
            result[key] = parse_toml(f"value = {text}", where="--set")["value"]
        except ConfigError:
            if not re.fullmatch(r"[\w./:@+-]+", text.strip()):
                raise ConfigError(f"--set {pair!r}: the value cannot be read; quote it as in TOML") from None
            result[key] = text.strip()
    return result


# ---- expansion


def cells(study: Study) -> list[Cell]:
    """Arms x axes, with `where` applied."""
    if not study.arms and not study.axes:
        return []
    arms = study.arms or {_base_arm(study.base): {}}
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


def matches(when: Mapping[str, Any], arm: str, at: Mapping[str, Any]) -> bool:
    """Whether a cell is at every value that `when` names."""
    for key, wanted in when.items():
        actual = arm if key == "arm" else at.get(key)
        if actual not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


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
    `names` keeps rows, arms, cells and axis labels of these names; `overrides` (the --set of a command) then change
    every run that is kept.
    """
    rates = rates or {}
    planned = [_row(study, row) for row in study.rows]
    every = cells(study)
    for cell in every:
        if study.tuning and cell.tuned_by == cell.name:
            planned += _tuning_runs(study.tuning, cell)
    for cell in every:
        planned += _comparison_runs(study, cell, rates)
    _refuse_doubles(planned)
    return [_overridden(one, overrides) for one in _named(planned, tuple(names), study)]


def _named(planned: list[Planned], names: tuple[str, ...], study: Study) -> list[Planned]:
    if not names:
        return planned
    known = {word for one in planned for word in _words(one)}
    # rows of comparisons whose rate is not chosen yet have no name, but their arms and cells have
    known |= {word for cell in cells(study) for word in (cell.arm, cell.name)}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--rows: {name!r} is no row, arm, cell or axis label of {study.name}; {nearest(name, known)}"
            )
    return [one for one in planned if _words(one) & set(names)]


def _words(one: Planned) -> set[str]:
    return {one.row, one.arm, one.cell, *(value for value in one.at.values() if isinstance(value, str))}


def _overridden(one: Planned, overrides: Mapping[str, Any] | None) -> Planned:
    if not overrides:
        return one
    run = Run.read(with_overrides(one.run.model_dump(), overrides), where=f"row {one.row} with --set")
    return replace(one, run=run, id=run_id(one.row, run))


def _row(study: Study, row: Row) -> Planned:
    arm = row.arm or _row_arm(study, row)
    settings = with_overrides(study.base, row.set)
    return _planned(row.name, arm, "original", settings, row.name, {}, tuple(row.notes))


def _tuning_runs(tuning: Tuning, cell: Cell) -> Iterator[Planned]:
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
    if (fresh.arms is not None and cell.arm not in fresh.arms) or (study.tuning and cell.name not in rates):
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


def _base_arm(base: Mapping[str, Any]) -> str:
    variant = base.get("variant", "custom")
    if isinstance(variant, Mapping):
        variant = variant.get("label", variant.get("base", "custom"))
    return str(variant)


def _row_arm(study: Study, row: Row) -> str:
    return _base_arm({"variant": row.set.get("variant", study.base.get("variant", "custom"))})


# ---- rates


def chosen_rates(
    study: Study, records: Iterable[Mapping[str, Any]], overrides: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Cell -> the rate its tuning runs favour, for cells whose tuning is complete.

    `records` are result.json contents. A diverged run counts as the worst there is: a rate is as good as its
    mean over the tuning seeds, on the validation split (at the best evaluation, whose weights are kept). Ties go to the smaller rate.
    """
    if study.tuning is None:
        return {}
    choices = _choices(study, study.tuning, records, overrides)
    return {cell: rate for cell, rate in choices.items() if rate is not None}


def rates_that_failed(
    study: Study, records: Iterable[Mapping[str, Any]], overrides: Mapping[str, Any] | None = None
) -> list[str]:
    """Cells whose tuning is complete and left no rate: every one diverged."""
    if study.tuning is None:
        return []
    return [cell for cell, rate in _choices(study, study.tuning, records, overrides).items() if rate is None]


def _choices(
    study: Study, tuning: Tuning, records: Iterable[Mapping[str, Any]], overrides: Mapping[str, Any] | None
) -> dict[str, float | None]:
    known = {record.get("run_id"): record for record in records}
    scores: dict[str, dict[float, list[float | None]]] = {}
    tuned = (one for cell in cells(study) if cell.tuned_by == cell.name for one in _tuning_runs(tuning, cell))
    for one in tuned:
        value = _score(known.get(_overridden(one, overrides).id), tuning.select)
        scores.setdefault(one.cell, {}).setdefault(one.run.optimizer.lr, []).append(value)
    chosen: dict[str, float | None] = {}
    for cell in cells(study):
        rates = scores.get(cell.tuned_by)
        if rates is None or any(value is None for values in rates.values() for value in values):
            continue
        means = {rate: sum(v for v in values if v is not None) / len(values) for rate, values in rates.items()}
        rate, best = min(means.items(), key=lambda pair: (pair[1], pair[0]))
        chosen[cell.name] = rate if math.isfinite(best) else None
    return chosen


def _score(record: Mapping[str, Any] | None, select: str) -> float | None:
    """Lower is better; infinite for a diverged run, None while it is not finished."""
    if record is None or record.get("status") not in ("done", "diverged"):
        return None
    if record["status"] == "diverged":
        return math.inf
    metrics = record.get("metrics") or {}
    value = (metrics.get("best") or metrics.get("validation") or {}).get(select)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return math.inf
    return -float(value) if select in HIGHER_IS_BETTER else float(value)
