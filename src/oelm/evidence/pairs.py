"""Runs of two arms paired by seed and data order: their values, and which test examples they got right.

Refuses nothing: runs without a partner are named, and what is compared is decided in statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oelm.evidence import paired
from oelm.evidence.paired import OverExamples
from oelm.evidence.results import Row, Table
from oelm.train.examples import unpack


@dataclass(frozen=True, kw_only=True)
class Point:
    """One pair: the same seed and data order in both arms."""

    seed: int
    value: float
    reference: float


def pairs_of(sides: list[list[Row]], metric: str) -> tuple[dict[int, list[tuple[Row, Row]]], list[int]]:
    """By seed, the runs that both arms finished (several where the rate is an axis); and the seeds of runs without partner."""
    found: list[dict[tuple[int, float], Row]] = []
    tuned = all(one_rate(side) is not None for side in sides)
    for side in sides:
        finished = [row for row in side if row["status"] == "done" and row.get(metric) is not None]
        found.append({(row["seed"], 0.0 if tuned else row["lr"]): row for row in finished})
    pairs: dict[int, list[tuple[Row, Row]]] = {}
    for key in sorted(found[0].keys() & found[1].keys()):
        pairs.setdefault(key[0], []).append((found[0][key], found[1][key]))
    return pairs, sorted({seed for seed, _ in found[0].keys() ^ found[1].keys()})


def point(seed: int, pairs: list[tuple[Row, Row]], metric: str) -> Point:
    """A seed's values; where the rate is an axis, their means over the rates that both arms have."""
    value, reference = (math.fsum(float(row[metric]) for row in side) / len(side) for side in zip(*pairs, strict=True))
    return Point(seed=seed, value=value, reference=reference)


def over_examples(
    results: Table, pairs: Mapping[int, list[tuple[Row, Row]]], metric: str, margin: float | None, level: float
) -> OverExamples | None:
    """The paired bootstrap over one test set's examples; None where a run did not keep them, or kept others."""
    rows = [row for of_seed in pairs.values() for pair in of_seed for row in pair]
    kept = {row["run_id"]: results.right[row["run_id"]] for row in rows if row["run_id"] in results.right}
    sets = {(row.get("fingerprint"), kept.get(row["run_id"], (0, ""))[0]) for row in rows}
    if metric != "test.accuracy" or len(kept) < len(rows) or len(sets) != 1:
        return None
    right = {run_id: unpack(text, count).astype(float) for run_id, (count, text) in kept.items()}
    of_seeds = [
        np.mean([right[row["run_id"]] - right[reference["run_id"]] for row, reference in of_seed], axis=0)
        for of_seed in pairs.values()
    ]
    return paired.over_examples(np.mean(of_seeds, axis=0), margin=margin, level=level)


def one_rate(rows: list[Row]) -> float | None:
    rates = {row["lr"] for row in rows}
    return rates.pop() if len(rates) == 1 else None


def without_number(rows: list[Row], metric: str) -> int:
    return sum(row["status"] == "done" and row.get(metric) is None for row in rows)
