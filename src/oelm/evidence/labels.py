"""How runs are grouped and called in tables: model, variant, stratum, budget, number formats.

Owns names only. Two runs of one stratum and one budget may stand in one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oelm.method.variant import Variant, name_of


def model_label(model: Mapping[str, Any]) -> str:
    """A short name of a model for tables."""
    if model["kind"] == "hub":
        return Path(model["path"]).name + (" (random weights)" if model["config_only"] else "")
    shape = f"gpt {model['width']}×{model['layers']}, {model['heads']} heads, context {model['context']}"
    return shape if model["head"] == "lm" else f"{shape}, {model['head']}"


def variant_label(variant: Variant) -> str:
    """The variant's name, or what sets a custom one apart."""
    name = name_of(variant)
    if name != "custom":
        return name
    parts = [variant.init, f"freeze {variant.freeze}", "tied" if variant.tie else "", *variant.addons]
    return "custom: " + ", ".join(part for part in parts if part)


def data_label(data: Mapping[str, Any]) -> str:
    """The data set's name, marked where checkpoints were selected on the test split (the original's protocol)."""
    return f"{data['name']} (selected on test)" if data["selection"] == "test" else str(data["name"])


def stratum_of(row: Mapping[str, Any]) -> str:
    """Model and data: no comparison crosses them."""
    return f"{row['model']} on {row['data']}"


def budget_of(row: Mapping[str, Any]) -> tuple[float, str]:
    """A row's planned budget: its size for ordering, and its words."""
    if row.get("steps") is not None:
        return float(row["steps"]) * row["batch"], f"{row['steps']:,} steps of {row['batch']}"
    if row.get("token_budget") is not None:
        return float(row["token_budget"]), f"{row['token_budget']:,} tokens"
    epochs = row.get("epochs") or 0.0
    return float(epochs), f"{epochs:g} epochs"


def count(value: float | None) -> str:
    """A count with its unit prefix: 44.9 M, 3.1 k."""
    if value is None:
        return "–"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6000:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
