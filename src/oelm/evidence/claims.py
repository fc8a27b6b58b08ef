"""The ledger of the original's claims: what was said, what arithmetic settles, what was measured, the verdict.

Owns the rules from numbers to confirmed, refuted, confounded, not tested. The claims are data (claims.toml); every
number beside them is computed (arithmetic.py) or read from results/. Demonstrations settle nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field

from oelm.evidence.statistics import BETTER, NOT_WORSE, REFUSED, UNDECIDED, WORSE, Comparison
from oelm.values import Value, parse_toml


CONFIRMED, REFUTED, CONFOUNDED, NOT_TESTED = "confirmed", "refuted", "confounded", "not tested"
VERDICTS = (CONFIRMED, REFUTED, CONFOUNDED, NOT_TESTED)
# What a measured verdict says of a claim that expects something.
OUTCOME = {
    "better": {BETTER: CONFIRMED, WORSE: REFUTED, NOT_WORSE: REFUTED},
    "worse": {WORSE: CONFIRMED, BETTER: REFUTED, NOT_WORSE: REFUTED},
    "no worse": {BETTER: CONFIRMED, NOT_WORSE: CONFIRMED, WORSE: REFUTED},
    "not within the margin": {WORSE: CONFIRMED, BETTER: REFUTED, NOT_WORSE: REFUTED},
}


class Claim(Value):
    """One claim as data."""

    id: str
    source: str
    said: str
    check: str | None = None
    claimed: float | int | None = None
    within: float | None = None
    ceiling: bool = False
    study: str | None = None
    arm: str | None = None
    against: str | None = None
    data: str | None = None
    expects: Literal["better", "worse", "no worse", "not within the margin"] | None = None
    verdict: Literal["confirmed", "refuted", "confounded", "not tested"] | None = None
    why: str = ""


class _File(Value):
    claim: list[Claim] = Field(min_length=25)


def claims() -> list[Claim]:
    """The table, validated."""
    text = resources.files("oelm.evidence").joinpath("claims.toml").read_text(encoding="utf-8")
    return _File.read(parse_toml(text, where="claims.toml"), where="claims.toml").claim


def ledger(measured: Mapping[str, Sequence[Comparison]] | None = None) -> list[dict[str, str]]:
    """Every claim with what arithmetic settles, what the named study measured, and the verdict."""
    return [_settled(claim, measured or {}) for claim in claims()]


def measured_in(results_dir: Path | str) -> dict[str, list[Comparison]]:
    """The primary comparisons of every study that the claims name and `results_dir` has."""
    from oelm.evidence.results import load
    from oelm.evidence.statistics import judge
    from oelm.study.rows import load_study, studies_here

    known = studies_here()
    found = {}
    for name in sorted({claim.study for claim in claims() if claim.study}):
        path = Path(results_dir) / f"{name}.csv"
        if path.is_file() and name in known:
            found[name] = [c for c in judge(load_study(known[name]), load(path)) if c.primary]
    return found


def counts(entries: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """How many claims have each verdict, in the order of VERDICTS."""
    counted = Counter(entry["verdict"] for entry in entries)
    return {name: counted[name] for name in VERDICTS}


def markdown(entries: Sequence[Mapping[str, str]]) -> str:
    """docs/claims.md."""
    from oelm.evidence.report import template_text

    return template_text({"claims": list(entries), "counts": counts(entries)}, "claims.md.j2")


def _settled(claim: Claim, measured: Mapping[str, Sequence[Comparison]]) -> dict[str, str]:
    from oelm.evidence.arithmetic import ARITHMETIC

    value, sentence = ARITHMETIC[claim.check]() if claim.check else (None, "")
    comparisons = [c for c in measured.get(claim.study or "", ()) if (c.arm, c.against) == (claim.arm, claim.against)]
    said = "; ".join(f"{c.stratum}, {c.budget}: {c.said}" for c in comparisons)
    verdict = _by_arithmetic(claim, value) or _by_study(claim, comparisons) or claim.verdict or NOT_TESTED
    return {
        "id": claim.id,
        "source": claim.source,
        "said": claim.said,
        "arithmetic": sentence,
        "study": claim.study or "",
        "measured": said or ("not yet" if claim.study else ""),
        "verdict": verdict,
        "why": claim.why,
    }


def _by_arithmetic(claim: Claim, value: float | None) -> str | None:
    """Settled where a number was claimed: equal within the stated tolerance, or not above a ceiling."""
    if value is None or claim.claimed is None:
        return None
    if claim.ceiling:
        return CONFIRMED if claim.claimed <= value else REFUTED
    return CONFIRMED if abs(value - claim.claimed) <= (claim.within or 0.0) * abs(claim.claimed) else REFUTED


def _by_study(claim: Claim, comparisons: Sequence[Comparison]) -> str | None:
    """Settled where every comparison on real data has a verdict and all of them say the same."""
    if claim.expects is None:
        return None
    real = [c for c in comparisons if not c.demonstration and claim.data in (None, c.data)]
    if not real or any(c.verdict in (UNDECIDED, REFUSED) for c in real):
        return None
    outcomes = {OUTCOME[claim.expects][c.verdict] for c in real}
    return outcomes.pop() if len(outcomes) == 1 else REFUTED if claim.expects != "worse" else None
