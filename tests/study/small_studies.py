"""What the tests of studies share: a small study, and a way to run one with a trainer that only counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.study.rows import Study, read_study
from oelm.study.runner import Options, Outcome, Runner


BASE: dict[str, Any] = {
    "model": "gpt-tiny",
    "data": {"name": "demo", "tokenizer": "demo-bpe", "context": 64},
    "variant": "baseline",
    "budget": {"steps": 5, "batch": 2},
    "optimizer": {"lr": 1e-3},
}


def small(**changes: Any) -> dict[str, Any]:
    """A study as plain data."""
    return {
        "question": "Does the runner do what it should?",
        "base": BASE,
        "arms": ["baseline", "oelm-freeze"],
    } | changes


TUNED: dict[str, Any] = {
    "tuning": {"rates": [1e-3, 3e-3, 1e-2], "seeds": [1, 2]},
    "comparison": {"seeds": [11, 12]},
    "family": [{"arm": "oelm-freeze", "against": "baseline", "metric": "perplexity"}],
}


def study(name: str = "small", **changes: Any) -> Study:
    return read_study(small(**changes), where=f"{name}.toml", name=name)


def run_study(one: Study, runs: Path, trainer: str, **options: Any) -> tuple[Outcome, list[str]]:
    """Run a study with the counting trainer; the outcome and what was said."""
    said: list[str] = []
    outcome = Runner(one, runs, Options(trainer=trainer, **options), say=said.append).run()
    return outcome, said
