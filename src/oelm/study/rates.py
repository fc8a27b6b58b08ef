"""Tuning runs become chosen rates: by one rule for every arm, on validation alone. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from oelm.study.model import HIGHER_IS_BETTER, Study, Tuning
from oelm.study.rows import cell_words, cells, fits, fresh_rows, is_compared, overridden, tuning_runs


def chosen_rates(
    study: Study, records: Iterable[Mapping[str, Any]], overrides: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Cell -> the rate its tuning runs favour, for cells whose tuning is complete.

    `records` are result.json contents. A diverged run counts as the worst there is: a rate is as good as its
    mean over the tuning seeds, on the validation split (at the best evaluation, whose weights are kept). Ties go to the smaller rate.
    """
    if study.tuning is None:
        return {}
    choices = _choices(study, study.tuning, records, overrides)
    return {cell: rate for cell, rate in choices.items() if rate is not None}


def rates_that_failed(
    study: Study, records: Iterable[Mapping[str, Any]], overrides: Mapping[str, Any] | None = None
) -> list[str]:
    """Cells whose tuning is complete and left no rate: every one diverged."""
    if study.tuning is None:
        return []
    return [cell for cell, rate in _choices(study, study.tuning, records, overrides).items() if rate is None]


def _choices(
    study: Study, tuning: Tuning, records: Iterable[Mapping[str, Any]], overrides: Mapping[str, Any] | None
) -> dict[str, float | None]:
    known = {record.get("run_id"): record for record in records}
    scores: dict[str, dict[float, list[float | None]]] = {}
    tuned = (one for cell in cells(study) if cell.tuned_by == cell.name for one in tuning_runs(tuning, cell))
    for one in tuned:
        value = _score(known.get(overridden(one, overrides).id), tuning.select)
        scores.setdefault(one.cell, {}).setdefault(one.run.optimizer.lr, []).append(value)
    chosen: dict[str, float | None] = {}
    for cell in cells(study):
        rates = scores.get(cell.tuned_by)
        if rates is None or any(value is None for values in rates.values() for value in values):
            continue
        means = {rate: sum(v for v in values if v is not None) / len(values) for rate, values in rates.items()}
        rate, best = min(means.items(), key=lambda pair: (pair[1], pair[0]))
        chosen[cell.name] = rate if math.isfinite(best) else None
    return chosen


def _score(record: Mapping[str, Any] | None, select: str) -> float | None:
    """Lower is better; infinite for a diverged run, None while it is not finished."""
    if record is None or record.get("status") not in ("done", "diverged"):
        return None
    if record["status"] == "diverged":
        return math.inf
    metrics = record.get("metrics") or {}
    value = (metrics.get("best") or metrics.get("validation") or {}).get(select)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return math.inf
    return -float(value) if select in HIGHER_IS_BETTER else float(value)


def waiting_cells(study: Study, rates: Mapping[str, float], names: Iterable[str] = ()) -> dict[str, str]:
    """Cells with comparisons among `names` that have no rate yet, each with the cell whose tuning gives it."""
    chosen = tuple(names)
    return {
        cell.name: cell.tuned_by
        for cell in (cells(study) if study.tuning else ())
        if is_compared(study, cell)
        and cell.name not in rates
        and (not chosen or fits(cell_words(cell) | fresh_rows(study, cell), chosen))
    }
