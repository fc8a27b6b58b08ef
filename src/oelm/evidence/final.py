"""The index and the final report over all studies: tasks × architectures, and the ledger of the original's claims.

Owns what is said over several studies at once. Every number comes from a study's own results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oelm.errors import DataError
from oelm.evidence import report, results
from oelm.study.rows import load_study


def render_all(
    results_dir: Path, out_dir: Path, formats: Sequence[str], studies: Mapping[str, Path], *, allow_mixed: bool = False
) -> list[Path]:
    """Every study that has a results CSV, then index and final report."""
    views, written = [], []
    for name, path in sorted(studies.items()):
        table = results_dir / f"{name}.csv"
        if not table.is_file():
            continue
        study = load_study(path)
        loaded = results.load(table)
        written += report.render(study, loaded, out_dir, formats, allow_mixed=allow_mixed)
        views.append(report.view_of(study, loaded, allow_mixed=allow_mixed))
    if not views:
        raise DataError(
            f"{results_dir}: no results of a known study; `oelm analyze --all` writes them from run records"
        )
    view = overview(views)
    pages = [name for name in formats if name in ("html", "md", "pdf")]
    return (
        written
        + report.write_formats(view, out_dir, "index", [f for f in pages if f == "html"], page="index")
        + report.write_formats(view, out_dir, "final", pages, page="final")
    )


def overview(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the index and the final report show."""
    from oelm.evidence import claims

    return {
        "title": "Frozen orthogonal Query/Key projections: all studies",
        "studies": list(views),
        "grid": _grid(views),
        "claims": claims.ledger(),
        "claim_counts": claims.counts(),
    }


def _grid(views: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tasks × architectures: one line per primary comparison, by where it was made."""
    return [line | {"study": view["title"]} for view in views for line in view["comparisons"]]
