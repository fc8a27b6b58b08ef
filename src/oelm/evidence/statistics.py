"""From a table of runs to verdicts in words, by fixed rules (docs/evidence.md says them in prose).

Owns the comparisons, their families, the rules. Refuses a verdict from fewer than three pairs, from mixed data or
versions (unless allowed, and then it says so) and from rates chosen on the seeds that are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oelm.evidence import paired
from oelm.evidence.labels import budget_of, stratum_of
from oelm.evidence.paired import Estimate, OverExamples
from oelm.evidence.pairs import Point, one_rate, over_examples, pairs_of, point, without_number
from oelm.evidence.results import Row, Table, settings_columns
from oelm.study.rows import BUDGETS, HIGHER_IS_BETTER, Contrast, Margin, Study, axis_label, cells
from oelm.train.run import Run
from oelm.values import canonical


LEVEL = 0.95
ALPHA = 0.05
FEWEST_PAIRS = 3
BETTER, WORSE, NOT_WORSE, UNDECIDED, REFUSED = "better", "worse", "no worse than the margin", "undecided", "refused"
VERDICTS = (BETTER, NOT_WORSE, WORSE, UNDECIDED, REFUSED)
UNTRUE_DATA = ("demo", "synthetic")
COMPARED = ("compare", "original")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against another under one condition, with its verdict and everything the verdict rests on."""

    arm: str
    against: str
    stratum: str
    data: str
    budget: str
    tokens: float | None
    at: Mapping[str, Any]  # the axes' values
    primary: bool  # declared: a member of the corrected family
    metric: str  # as compared: validation.loss, test.accuracy
    lower_is_better: bool
    as_perplexity: bool  # differences are nats; shown as per cent of perplexity
    margin: float | None  # in the metric's own unit (nats for perplexity)
    rate: float | None
    reference_rate: float | None
    points: tuple[Point, ...]
    unpaired: tuple[int, ...]
    diverged: tuple[int, int]  # compared runs that diverged or gave no finite number: of the arm, of the reference
    failed: int
    demonstration: bool
    notes: tuple[str, ...]
    estimate: Estimate | None
    family: int = 1
    p_holm: float | None = None
    p_not_worse_holm: float | None = None
    examples: OverExamples | None = None  # the other source of variance, where runs kept their test examples
    verdict: str = UNDECIDED
    reason: str = ""
    more_seeds: int | None = None

    @property
    def n(self) -> int:
        return len(self.points)

    @property
    def p(self) -> float | None:
        """The p that Holm corrects: of seeds, and where there are examples the larger of both."""
        e, x = self.estimate, self.examples
        return _larger(e.p if e else None, x.p if x else None)

    @property
    def p_not_worse(self) -> float | None:
        e, x = self.estimate, self.examples
        return _larger(e.p_not_worse if e else None, x.p_not_worse if x else None)

    @property
    def elsewhere(self) -> dict[str, Any]:
        """The axes' values but the budget's: comparisons that share it lie on one curve over tokens."""
        return {key: value for key, value in self.at.items() if key not in BUDGETS}

    @property
    def place(self) -> str:
        """Where the comparison was made, in words."""
        axes = [f"{key.split('.')[-1]} {value}" for key, value in self.elsewhere.items()]
        return ", ".join([self.stratum, self.budget, *axes])

    @property
    def said(self) -> str:
        """The verdict as it is printed."""
        if self.demonstration and self.verdict not in (UNDECIDED, REFUSED):
            return f"demonstration: no evidence (the rules would say: {self.verdict})"
        if self.demonstration:
            return "demonstration: no evidence"
        return f"{self.verdict} ({self.reason})" if self.reason else self.verdict


def judge(study: Study, results: Table, *, allow_mixed: bool = False) -> list[Comparison]:
    """Every declared comparison, corrected over the family; and the same elsewhere on the axes, to show how it moves."""
    found = []
    for contrast, at, primary in _places(study):
        strata = _strata(results, contrast, at)
        if not strata and primary:  # it is a member of the family all the same
            strata = _not_planned_yet(study, contrast, at)
        for rows in strata:
            found.append(_compare(study, contrast, at, rows, results, primary=primary, allow_mixed=allow_mixed))
    return decide(found)


def _places(study: Study) -> list[tuple[Contrast, dict[str, Any], bool]]:
    """The declared places first; then those that differ from one in a single axis, each once."""
    contrasts = study.contrasts()
    places = [(one, dict(one.at), True) for one in contrasts]
    seen = [(one.arm, one.against, one.metric, at) for one, at, _ in places]
    for one in contrasts:
        for key in one.at:
            for value in study.axes.get(key, ()):
                at = dict(one.at) | {key: axis_label(value)}
                if any(study.skips(arm, at) for arm in (one.arm, one.against)):
                    continue
                if (one.arm, one.against, one.metric, at) not in seen:
                    seen.append((one.arm, one.against, one.metric, at))
                    places.append((one, at, False))
    return places


