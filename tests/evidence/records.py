"""Synthetic run records in the documented format, with a truth that the tests know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from oelm.study.rates import chosen_rates
from oelm.study.rows import Planned, Study, expand, read_study
from oelm.train import examples


def lm_study(
    name: str = "synthetic", *, arms: tuple[str, ...] = ("baseline", "oelm-freeze", "gauss-frozen"), **more: Any
) -> Study:
    """A tuned language-model study: every arm against the first."""
    seeds = more.pop("seeds", list(range(100, 108)))
    data = {
        "question": "What does freezing cost on a text that does not exist?",
        "margin": {"percent": 5.0},
        "family": [{"arm": arm, "against": arms[0], "metric": "perplexity", "split": "validation"} for arm in arms[1:]],
        "base": {
            "model": "gpt-tiny",
            "data": {"name": "wikipedia", "context": 64},
            "budget": {"steps": 100},
            "optimizer": {},
        },
        "arms": list(arms),
        "tuning": {"rates": [3e-4, 1e-3, 3e-3], "seeds": [0, 1]},
        "comparison": {"seeds": seeds},
    } | more
    return read_study(data, where="test", name=name)


def record(planned: Planned, study: str, *, loss: float | None, status: str = "done", **changes: Any) -> dict[str, Any]:
    """One result.json."""
    metrics: dict[str, Any] = (
        {} if loss is None else {"loss": loss, "perplexity": float(np.exp(loss)), "accuracy": 1 / (1 + loss)}
    )
    made = {
        "schema": 1,
        "run_id": planned.id,
        "study": study,
        "row": planned.row,
        "status": status,
        "run": planned.run.model_dump(mode="json"),
        "metrics": {"validation": metrics, "test": None, "best": metrics},
        "params": {"total": 44_896_768, "trainable": 41_751_040, "frozen": 3_145_728},
        "frozen_digest": {"start": "ab12", "end": "ab12"},
        "logit_std": 1.0,
        "data": {
            "name": "wikipedia",
            "status": "real",
            "fingerprint": "f" * 16,
            "tokens_seen": 409_600,
            "examples_seen": None,
        },
        "cost": {
            "seconds": 12.5,
            "train_seconds": 10.0,
            "step_seconds_median": 0.01,
            "tokens_per_s": 40_960.0,
            "peak_bytes": 10**9,
            "energy_j": None,
        },
        "environment": {
            "oelm": "0.1.0",
            "torch": "2.13.0",
            "python": "3.12",
            "device": "cpu",
            "source": "0123456789ab",
            "git": "abc",
            "dirty": False,
            "world": 1,
            "beside": 5,
        },
        "error": None if status == "done" else "the loss became NaN at step 7",
        "curve": [] if loss is None else [[t, loss + 50_000 / t] for t in (50_000, 100_000, 200_000, 409_600)],
    }
    for key, value in changes.items():
        made[key] = made[key] | value if isinstance(value, dict) and isinstance(made.get(key), dict) else value
    return made


def save(root: Path, made: dict[str, Any], right: Any = None) -> None:
    """`right`: which test examples a classifier got right, as its loop keeps them."""
    folder = root / made["study"] / made["run_id"]
    folder.mkdir(parents=True, exist_ok=True)
    if right is not None:
        text = examples.contents(dict(enumerate(right)))
        (folder / examples.FILE).write_text(text)
        made["metrics"]["test"] = {"accuracy": float(np.mean(right)), "loss": 1.0}
        made["examples"] = examples.named(text)
    (folder / "result.json").write_text(json.dumps(made))


def run_study(
    study: Study, root: Path, *, effect: dict[str, float], noise: float = 0.01, rng_seed: int = 0, **changes: Any
) -> None:
    """Records of a whole tuned study: loss = 3 + effect of the arm + (log rate - best)² + what the seed gives + noise."""
    rng = np.random.default_rng(rng_seed)
    made: list[dict[str, Any]] = []
    for purpose in ("tune", "compare"):
        for planned in expand(study, chosen_rates(study, made)):
            if planned.purpose != purpose:
                continue
            run = planned.run
            shared = np.random.default_rng(run.seed).normal(0, 0.05)
            rate = (np.log10(run.optimizer.lr) + 3) ** 2
            loss = 3 + effect.get(planned.arm, 0.0) + 0.1 * rate + shared + rng.normal(0, noise)
            made.append(record(planned, study.name, loss=float(loss), **changes))
    for one in made:
        save(root, one)
