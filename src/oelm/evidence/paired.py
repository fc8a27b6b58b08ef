"""Numbers from paired differences: intervals, tests, corrections, power. scipy and statsmodels compute all of them.

Owns no formula and no wording. Every function takes plain numbers; a result that cannot be computed (one seed, no
variance) is None, never a guess.
"""

from __future__ import annotations

import bisect
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


RESAMPLES = 9999  # the sign-flip test is exact up to 13 pairs; the bootstrap's intervals settle well below this
EXAMPLE_RESAMPLES = 1999  # of a test set, which is large: its mean is near normal
SEED = 20240607  # of resampling: a report rendered twice is the same report
POWER = 0.8
MOST_SEEDS = 1000
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What n paired differences say. None: it cannot be computed from them."""

    n: int
    mean: float
    sd: float | None
    t_interval: Interval | None
    bca_interval: Interval | None
    p: float | None  # sign-flip, two-sided
    p_smallest: float  # the smallest sign-flip p that n pairs can reach
    p_t: float | None
    p_equivalent: float | None  # TOST, both sides
    p_not_worse: float | None  # the side of TOST that says "not worse by the margin"


def estimate(differences: Sequence[float], *, margin: float | None, lower_is_better: bool, level: float) -> Estimate:
    """Everything that is reported about one comparison's differences (arm minus reference)."""
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    n = values.size
    if n == 0 or not np.isfinite(values).all():
        raise ValueError("an estimate needs finite differences")
    varies = n > 1 and bool(np.ptp(values) > 1e-12 * max(1.0, float(np.abs(values).max())))
    equivalent = not_worse = None
    t_interval = bca = None
    p_t = None
    if varies:
        test = stats.ttest_1samp(values, 0.0)
        low, high = test.confidence_interval(level)
        t_interval, p_t = (float(low), float(high)), float(test.pvalue)
        bca = bca_interval(values, level=level)
        if margin is not None:
            equivalent, not_worse = equivalence(values, margin=margin, lower_is_better=lower_is_better)
    return Estimate(
        n=n,
        mean=float(values.mean()),
        sd=float(values.std(ddof=1)) if n > 1 else None,
        t_interval=t_interval,
        bca_interval=bca,
        p=float(sign_flip(values)) if varies else None,
        p_smallest=smallest_p(n),
        p_t=p_t,
        p_equivalent=equivalent,
        p_not_worse=not_worse,
    )


def smallest_p(n: int) -> float:
    """The two-sided sign-flip test's smallest p with n pairs (beyond 13 pairs: with so many resamples)."""
    return min(1.0, max(2.0 / 2.0**n, 2.0 / (RESAMPLES + 1)))


def sign_flip(differences: Any) -> Any:
    """Two-sided p of the sign-flip permutation test of the mean, along the last axis."""
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    largest = np.abs(values).max(axis=-1, keepdims=True)
    result = stats.permutation_test(
        (values / np.where(largest > 0, largest, 1.0),),
        _mean_with_ties,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        axis=-1,
        rng=np.random.default_rng(SEED),
    )
    return result.pvalue


def bca_interval(values: Any, *, level: float) -> Interval | None:
    """The bias-corrected and accelerated bootstrap interval of the mean; None where it degenerates."""
    from scipy import stats

    if np.size(values) < 3:
        return None
    result = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        _mean,
        confidence_level=level,
        n_resamples=RESAMPLES,
        method="BCa",
        vectorized=True,
        rng=np.random.default_rng(SEED),
    )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return (low, high) if np.isfinite([low, high]).all() else None


