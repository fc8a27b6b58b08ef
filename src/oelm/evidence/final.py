"""The index and the final report over all studies: tasks × architectures, and the ledger of the original's claims.

Owns what is said over several studies at once. Every number comes from a study's own results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oelm.errors import DataError
from oelm.evidence import claims, report, results
from oelm.evidence.results import replace_text
from oelm.evidence.statistics import VERDICTS
from oelm.study.rows import load_study


TITLE = "What does freezing Query and Key cost? All studies"


def render_all(
    results_dir: Path,
    out_dir: Path,
    formats: Sequence[str],
    studies: Mapping[str, Path],
    *,
    allow_mixed: bool = False,
    readme: Path | None = None,
) -> list[Path]:
    """The table in `readme`, every study that has a results CSV, then the index and the final report."""
    report.check_formats(formats)
    views = _views(results_dir, studies, allow_mixed)
    written = []
    if readme is not None:
        write_summary(readme, views)
        written.append(readme)
    out_dir.mkdir(parents=True, exist_ok=True)
    for view in views:
        written += report.write_formats(view, out_dir, view["title"], formats, page="report")
    view = overview(views)
    pages = [name for name in formats if name in ("html", "md", "pdf")]
    written += report.write_formats(view, out_dir, "index", [name for name in pages if name == "html"], page="index")
    return written + report.write_formats(view, out_dir, "final", pages, page="final")


def _views(results_dir: Path, studies: Mapping[str, Path], allow_mixed: bool) -> list[dict[str, Any]]:
    """What the pages show of every study that has results."""
    there = [path for name, path in sorted(studies.items()) if (results_dir / f"{name}.csv").is_file()]
    if not there:
        raise DataError(
            f"{results_dir}: no results of a known study; `oelm analyze --all` writes them from run records"
        )
    loaded = [load_study(path) for path in there]
    return [
        report.view_of(study, results.load(results_dir / f"{study.name}.csv"), allow_mixed=allow_mixed)
        for study in loaded
    ]


BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def write_summary(file: Path, views: Sequence[Mapping[str, Any]]) -> None:
    """Put the declared comparisons of these studies between the two marks of a Markdown file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); name a Markdown file that is there") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise DataError(f"{file}: holds no {BEGIN} and {END}; put the two lines where the table belongs")
    replace_text(file, f"{before}{BEGIN}\n{summary_table(views)}\n{END}{after}")


def summary_table(views: Sequence[Mapping[str, Any]]) -> str:
    """The declared comparisons of every study as one Markdown table, a line each."""
    lines = [
        "| study | compared | where | difference (95 % interval) | seeds | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for view in views:
        for c in view["comparisons"]:
            number = c["difference"] if c["t"] == "–" else f"{c['difference']} ({c['t']})"
            cells = (view["title"], f"{c['arm']} against {c['against']}", c["where"], number, str(c["n"]), c["verdict"])
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *overview(views)["summary"]])


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
