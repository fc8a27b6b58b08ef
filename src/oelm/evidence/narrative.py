"""Sentences of a report, made from verdicts by rules: the answer, deviations from the plan, what would change it.

Owns wording and number formats of differences. No opinion enters: the same table gives the same words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from oelm.evidence.paired import Interval
from oelm.evidence.results import Row, Table
from oelm.evidence.statistics import ALPHA, BETTER, COMPARED, NOT_WORSE, REFUSED, UNDECIDED, VERDICTS, WORSE, Comparison
from oelm.study.rows import Study


DEMONSTRATION = "This is a demonstration on data that stands for nothing: it is no evidence."


def place_among(c: Comparison, among: Sequence[Comparison]) -> str:
    """What tells a comparison's place from those of the same arms elsewhere; empty where there is one place."""
    same = [other for other in among if (other.arm, other.against) == (c.arm, c.against)]
    if len(same) < 2:
        return ""
    axes = c.elsewhere.items()
    words = [value if isinstance(value, str) else f"{key.split('.')[-1]} {value}" for key, value in axes] or [c.stratum]
    return ", ".join([*words, c.budget] if len({other.budget for other in same}) > 1 else words)


def percent(nats: float) -> str:
    """A difference of mean nats as a change of perplexity."""
    return f"{100 * math.expm1(nats):+.2f} %"


def difference(c: Comparison, value: float) -> str:
    """A difference in the unit in which it is read."""
    if c.as_perplexity:
        return percent(value)
    return f"{value:+.4f}" if c.lower_is_better else f"{100 * value:+.2f} points"


def interval(c: Comparison, bounds: Interval | None) -> str:
    """Both ends in that unit, which is said once."""
    if bounds is None:
        return "–"
    low, high = (difference(c, bound) for bound in bounds)
    return f"{low.split()[0]} to {high}"


def over_examples(c: Comparison) -> str:
    """The interval from resampling the test examples, with how many they are."""
    return "–" if c.examples is None else f"{interval(c, c.examples.interval)} ({c.examples.count:,})"


def p_value(p: float | None) -> str:
    if p is None:
        return "–"
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"


def margin(c: Comparison) -> str:
    """The margin as declared."""
    if c.margin is None:
        return "none declared"
    if c.as_perplexity:
        return f"{100 * math.expm1(c.margin):.3g} %"
    if c.lower_is_better:
        return f"{c.margin:.3g}"
    points = f"{100 * c.margin:.3g}"
    return f"{points} point" if points == "1" else f"{points} points"


def answer(comparisons: Sequence[Comparison], results: Table) -> list[str]:
    """Three sentences: the first declared comparison, the whole family, and how far to trust them."""
    primary = [c for c in comparisons if c.primary]
    compared = [row for row in results.rows if row["purpose"] in COMPARED and row["status"] != "missing"]
    sentences = [_first(primary if compared else []), _family(primary), _trend(comparisons) or _basis(results)]
    if any(c.demonstration for c in primary) or _untrue(results):
        sentences[0] = f"{DEMONSTRATION} {sentences[0]}"
    return sentences


def _untrue(results: Table) -> bool:
    return any(row.get("data_status") in ("demo", "synthetic") for row in results.rows)


def _first(primary: Sequence[Comparison]) -> str:
    if not primary:
        return "No declared comparison has runs yet, so there is no answer."
    c = primary[0]
    where = f"at {c.budget} ({c.place.replace(f', {c.budget}', '', 1)})"
    if c.estimate is None or c.verdict == REFUSED:
        return f"Whether {c.arm} differs from {c.against} {where} has no verdict: {c.reason}."
    said = {
        BETTER: "is better than",
        WORSE: "is worse than",
        NOT_WORSE: f"is no worse than {margin(c)} behind",
        UNDECIDED: "is not decided against",
    }[c.verdict]
    unit = "perplexity" if c.as_perplexity else c.metric
    numbers = f"{unit} {difference(c, c.estimate.mean)} (95 % interval {interval(c, c.estimate.t_interval)}; {c.n} pairs of seeds"
    if c.examples is not None:
        numbers += f"; over {c.examples.count:,} test examples {interval(c, c.examples.interval)}"
    p = ""
    if c.p_holm is not None:
        p = f"; p = {p_value(c.estimate.p)}, the smallest that {c.n} pairs can reach is {p_value(c.estimate.p_smallest)}; {p_value(c.p_holm)} after Holm over {c.family}"
    reason = f"; {c.reason}" if c.reason else ""
    words = "" if not c.demonstration else "Were the data real, the rules would say that "
    return f"{words}{c.arm} {said} {c.against} {where}: {numbers}{p}{reason})."