def equivalence(values: Any, *, margin: float, lower_is_better: bool) -> tuple[float, float]:
    """TOST against ±margin: p of both sides together, and of the side that rules out "worse by the margin"."""
    ttost_paired = _statsmodels("weightstats").ttost_paired
    values = np.asarray(values, dtype=float)
    both, above_low, below_high = ttost_paired(values, np.zeros_like(values), -margin, margin)
    return float(both), float(below_high[1] if lower_is_better else above_low[1])


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's correction over a family; a comparison without p still counts as a member."""
    if not ps:
        return []
    adjusted = _statsmodels("multitest").multipletests([1.0 if p is None else p for p in ps], method="holm")[1]
    return [None if p is None else float(value) for p, value in zip(ps, adjusted, strict=True)]


def seeds_needed(
    mean: float, sd: float, *, n: int, alpha: float, margin: float | None, lower_is_better: bool
) -> int | None:
    """How many more pairs would probably (80 %) give a verdict if the differences go on as they are; None: > 1,000."""
    from scipy import stats

    reachable = bisect.bisect_left(range(64), True, key=lambda pairs: smallest_p(pairs) <= alpha)
    if stats.norm.cdf(abs(mean) / sd) ** reachable < POWER:  # so few pairs reach it only if all of them agree in sign
        reachable += 1
    routes = [max(_pairs_for(abs(mean) / sd, n, alpha, "two-sided"), reachable)]
    if margin is not None:
        room = margin - mean if lower_is_better else margin + mean
        routes.append(_pairs_for(room / sd, n, alpha, "larger") if room > 0 else MOST_SEEDS + 1)
    pairs = min(routes)
    return pairs - n if pairs <= MOST_SEEDS else None


def _pairs_for(effect: float, n: int, alpha: float, alternative: str) -> int:
    """The first number of pairs above n with enough power (which grows with it); MOST_SEEDS + 1: none."""
    power_of = _statsmodels("power").TTestPower().power
    sizes = range(n + 1, MOST_SEEDS + 1)

    def enough(pairs: int) -> bool:
        power = float(power_of(effect, pairs, alpha, alternative=alternative))
        return power >= POWER or not np.isfinite(power)  # NaN: an effect too large for the non-central t

    return n + 1 + bisect.bisect_left(sizes, True, key=enough)


@dataclass(frozen=True, kw_only=True)
class OverExamples:
    """What one test set's examples say of a difference of accuracies: the paired bootstrap over them."""

    count: int
    interval: Interval
    p: float  # two-sided: twice the share of resamples beyond 0
    p_not_worse: float | None  # the share of resamples that lose the margin or more

    def too_few(self, alpha: float) -> bool:
        """Whether these examples allow no verdict, whatever the seeds say."""
        return self.p > alpha and (self.p_not_worse is None or self.p_not_worse > alpha)


def over_examples(differences: Any, *, margin: float | None, level: float) -> OverExamples | None:
    """Resample the examples; `differences`: of each example, arm minus reference, averaged over the pairs of seeds."""
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    if values.size < 2 or not np.ptp(values):
        return None
    result = stats.bootstrap(
        (values,),
        _mean,
        confidence_level=level,
        n_resamples=EXAMPLE_RESAMPLES,
        batch=50,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(SEED),
    )
    drawn = result.bootstrap_distribution
    beyond = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    lost = None if margin is None else int((drawn <= -margin).sum())
    return OverExamples(
        count=values.size,
        interval=(float(result.confidence_interval.low), float(result.confidence_interval.high)),
        p=min(1.0, 2 * (beyond + 1) / (EXAMPLE_RESAMPLES + 1)),
        p_not_worse=None if lost is None else (lost + 1) / (EXAMPLE_RESAMPLES + 1),
    )


def _statsmodels(module: str) -> Any:
    """Imported when first used (it takes a second); it has no types."""
    return importlib.import_module(f"statsmodels.stats.{module}")


def _mean(values: Any, axis: int = -1) -> Any:
    return np.mean(values, axis=axis)


def _mean_with_ties(values: Any, axis: int = -1) -> Any:
    """Means that are equal but for rounding are equal: accuracies are multiples of one example, so that flips tie often."""
    return np.round(np.mean(values, axis=axis), 10)
