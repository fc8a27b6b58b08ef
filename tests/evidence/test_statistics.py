"""Verdicts on data whose truth is known; numbers recomputed by other code; rules one by one."""

from __future__ import annotations

import base64
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from records import lm_study, record, run_study, save
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from oelm.evidence import paired, results, statistics
from oelm.study.rates import chosen_rates
from oelm.study.rows import expand, read_study
from oelm.train.examples import pack


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


@pytest.mark.parametrize(("examples", "seed"), [(1821, 1), (1821, 6), (25_000, 2), (25_000, 4)])
def test_flips_that_tie_count_as_ties(examples, seed):
    """Accuracies are multiples of one example: p from whole numbers of examples, in which nothing is rounded."""
    low = int(0.9 * examples)
    right, reference = np.random.default_rng(seed).integers(low, low + 12, (2, 8))
    counts = right - reference
    sums = [abs(np.dot(counts, signs)) for signs in itertools.product((1, -1), repeat=8)]
    exact = np.mean([value >= abs(counts.sum()) for value in sums])
    assert paired.sign_flip(right / examples - reference / examples) == pytest.approx(exact, abs=1e-12)


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
    # a t test has 80 % power with six pairs of this effect, but six pairs must agree in sign: .945 ** 6 = .71
    assert paired.seeds_needed(1.6, 1.0, n=3, alpha=0.05, margin=None, lower_is_better=True) == 4
    assert few == 3  # six pairs are the fewest whose sign-flip p can be below 0.05
    assert many > 50
    assert paired.seeds_needed(0.0, 1.0, n=3, alpha=0.05, margin=None, lower_is_better=True) is None


def test_bootstrap_over_examples_covers_the_difference_of_accuracies():
    rng = np.random.default_rng(3)
    a, b = rng.random(500) < 0.8, rng.random(500) < 0.6
    d = a.astype(float) - b
    found = paired.over_examples(d, margin=0.01, level=0.95)
    error = np.std(d) / math.sqrt(500)
    assert found.count == 500
    assert found.interval == pytest.approx((d.mean() - 1.96 * error, d.mean() + 1.96 * error), abs=0.01)
    weak = paired.over_examples(d - d.mean() + 1.5 * error, margin=1.5 * error, level=0.95)
    assert weak.p == pytest.approx(2 * student.sf(1.5, 499), abs=0.03)
    assert weak.p_not_worse == pytest.approx(student.sf(3, 499), abs=0.005)
    assert paired.over_examples([0.5, 0.5], margin=None, level=0.95) is None


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


def test_comparisons_whose_rates_are_not_chosen_yet_count_in_the_family(tmp_path):
    study = lm_study()
    run_study(study, tmp_path, effect={"oelm-freeze": 0.5})
    for path in (tmp_path / study.name).glob("gauss-frozen*"):
        (path / "result.json").unlink()
    found = judged(study, tmp_path)
    assert [(c.arm, c.n, c.family) for c in found] == [("oelm-freeze", 8, 2), ("gauss-frozen", 0, 2)]
    assert found[0].p_holm == 2 * found[0].estimate.p
    assert "no pair" in found[1].said


def test_before_any_rate_is_chosen_none_is_shown(tmp_path):
    found = judged(lm_study(), tmp_path)
    assert [(c.arm, c.n, c.rate, c.reference_rate) for c in found] == [
        ("oelm-freeze", 0, None, None),
        ("gauss-frozen", 0, None, None),
    ]


def test_a_finished_run_without_a_number_counts_as_diverged(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), seeds=list(range(10)))
    rng = np.random.default_rng(0)
    for one in expand(study):
        lost = one.arm == "oelm-freeze" and one.run.seed == 9
        loss = 3 - 0.2 * (one.arm != "baseline") + float(rng.normal(0, 0.01))
        save(tmp_path, record(one, study.name, loss=float("nan") if lost else loss))
    (c,) = judged(study, tmp_path)
    assert (c.metric, c.n, c.diverged, c.unpaired) == ("validation.loss", 9, (1, 0), (9,))
    assert c.verdict == statistics.UNDECIDED


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


def classifiers(folder, study, rng, *, count, gain, own=0.0, noise=0.02):
    """Runs that know each example's chance of being right: a common part, what the arm has of its own, what the seed adds."""
    common = rng.normal(1.0, 1.0, count)
    special = {arm: rng.normal(0.0, own, count) for arm in ("baseline", "oelm-freeze")}
    for one in expand(study):
        level = gain if one.arm != "baseline" else 0.0
        right = common + special[one.arm] + level + rng.normal(0.0, noise, count) > 0
        save(folder, record(one, study.name, loss=1.0), right)


