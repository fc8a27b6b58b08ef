"""The index and the final report over all studies: tasks × architectures, and the ledger of the original's claims.

Owns what is said over several studies at once. Every number comes from a study's own results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oelm.errors import DataError
from oelm.evidence import claims, report, results
from oelm.evidence.statistics import VERDICTS
from oelm.study.rows import load_study


TITLE = "What does freezing Query and Key cost? All studies"


def render_all(
    results_dir: Path, out_dir: Path, formats: Sequence[str], studies: Mapping[str, Path], *, allow_mixed: bool = False
) -> list[Path]:
    """Every study that has a results CSV, then the index and the final report."""
    report.check_formats(formats)
    views, written = [], []
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, path in sorted(studies.items()):
        if not (results_dir / f"{name}.csv").is_file():
            continue
        study = load_study(path)
        view = report.view_of(study, results.load(results_dir / f"{name}.csv"), allow_mixed=allow_mixed)
        written += report.write_formats(view, out_dir, study.name, formats, page="report")
        views.append(view)
    if not views:
        raise DataError(
            f"{results_dir}: no results of a known study; `oelm analyze --all` writes them from run records"
        )
    view = overview(views)
    pages = [name for name in formats if name in ("html", "md", "pdf")]
    written += report.write_formats(view, out_dir, "index", [name for name in pages if name == "html"], page="index")
    return written + report.write_formats(view, out_dir, "final", pages, page="final")


def overview(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the index and the final report show."""
    measured = {v["title"]: [c for c in v["raw_comparisons"] if c.primary] for v in views}
    entries = claims.ledger(measured)
    return {
        "title": TITLE,
        "studies": [dict(view) for view in views],
        "summary": _summary(views, entries),
        "grid": _grid(views),
        "claims": entries,
        "counts": claims.counts(entries),
    }


def _summary(views: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, str]]) -> list[str]:
    """Three sentences over everything."""
    real = [c for view in views for c in view["raw_comparisons"] if c.primary and not c.demonstration]
    runs = sum(len(view["runs"]) for view in views)
    done = sum(run["status"] == "done" for view in views for run in view["runs"])
    counted = ", ".join(
        f"{sum(c.verdict == name for c in real)} {name}" for name in VERDICTS if any(c.verdict == name for c in real)
    )
    settled = ", ".join(f"{number} {name}" for name, number in claims.counts(entries).items())
    return [
        f"{len(views)} {'study' if len(views) == 1 else 'studies'} with {done} finished runs of {runs} planned.",
        f"Of {len(real)} declared comparisons on real data: {counted}."
        if real
        else "No declared comparison on real data has a verdict yet: what follows is demonstration.",
        f"Of the original's {len(entries)} claims: {settled}.",
    ]


def _grid(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tasks × architectures: data sets down, models across, the verdicts of both in the cell."""
    cells: dict[tuple[str, str], list[str]] = {}
    for view in views:
        for c in view["raw_comparisons"]:
            if c.primary:
                model = c.stratum.removesuffix(f" on {c.data}")
                cells.setdefault((c.data, model), []).append(f"{c.arm} against {c.against}: {c.said}")
    models = sorted({model for _, model in cells})
    return {
        "models": models,
        "rows": [
            {"data": data, "cells": [cells.get((data, model), []) for model in models]}
            for data in sorted({data for data, _ in cells})
        ],
    }
