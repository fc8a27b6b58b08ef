"""oelm report: a study's results into HTML, Markdown, LaTeX, PDF; --all adds the index and the final report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: oelm report fair-lm · oelm report --all --format html --format md")(report)


def report(
    study: Annotated[list[str] | None, typer.Argument(help="Studies by name or TOML file.")] = None,
    all_studies: Annotated[
        bool, typer.Option("--all", help="Every study with results, the index and the final report.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Where oelm analyze wrote the CSV files.")] = Path(
        "results"
    ),
    out: Annotated[Path, typer.Option("--out", help="Where the reports go.")] = Path("reports"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="html, md, tex, pdf, figures (default: the first four).")
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", help="With --all: put the table of all verdicts between this file's marks."),
    ] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Compare across data fingerprints and versions, and say so.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The written paths as JSON on stdout.")] = False,
) -> None:
    """Render the report of a study from its committed results."""
    from oelm.cli import output
    from oelm.evidence import final, pdf
    from oelm.evidence import report as reports
    from oelm.evidence import results as tables
    from oelm.study.rows import load_study, studies_here

    if not formats:
        formats = ["html", "md", "tex"]
        if pdf.find_browser() is not None:
            formats.append("pdf")
        else:
            output.note("no PDF: neither Chromium nor Chrome is on the path; print the HTML page from any browser")
    if all_studies:
        written = final.render_all(results, out, formats, studies_here(), allow_mixed=allow_mixed, readme=readme)
    elif study:
        written = []
        for name in study:
            loaded = load_study(name)
            table = tables.load(results / f"{loaded.name}.csv")
            written += reports.render(loaded, table, out, formats, allow_mixed=allow_mixed)
    else:
        raise typer.BadParameter("name a study, or give --all")
    if json:
        output.as_json([str(path) for path in written])
    else:
        for path in written:
            print(output.clean(str(path)))
