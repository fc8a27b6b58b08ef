"""Verdicts on data whose truth is known; numbers recomputed by other code; rules one by one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from records import lm_study, record, run_study, save
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from oelm.evidence import paired, results, statistics
from oelm.study.rows import chosen_rates, expand, read_study


MARGIN = math.log(1.05)


def judged(study, tmp_path, **changes):
    return statistics.judge(study, results.collect(study, tmp_path), **changes)


# ---- numbers, by hand


@pytest.mark.parametrize("n", [3, 6, 8, 11])
def test_estimates_equal_numbers_computed_by_hand(n):
    d = np.random.default_rng(n).normal(0.02, 0.03, n)
    e = paired.estimate(d, margin=0.05, lower_is_better=True, level=0.95)
    mean, sd = d.sum() / n, math.sqrt(((d - d.mean()) ** 2).sum() / (n - 1))
    half = student.ppf(0.975, n - 1) * sd / math.sqrt(n)
    assert e.mean == pytest.approx(mean)
    assert e.sd == pytest.approx(sd)
    assert e.t_interval == pytest.approx((mean - half, mean + half))
    flips = [abs(np.mean(d * np.array(signs))) for signs in itertools.product((1, -1), repeat=n)]
    assert e.p == pytest.approx(np.mean([flip >= abs(mean) - 1e-12 for flip in flips]))
    assert e.p_smallest == 2 / 2**n
    below = student.cdf((mean - 0.05) / (sd / math.sqrt(n)), n - 1)
    above = student.sf((mean + 0.05) / (sd / math.sqrt(n)), n - 1)
    assert e.p_not_worse == pytest.approx(below)
    assert e.p_equivalent == pytest.approx(max(below, above))


def test_not_worse_looks_at_the_side_that_costs():
    d = np.array([0.020, 0.021, 0.019, 0.022])
    low = paired.estimate(d, margin=0.01, lower_is_better=True, level=0.95)
    high = paired.estimate(d, margin=0.01, lower_is_better=False, level=0.95)
    assert low.p_not_worse > 0.9
    assert high.p_not_worse < 0.01


def test_holm_by_hand_and_a_missing_p_still_counts():
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.01, None]) == [0.02, None]
    assert paired.holm([]) == []


def test_bca_interval_covers_the_mean_and_is_the_same_twice():
    d = np.random.default_rng(1).normal(0.1, 0.05, 10)
    low, high = paired.bca_interval(d, level=0.95)
    assert low < d.mean() < high
    assert paired.bca_interval(d, level=0.95) == (low, high)


def test_seeds_needed_grows_with_noise_and_respects_the_smallest_p():
    few = paired.seeds_needed(1.0, 0.1, n=3, alpha=0.05, margin=None, lower_is_better=True)
    many = paired.seeds_needed(1.0, 3.0, n=3, alpha=0.05, margin=None, lower_is_better=True)
    assert few == 3  # six pairs are the fewest whose sign-flip p can be below 0.05
    assert many > 50
    assert paired.seeds_needed(0.0, 1.0, n=3, alpha=0.05, margin=None, lower_is_better=True) is None


def test_bootstrap_over_examples_covers_the_difference_of_accuracies():
    rng = np.random.default_rng(3)
    a, b = rng.random(500) < 0.8, rng.random(500) < 0.6
    low, high = paired.examples_interval(a, b, level=0.95)
    spread = 1.96 * np.std(a.astype(float) - b) / math.sqrt(500)
    assert low == pytest.approx(a.mean() - b.mean() - spread, abs=0.01)
    assert high == pytest.approx(a.mean() - b.mean() + spread, abs=0.01)
    assert paired.examples_interval([1, 1], [1, 1], level=0.95) is None


# ---- verdicts


def verdicts(tmp_path, effect, **more):
    study = lm_study(**more)
    run_study(study, tmp_path, effect={"oelm-freeze": effect, "gauss-frozen": effect})
    return judged(study, tmp_path)


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [(0.15, statistics.WORSE), (-0.15, statistics.BETTER), (0.0, statistics.NOT_WORSE), (0.025, statistics.NOT_WORSE)],
)
def test_known_effects_get_their_verdicts(tmp_path, effect, verdict):
    found = verdicts(tmp_path, effect)
    assert [c.verdict for c in found] == [verdict, verdict]
    for c in found:
        assert c.n == 8
        assert c.family == 2
        assert c.margin == pytest.approx(math.log(1.05))
        assert c.estimate.mean == pytest.approx(effect, abs=0.02)
        assert c.p_holm >= c.estimate.p


def test_inside_the_margin_but_measurably_worse_is_said(tmp_path):
    assert "measurably worse" in verdicts(tmp_path, 0.025)[0].said


def test_one_seed_never_gets_a_verdict(tmp_path):
    for c in verdicts(tmp_path, 5.0, seeds=[100]):
        assert c.verdict == statistics.UNDECIDED
        assert "one seed" in c.said
        assert c.p_holm is None


def test_two_seeds_are_undecided_and_say_how_many_more(tmp_path):
    for c in verdicts(tmp_path, 0.5, seeds=[100, 101]):
        assert c.verdict == statistics.UNDECIDED
        assert c.more_seeds == 5  # seven pairs: 2/128 is the first below 0.05/2
        assert "5 more seeds would decide" in c.said


def test_without_a_margin_no_effect_is_undecided(tmp_path):
    found = verdicts(tmp_path, 0.0, margin=None)
    assert {c.verdict for c in found} == {statistics.UNDECIDED}


def test_zero_variance_is_no_evidence(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"))
    for one in expand(study):
        save(tmp_path, record(one, study.name, loss=3.0 if one.arm == "baseline" else 4.0))
    (c,) = judged(study, tmp_path)
    assert c.verdict == statistics.UNDECIDED
    assert "do not vary" in c.said


def test_pairs_are_of_one_seed_and_unequal_seeds_are_named(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), seeds=[1, 2, 3, 4, 5])
    for one in expand(study):
        if (one.arm, one.run.seed) in (("baseline", 1), ("oelm-freeze", 5)):
            continue
        save(tmp_path, record(one, study.name, loss=one.run.seed + (0.5 if one.arm == "oelm-freeze" else 0.0)))
    (c,) = judged(study, tmp_path)
    assert [p.seed for p in c.points] == [2, 3, 4]
    assert [p.value - p.reference for p in c.points] == [0.5, 0.5, 0.5]
    assert c.unpaired == (1, 5)


def test_a_missing_arm_is_shown_without_a_verdict(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"))
    for one in expand(study):
        if one.arm == "baseline":
            save(tmp_path, record(one, study.name, loss=3.0))
    (c,) = judged(study, tmp_path)
    assert (c.n, c.verdict) == (0, statistics.UNDECIDED)
    assert c.failed == 8


def test_rates_come_from_tuning_seeds_only(tmp_path):
    """The compared seeds would favour another rate; what was chosen on the tuning seeds stands."""
    study = lm_study(arms=("baseline", "oelm-freeze"))
    made = []
    for one in expand(study):
        best = 3e-3 if one.arm == "baseline" else 3e-4
        made.append(record(one, study.name, loss=3.0 if one.run.optimizer.lr == best else 4.0))
    for one in expand(study, chosen_rates(study, made)):
        if one.purpose == "compare":
            made.append(record(one, study.name, loss=3.0 + one.run.seed % 7 / 100))
    for one in made:
        save(tmp_path, one)
    (c,) = judged(study, tmp_path)
    assert (c.rate, c.reference_rate) == (3e-4, 3e-3)
    assert sum("edge" in note for note in c.notes) == 2


@pytest.mark.parametrize(
    "changes",
    [{"data": {"fingerprint": "other"}}, {"environment": {"torch": "2.11.0"}}, {"environment": {"oelm": "9"}}],
)
def test_mixed_data_and_versions_are_refused_unless_allowed_and_then_printed(tmp_path, changes):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"))
    rng = np.random.default_rng(0)
    for one in expand(study):
        loss = 3 + 0.2 * (one.arm != "baseline") + float(rng.normal(0, 0.01))
        save(tmp_path, record(one, study.name, loss=loss, **(changes if one.run.seed == 103 else {})))
    (refused,) = judged(study, tmp_path)
    assert refused.verdict == statistics.REFUSED
    assert refused.estimate is None
    assert "mixed" in refused.said
    (allowed,) = judged(study, tmp_path, allow_mixed=True)
    assert allowed.verdict == statistics.WORSE
    assert any("allowed" in note for note in allowed.notes)


@pytest.mark.parametrize("status", ["demo", "synthetic"])
def test_demonstrations_are_no_evidence(tmp_path, status):
    study = lm_study()
    run_study(study, tmp_path, effect={"oelm-freeze": 0.2}, data={"status": status})
    for c in judged(study, tmp_path):
        assert c.said.startswith("demonstration: no evidence")


def test_an_arm_that_diverged_cannot_win(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), seeds=list(range(10)))
    rng = np.random.default_rng(0)
    for one in expand(study):
        lost = one.arm == "oelm-freeze" and one.run.seed == 9
        loss = 3 - 0.2 * (one.arm != "baseline") + float(rng.normal(0, 0.01))
        save(tmp_path, record(one, study.name, loss=None if lost else loss, status="diverged" if lost else "done"))
    (c,) = judged(study, tmp_path)
    assert c.diverged == (1, 0)
    assert c.estimate.mean < 0
    assert c.verdict == statistics.UNDECIDED
    assert "diverged" in c.said


def accuracy_study(points=1.0):
    return read_study(
        {
            "question": "Does freezing change accuracy?",
            "margin": {"points": points},
            "family": [{"arm": "oelm-freeze", "against": "baseline", "metric": "accuracy"}],
            "base": {"model": "gpt-tiny", "data": {"name": "imdb", "context": 64}, "budget": {"epochs": 3.0}},
            "arms": ["baseline", "oelm-freeze"],
            "comparison": {"seeds": list(range(8))},
        },
        where="test",
        name="accuracy",
    )


@pytest.mark.parametrize(
    ("gain", "verdict"), [(0.03, statistics.BETTER), (-0.03, statistics.WORSE), (-0.004, statistics.NOT_WORSE)]
)
def test_accuracy_goes_the_other_way_and_is_read_from_the_test_split(tmp_path, gain, verdict):
    study = accuracy_study()
    rng = np.random.default_rng(0)
    for one in expand(study):
        value = 0.8 + gain * (one.arm != "baseline") + float(rng.normal(0, 0.002))
        save(tmp_path, record(one, study.name, loss=1.0, metrics={"test": {"accuracy": value}}))
    (c,) = judged(study, tmp_path)
    assert c.metric == "test.accuracy"
    assert c.margin == pytest.approx(0.01)
    assert c.verdict == verdict


def test_without_test_numbers_the_comparison_says_that_it_fell_back(tmp_path):
    study = accuracy_study()
    for one in expand(study):
        save(tmp_path, record(one, study.name, loss=1.0 + one.run.seed / 100 + 0.1 * (one.arm != "baseline")))
    (c,) = judged(study, tmp_path)
    assert c.metric == "validation.accuracy"
    assert any("validation.accuracy" in note for note in c.notes)


def test_smaller_budgets_are_a_curve_and_the_family_is_the_largest(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), axes={"budget.steps": [100, 200, 400]})
    rng = np.random.default_rng(0)
    for one in expand(study):
        steps = one.run.budget.steps
        loss = 4 - steps / 400 + (steps / 2000 if one.arm != "baseline" else 0) + float(rng.normal(0, 0.002))
        save(tmp_path, record(one, study.name, loss=loss, data={"tokens_seen": steps * 512}))
    found = judged(study, tmp_path)
    assert [c.primary for c in found] == [True, False, False]
    primary = found[0]
    assert primary.tokens == 400 * 512
    assert primary.family == 1
    assert primary.estimate.mean == pytest.approx(0.2, abs=0.01)


# ---- calibration


def simulated(rng, template, effect, studies):
    """Families of estimates around a true effect: all p values and intervals of all studies at once."""
    d = rng.normal(effect, 0.02, (studies, len(template), 8))
    p = paired.sign_flip(d)
    t = ttest_1samp(d, 0.0, axis=-1)
    low, high = t.confidence_interval(0.95)
    not_worse = ttest_1samp(d, MARGIN, axis=-1, alternative="less").pvalue
    families = []
    for s in range(studies):
        family = []
        for i, c in enumerate(template):
            e = replace(
                c.estimate,
                mean=float(d[s, i].mean()),
                sd=float(d[s, i].std(ddof=1)),
                t_interval=(float(low[s, i]), float(high[s, i])),
                p=float(p[s, i]),
                p_not_worse=float(not_worse[s, i]),
            )
            family.append(replace(c, estimate=e))
        families.append(family)
    return families, float(((low <= effect) & (effect <= high)).mean())


@pytest.mark.slow
def test_no_effect_gives_few_false_verdicts_and_effects_are_found(tmp_path):
    """1,000 simulated studies of five comparisons each: family-wise errors, coverage, power."""
    rng = np.random.default_rng(20)
    template = _template(tmp_path)
    families, coverage = simulated(rng, template, 0.0, 1000)
    said = [{c.verdict for c in statistics.decide(family)} for family in families]
    assert sum(bool(verdicts & {statistics.BETTER, statistics.WORSE}) for verdicts in said) <= 69
    assert 0.94 <= coverage <= 0.96
    families, _ = simulated(rng, template, 0.12, 200)
    said = [{c.verdict for c in statistics.decide(family)} for family in families]
    assert sum(verdicts == {statistics.WORSE} for verdicts in said) >= 190  # every one of a study's five effects
    at_the_margin, _ = simulated(rng, template[:1], MARGIN, 1000)
    called = [statistics.decide(family)[0].verdict == statistics.NOT_WORSE for family in at_the_margin]
    assert sum(called) <= 69  # an arm exactly as bad as the margin is rarely called no worse


@pytest.mark.slow
def test_bootstrap_intervals_cover_about_as_often_as_they_say():
    """BCa is known to be narrow at small n: it is printed second, and never decides."""
    rng = np.random.default_rng(4)
    covered = [
        low <= 0.1 <= high
        for low, high in (paired.bca_interval(rng.normal(0.1, 1, 20), level=0.95) for _ in range(300))
    ]
    assert 0.87 <= np.mean(covered) <= 0.99


def _template(tmp_path):
    arms = ("baseline", *(f"arm{i}" for i in range(5)))
    study = read_study(
        {
            "question": "Nothing differs here, does the program say so?",
            "margin": {"percent": 5.0},
            "family": [{"arm": arm, "against": "baseline", "metric": "perplexity"} for arm in arms[1:]],
            "base": {"model": "gpt-tiny", "data": {"name": "wikipedia", "context": 64}, "budget": {"steps": 10}},
            "arms": {arm: {"variant": "baseline", "optimizer.weight_decay": i / 100} for i, arm in enumerate(arms)},
            "comparison": {"seeds": list(range(8))},
        },
        where="test",
        name="null",
    )
    for one in expand(study):
        save(tmp_path, record(one, study.name, loss=3.0 + one.run.seed / 10 + len(one.arm) * one.run.seed**2 / 1000))
    return judged(study, tmp_path)