def _strata(results: Table, contrast: Contrast, at: Mapping[str, Any]) -> list[list[Row]]:
    """The compared rows of both arms at one place, apart by model, data and budget (named rows may differ in them)."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if row["arm"] not in (contrast.arm, contrast.against) or row["purpose"] not in COMPARED:
            continue
        here = json.loads(row["at"])
        if all(here.get(key) == value for key, value in at.items()):
            groups.setdefault((stratum_of(row), budget_of(row)[1]), []).append(row)
    return list(groups.values())


def decide(found: Sequence[Comparison]) -> list[Comparison]:
    """Correct the declared comparisons over their family, the others over those of the same place; say the verdicts."""
    families: dict[Any, list[int]] = {}
    for index, comparison in enumerate(found):
        families.setdefault(None if comparison.primary else canonical(comparison.at), []).append(index)
    decided = list(found)
    for members in families.values():
        adjusted = paired.holm([found[i].p for i in members])
        not_worse = paired.holm([found[i].p_not_worse for i in members])
        for i, p, q in zip(members, adjusted, not_worse, strict=True):
            decided[i] = _verdict(replace(found[i], family=len(members), p_holm=p, p_not_worse_holm=q))
    return decided


def _verdict(c: Comparison) -> Comparison:
    """The fixed rules, in their order. A diverged run is no number, but its arm cannot win by it."""
    e = c.estimate
    if c.verdict == REFUSED:
        return c
    if c.n < 2 or e is None:
        seeds = "no pair of finished runs" if c.n == 0 else "one seed"
        return replace(c, verdict=UNDECIDED, reason=f"{seeds}; never a verdict from one seed")
    if c.n < FEWEST_PAIRS:
        return _undecided(c, f"{c.n} pairs")
    if e.sd is None or e.t_interval is None:
        return replace(
            c, verdict=UNDECIDED, reason="the differences do not vary at all: check that the seeds differ between runs"
        )
    cost = e.mean if c.lower_is_better else -e.mean
    significant = c.p_holm is not None and c.p_holm <= ALPHA
    not_worse = c.margin is not None and c.p_not_worse_holm is not None and c.p_not_worse_holm <= ALPHA
    lost, reference_lost = c.diverged
    if significant and cost < 0 and not lost:
        return replace(c, verdict=BETTER, reason="")
    if not_worse and not lost:
        return replace(c, verdict=NOT_WORSE, reason="measurably worse, but by less" if significant and cost > 0 else "")
    if significant and cost > 0 and not reference_lost:
        return replace(c, verdict=WORSE, reason="")
    if lost or reference_lost:
        return _undecided(c, f"{lost} run(s) of {c.arm} and {reference_lost} of {c.against} diverged")
    x = c.examples
    if x is not None and x.too_few(ALPHA):
        return replace(c, verdict=UNDECIDED, reason=f"{x.count:,} test examples are too few, whatever the seeds")
    return _undecided(c, "")


def _undecided(c: Comparison, why: str) -> Comparison:
    e = c.estimate
    more = None
    if e is not None and e.sd:
        more = paired.seeds_needed(
            e.mean,
            e.sd,
            n=c.n,
            alpha=ALPHA / c.family,
            margin=c.margin,
            lower_is_better=c.lower_is_better,
        )
        said = (
            f"{more} more seed{'s' if more > 1 else ''} would decide"
            if more
            else "no number of seeds below 1,000 would decide"
        )
        why = f"{why}; {said}" if why else said
    return replace(c, verdict=UNDECIDED, reason=why, more_seeds=more)


def _not_planned_yet(study: Study, contrast: Contrast, at: Mapping[str, Any]) -> list[list[Row]]:
    """Rows that stand for a comparison whose runs have no names yet, for their rates are not chosen."""
    return [
        [
            settings_columns(study.name, {"arm": cell.arm}, Run.read(cell.settings, where=cell.name))
            | {"status": "missing", "lr": None}
            for cell in cells(study)
            if cell.arm in (contrast.arm, contrast.against)
            and all(cell.at.get(key) == value for key, value in at.items())
        ][:1]
    ]


def _compare(
    study: Study,
    contrast: Contrast,
    at: Mapping[str, Any],
    rows: list[Row],
    results: Table,
    *,
    primary: bool,
    allow_mixed: bool,
) -> Comparison:
    sides = [[row for row in rows if row["arm"] == arm] for arm in (contrast.arm, contrast.against)]
    both = sides[0] + sides[1]
    measured = "loss" if contrast.metric == "perplexity" else contrast.metric
    done = [row for row in both if row["status"] == "done"]
    metric, notes = _split(f"{contrast.split}.{measured}", done), _notes(study, sides)
    if metric != f"{contrast.split}.{measured}":
        notes.append(f"no run recorded {contrast.split}.{measured}: compared on {metric}")
    pairs, unpaired = pairs_of(sides, metric)
    points = [point(seed, of_seed, metric) for seed, of_seed in pairs.items()]
    lost = [_count(side, "diverged") + without_number(side, metric) for side in sides]
    if any(without_number(side, metric) for side in sides):
        notes.append(f"a finished run without a finite {metric} counts as diverged")
    margin = _margin(study.margin, contrast, points)
    mixed = _mixed(done)
    lower = contrast.metric not in HIGHER_IS_BETTER
    base = Comparison(
        arm=contrast.arm,
        against=contrast.against,
        stratum=stratum_of(rows[0]),
        data=str(rows[0]["data"]),
        budget=budget_of(rows[0])[1],
        tokens=_largest(row.get("tokens_seen") for row in both),
        at=dict(at),
        primary=primary,
        metric=metric,
        lower_is_better=lower,
        as_perplexity=contrast.metric == "perplexity",
        margin=margin,
        rate=one_rate(sides[0]),
        reference_rate=one_rate(sides[1]),
        points=tuple(points),
        unpaired=tuple(unpaired),
        diverged=(lost[0], lost[1]),
        failed=sum(row["status"] in ("failed", "stopped", "missing") for row in both),
        demonstration=any(row.get("data_status") in UNTRUE_DATA for row in both),
        notes=(*notes, *(f"mixed {what}, allowed" for what in mixed)),
        estimate=None,
    )
    if mixed and not allow_mixed:
        return _refused(base, f"mixed {'; mixed '.join(mixed)}")
    if len(points) < 2:
        return base
    differences = [p.value - p.reference for p in points]
    estimate = paired.estimate(differences, margin=margin, lower_is_better=lower, level=LEVEL)
    return replace(base, estimate=estimate, examples=over_examples(results, pairs, metric, margin, LEVEL))


def _margin(declared: Margin | None, contrast: Contrast, points: Sequence[Point]) -> float | None:
    """The declared margin in the unit of the differences; per cent of perplexity is a ratio, so log(1 + share)."""
    if declared is None:
        return None
    if declared.points is not None:
        return None if contrast.metric == "perplexity" else declared.points / 100
    share = (declared.percent or 0.0) / 100
    if contrast.metric == "perplexity":
        return math.log1p(share)
    reference = math.fsum(p.reference for p in points) / len(points) if points else 0.0
    return share * abs(reference) or None


def _refused(c: Comparison, why: str) -> Comparison:
    return replace(c, verdict=REFUSED, reason=why)


def _split(metric: str, done: list[Row]) -> str:
    """The declared split, or validation where no finished run has it."""
    if not done or any(row.get(metric) is not None for row in done):
        return metric
    return f"validation.{metric.split('.', 1)[1]}"


def _mixed(rows: list[Row]) -> list[str]:
    found = []
    for what, key in (("data fingerprints", "fingerprint"), ("oelm versions", "oelm"), ("torch versions", "torch")):
        values = sorted({str(row[key]) for row in rows if row.get(key) is not None})
        if len(values) > 1:
            found.append(f"{what}: {', '.join(value[:16] for value in values)}")
    return found


def _notes(study: Study, sides: list[list[Row]]) -> list[str]:
    """What a reader must know beside the verdict."""
    notes = []
    both = sides[0] + sides[1]
    if study.tuning:
        tried = study.tuning.rates
        for side in sides:
            rate = one_rate(side)
            if len(tried) > 1 and rate in (min(tried), max(tried)):
                notes.append(f"{side[0]['arm']}'s best rate {rate:g} is at the edge of those tried")
    else:
        rates = [{row["lr"] for row in side} for side in sides]
        if rates[0] != rates[1]:
            notes.append("the arms ran at different, untuned rates")
        elif len(rates[0]) > 1:
            notes.append(f"each seed's value is its mean over {len(rates[0])} rates")
    if any(row.get("data_status") == "partial" for row in both):
        notes.append("on a part of the data set")
    devices = sorted({str(row["device"]) for row in both if row.get("device")})
    if len(devices) > 1:
        notes.append(f"on several devices: {', '.join(devices)}")
    if any(row.get("dirty") for row in both):
        notes.append("some runs used uncommitted code")
    return notes


def _count(rows: list[Row], status: str) -> int:
    return sum(row["status"] == status for row in rows)


def _larger(one: float | None, other: float | None) -> float | None:
    """The larger p; None where the first is not there."""
    return one if one is None or other is None else max(one, other)


def _largest(values: Iterable[Any]) -> float | None:
    return max((float(v) for v in values if v is not None), default=None)