def _family(primary: Sequence[Comparison]) -> str:
    counts = Counter(c.verdict for c in primary)
    words = [f"{counts[name]} {name}" for name in VERDICTS if counts[name]]
    if not words:
        return "The study declares no family of comparisons."
    many = "comparison" if len(primary) == 1 else "comparisons"
    return f"Of {len(primary)} declared {many}: {', '.join(words)}."


def _trend(comparisons: Sequence[Comparison]) -> str | None:
    """How the first comparison's gap moves with the budget, where there is more than one."""
    if not comparisons:
        return None
    first = next((c for c in comparisons if c.primary), comparisons[0])
    line = gap_line(comparisons, first)
    if len(line) < 2:
        return None
    a, b = line[0], line[-1]
    assert a.estimate is not None
    assert b.estimate is not None
    grew = abs(b.estimate.mean) - abs(a.estimate.mean)
    word = "grows" if grew > 0 else "shrinks"
    return (
        f"The gap between {first.arm} and {first.against} {word} with training: {difference(a, a.estimate.mean)} at {a.budget}, "
        f"{difference(b, b.estimate.mean)} at {b.budget}."
    )


def gap_line(comparisons: Sequence[Comparison], like: Comparison) -> list[Comparison]:
    """The same comparison at every budget that has an estimate, by tokens seen."""
    same = [
        c
        for c in comparisons
        if (c.arm, c.against, c.stratum, c.metric, c.elsewhere)
        == (like.arm, like.against, like.stratum, like.metric, like.elsewhere)
        and c.estimate is not None
    ]
    return sorted(same, key=lambda c: (c.tokens or 0.0, c.budget))


def _basis(results: Table) -> str:
    status = Counter(row["status"] for row in results.rows)
    return f"The verdicts rest on {status['done']} finished runs of {len(results.rows)}; what did not go as planned is listed below."


def deviations(study: Study, comparisons: Sequence[Comparison], results: Table) -> list[str]:
    """Everything that is not as the study's file declared it before running."""
    found = []
    status = Counter(row["status"] for row in results.rows)
    for name, words in (
        ("missing", "planned runs were not made"),
        ("failed", "runs failed"),
        ("stopped", "runs were stopped before their end"),
        ("diverged", "runs diverged"),
    ):
        if status[name]:
            found.append(f"{status[name]} {words}: {_some(results.where(status=name))}.")
    strays = results.where(purpose="not planned")
    if strays:
        found.append(
            f"{len(strays)} runs in the folder are not in the plan and are compared with nothing: {_some(strays)}."
        )
    arms = {row["arm"] for row in results.rows if row["purpose"] in COMPARED}
    waiting = [arm for arm in study.arm_names() if arm not in arms]
    if waiting and study.tuning:
        found.append(f"Comparison runs are not planned yet for {', '.join(waiting)}: their tuning is not finished.")
    for c in comparisons:
        if c.unpaired:
            found.append(
                f"{c.arm} against {c.against} ({c.place}): seeds {', '.join(map(str, c.unpaired))} have no partner."
            )
        found += [f"{c.arm} against {c.against} ({c.place}): {note}." for note in c.notes]
    for row in results.rows:
        if row.get("frozen_start") != row.get("frozen_end") and row.get("frozen_end") is not None:
            found.append(f"{row['run_id']}: its frozen weights changed.")
    return list(dict.fromkeys(found))


def _some(rows: Sequence[Row], limit: int = 6) -> str:
    names = [str(row["run_id"]) for row in rows[:limit]]
    return ", ".join(names) + (f" and {len(rows) - limit} more" if len(rows) > limit else "")


def what_would_change(comparisons: Sequence[Comparison]) -> list[str]:
    """For each primary comparison, the nearest observation that would turn its verdict."""
    lines = []
    for c in comparisons:
        if not c.primary:
            continue
        name = f"{c.arm} against {c.against} ({c.place})"
        e = c.estimate
        if e is None or e.t_interval is None:
            lines.append(f"{name}: finished runs of both arms on at least three common seeds.")
        elif c.verdict == UNDECIDED and c.examples is not None and c.examples.too_few(ALPHA):
            lines.append(f"{name}: a larger test set than {c.examples.count:,} examples, or a larger effect.")
        elif c.verdict == UNDECIDED:
            more = f"about {c.more_seeds} more seeds" if c.more_seeds else "a larger effect or less noise"
            lines.append(f"{name}: {more}, if the differences go on as they are (mean {difference(c, e.mean)}).")
        elif c.verdict == NOT_WORSE:
            lines.append(
                f"{name}: fresh seeds whose mean cost reaches {margin(c)}, or a larger budget at which it does."
            )
        elif c.verdict in (BETTER, WORSE):
            lines.append(
                f"{name}: fresh seeds whose interval holds 0 (now {interval(c, e.t_interval)}), a better rate for {c.against if c.verdict == BETTER else c.arm}, or a larger budget at which the sign turns."
            )
        else:
            lines.append(f"{name}: runs on one data fingerprint and one version.")
    return lines
