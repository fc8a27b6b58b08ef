"""The ledger: data in order, arithmetic computed, verdicts by rule, the committed page as generated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from records import lm_study, run_study

from oelm.evidence import arithmetic, claims, results, statistics


pytest.importorskip("transformers", reason="BERT's arithmetic needs transformers")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def entries():
    return {entry["id"]: entry for entry in claims.ledger()}


def test_at_least_25_claims_each_with_a_source_and_a_verdict(entries):
    table = claims.claims()
    assert len(table) >= 25
    assert len({claim.id for claim in table}) == len(table) == len(entries)
    for claim in table:
        assert claim.source
        assert claim.check is None or claim.check in arithmetic.ARITHMETIC
        assert (claim.expects is None) == (claim.study is None)
        assert entries[claim.id]["verdict"] in claims.VERDICTS
        assert claim.claimed is not None or claim.verdict is not None
    assert {claim.check for claim in table if claim.check} <= set(arithmetic.ARITHMETIC)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        # by hand: V·d + T·d + L(4d² + 2·d·f + f + d + 4d) + 2d
        ("gpt-parameters", 50257 * 512 + 512 * 512 + 6 * (4 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512) + 1024),
        ("gpt-frozen-share", 100 * 6 * 2 * 512**2 / 44_896_768),
        ("bert-parameters", 109_484_547),
        ("bert-frozen", 12 * 2 * (768**2 + 768)),
        ("checkpoint-baseline", 12 * 44_896_768 / 2**20),
        ("checkpoint-frozen", (12 * 44_896_768 - 8 * 3_145_728) / 2**20),
        ("logit-scale", 1 / (0.0004 * 512)),
        ("ppl-tinystories", 100 * (4.69 / 4.27 - 1)),
        ("ppl-gpt06", math.exp(3.224)),
        ("bert-time", 100 * (1 - 5138 / 11971)),
        ("gpt01-step", 16260 / 100_000),
    ],
)
def test_arithmetic_by_other_means(check, value):
    assert arithmetic.ARITHMETIC[check]()[0] == pytest.approx(value)


def test_ceilings_are_those_of_one_weight_gradient_of_three():
    assert arithmetic.ARITHMETIC["gpt-ceiling"]()[0] == pytest.approx(2.2, abs=0.1)
    assert arithmetic.ARITHMETIC["bert-ceiling"]()[0] == pytest.approx(5.4, abs=0.1)


def test_known_verdicts(entries):
    for name in ("gpt-size", "gpt-frozen-12.9", "bert-57-faster", "gxnli-21-faster", "step-0184-tinystories"):
        assert entries[name]["verdict"] == claims.REFUTED
    for name in ("gpt-frozen-7", "bert-size", "bert-frozen", "checkpoint-514", "checkpoint-490", "gpt06-loss"):
        assert entries[name]["verdict"] == claims.CONFIRMED
    assert entries["orthogonal-beats-random"]["verdict"] == claims.CONFOUNDED


@pytest.mark.parametrize(
    ("effect", "status", "verdict"),
    [
        (0.2, "real", claims.CONFIRMED),
        (-0.2, "real", claims.REFUTED),
        (0.0, "real", claims.REFUTED),
        (0.2, "demo", claims.NOT_TESTED),
    ],
)
def test_measurements_settle_and_demonstrations_do_not(tmp_path, effect, status, verdict):
    study = lm_study("fair-lm", arms=("baseline", "oelm-freeze"))
    run_study(study, tmp_path, effect={"oelm-freeze": effect}, data={"status": status})
    measured = {"fair-lm": statistics.judge(study, results.collect(study, tmp_path))}
    found = {entry["id"]: entry for entry in claims.ledger(measured)}
    assert found["goal-missed"]["verdict"] == verdict
    assert "wikipedia" in found["goal-missed"]["measured"]
    assert found["tinystories-gap"]["verdict"] == claims.CONFOUNDED  # measured on another data set


def test_the_committed_page_is_what_the_program_makes():
    page = claims.markdown(claims.ledger(claims.measured_in(ROOT / "results")))
    assert (ROOT / "docs" / "claims.md").read_text() == page, "run: oelm claims --out docs/claims.md"