def test_the_interval_over_examples_by_other_means(tmp_path):
    study, rng = accuracy_study(), np.random.default_rng(7)
    classifiers(tmp_path, study, rng, count=2000, gain=0.3, own=0.2, noise=0.5)
    table = results.collect(study, tmp_path)
    (c,) = statistics.judge(study, results.load(results.write(table, tmp_path / "results")))
    bits = {}
    for one in expand(study):
        said = json.loads((tmp_path / study.name / one.id / "examples.json").read_text())
        text = "".join(f"{byte:08b}" for byte in base64.b64decode(said["right"]))[: said["count"]]
        bits[one.arm, one.run.seed] = np.array([int(bit) for bit in text])
    d = np.mean([bits["oelm-freeze", s] - bits["baseline", s] for s in range(8)], axis=0)
    means = np.sort([rng.choice(d, d.size).mean() for _ in range(4000)])
    assert c.examples.count == 2000
    assert c.estimate.mean == pytest.approx(d.mean())
    assert c.examples.interval == pytest.approx((means[100], means[3900]), abs=0.002)
    assert c.verdict == statistics.BETTER
    assert c.p_holm == max(c.estimate.p, c.examples.p)


def test_seeds_that_agree_on_a_small_test_set_are_no_verdict(tmp_path):
    study = accuracy_study()
    classifiers(tmp_path, study, np.random.default_rng(1), count=200, gain=0.15, own=0.6)
    (c,) = judged(study, tmp_path)
    assert c.estimate.p <= 0.05 < c.examples.p
    assert c.verdict == statistics.UNDECIDED
    assert "200 test examples are too few" in c.said


def test_examples_of_some_runs_or_of_other_data_are_not_mixed(tmp_path):
    study = accuracy_study()
    classifiers(tmp_path, study, np.random.default_rng(1), count=200, gain=0.5)
    table = results.collect(study, tmp_path)
    less = dict(list(table.right.items())[1:])
    assert statistics.judge(study, replace(table, right=less))[0].examples is None
    rows = [row | {"fingerprint": "x" if row["seed"] == 1 else row["fingerprint"]} for row in table.rows]
    (c,) = statistics.judge(study, replace(table, rows=tuple(rows)), allow_mixed=True)
    assert c.examples is None
    assert c.estimate is not None


@pytest.mark.slow
def test_arms_that_differ_on_this_test_set_alone_are_rarely_called_different(tmp_path):
    """Equal accuracy in the population, other examples right in each arm: seeds agree far too often, examples do not."""
    study, rng = accuracy_study(), np.random.default_rng(5)
    classifiers(tmp_path, study, rng, count=300, gain=0.0, own=0.5, noise=0.05)
    table = results.collect(study, tmp_path)
    seeds_only = called = 0
    for _ in range(100):
        common, special = rng.normal(1, 1, 300), {arm: rng.normal(0, 0.5, 300) for arm in study.arm_names()}
        rows, right = [], {}
        for row in table.rows:
            bits = common + special[row["arm"]] + rng.normal(0, 0.05, 300) > 0
            rows.append(row | {"test.accuracy": float(bits.mean())})
            right[row["run_id"]] = (300, pack(bits))
        said = [statistics.judge(study, replace(table, rows=tuple(rows), right=kept))[0] for kept in ({}, right)]
        seeds_only += said[0].verdict in (statistics.BETTER, statistics.WORSE)
        called += said[1].verdict in (statistics.BETTER, statistics.WORSE)
    assert seeds_only > 50
    assert called <= 11  # 5 % of 100 and its sampling error


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


def test_places_that_the_study_skips_for_an_arm_are_no_comparisons(tmp_path):
    skip = {"when": {"budget.steps": 200, "arm": "gauss-frozen"}, "skip": True}
    arms = ("baseline", "oelm-freeze", "gauss-frozen")
    study = lm_study(tuning=None, arms=arms, axes={"budget.steps": [100, 200, 400]}, where=[skip])
    for one in expand(study):
        save(tmp_path, record(one, study.name, loss=2.0 + one.run.seed / 1000 + 0.1 * (one.arm != "baseline")))
    found = [(c.arm, c.at["budget.steps"], c.family) for c in judged(study, tmp_path)]
    assert sorted(found) == [
        ("gauss-frozen", 100, 2),
        ("gauss-frozen", 400, 2),
        ("oelm-freeze", 100, 2),
        ("oelm-freeze", 200, 1),
        ("oelm-freeze", 400, 2),
    ]


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
