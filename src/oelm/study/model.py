"""What a study file may say: its question, family, margin, base, arms, axes, tuning and comparison. No torch here.

Everything is checked as it is read: an arm, an axis or a seed that contradicts another is refused with its place.
What it expands to is in rows.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from oelm.errors import nearest
from oelm.values import Value


HIGHER_IS_BETTER = frozenset({"accuracy", "f1", "exact_match"})
BUDGETS = ("budget.steps", "budget.tokens", "budget.epochs")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)]
Metric = Literal["loss", "perplexity", "accuracy", "f1", "exact_match"]


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
        for key, values in self.axes.items():
            for value in values:
                axis_label(value, f"axes.{key}")
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
        names = list(self.arms) if self.arms else ([base_arm(self.base)] if self.axes else [])
        return list(dict.fromkeys([*names, *(row.arm or row_arm(self, row) for row in self.rows)]))

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
                if not any(self.skips(arm, full) for arm in (one.arm, one.against)):
                    yield one.changed(at={key: full[key] for key in self.axes if key in full})
                    break

    def skips(self, arm: str, at: Mapping[str, Any]) -> bool:
        """Whether the study wants no run of the arm there."""
        return any(where.skip and matches(where.when, arm, at) for where in self.where)


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


def axis_label(value: Any, where: str = "axes") -> Any:
    """What an axis value is called: itself, or the `label` of a table."""
    if not isinstance(value, dict):
        return value
    label = value.get("label", value.get("name", value.get("preset", value.get("base"))))
    if not isinstance(label, str):
        raise ValueError(f"{where}: a value that is a table needs a label: {value!r}")
    return label


def matches(when: Mapping[str, Any], arm: str, at: Mapping[str, Any]) -> bool:
    """Whether a cell is at every value that `when` names."""
    for key, wanted in when.items():
        actual = arm if key == "arm" else at.get(key)
        if actual not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def base_arm(base: Mapping[str, Any]) -> str:
    variant = base.get("variant", "custom")
    if isinstance(variant, Mapping):
        variant = variant.get("label", variant.get("base", "custom"))
    return str(variant)


def row_arm(study: Study, row: Row) -> str:
    return base_arm({"variant": row.set.get("variant", study.base.get("variant", "custom"))})
