"""A run of a second: a recall task of 32 held-out sequences and a model of a few thousand weights."""

from __future__ import annotations

from typing import Any

from oelm.train.run import Run


def small_run(**changes: Any) -> Run:
    """A run of a second; nested settings as optimizer__lr=..."""
    table: dict[str, Any] = {
        "model": {"width": 16, "layers": 2, "heads": 2, "hidden": 32, "context": 32, "dropout": 0.1},
        "data": {"name": "recall", "context": 32, "pairs": 4, "symbols": 32, "examples": 64},
        "variant": "oelm-freeze",
        "optimizer": {"lr": 3e-3, "warmup": 2},
        "budget": {"steps": 24, "batch": 4},
        "eval_every": 8,
        "seed": 1,
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = table
        for name in path:
            inner = inner[name]
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return Run.read(table, where="test")
