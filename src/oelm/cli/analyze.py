"""oelm analyze: run records into one tidy CSV a study, with verdicts on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: oelm analyze fair-lm · oelm analyze --all --results results")(analyze)


def analyze(
    study: Annotated[list[str] | None, typer.Argument(help="Studies by name or TOML file.")] = None,
    all_studies: Annotated[bool, typer.Option("--all", help="Every known study that has run records.")] = False,
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders are.")] = Path("runs"),
    results: Annotated[Path, typer.Option("--results", help="Where the CSV files go.")] = Path("results"),
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Compare across data fingerprints and versions, and say so.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="The key=value changes the runs were made with.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON on stdout.")] = False,
) -> None:
    """Collect run records into one CSV a study and say the verdicts."""
    from oelm.cli import output
    from oelm.errors import DataError
    from oelm.evidence import results as table
    from oelm.evidence import verdicts
    from oelm.study.rows import load_study, parse_overrides, studies_here

    names = list(studies_here()) if all_studies else list(study or [])
    if not names:
        raise typer.BadParameter("name a study, or give --all")
    said = []
    for name in names:
        loaded = load_study(name)
        collected = table.collect(loaded, runs, parse_overrides(overrides or []))
        if all(row["status"] == "missing" for row in collected.rows):
            if all_studies:
                continue
            raise DataError(f"{runs / loaded.name}: no run records of this study; run it first: oelm run {name}")
        path = table.write(collected, results)
        output.note(f"{path}: {len(collected.rows)} rows")
        said.append(verdicts.summary(loaded, collected, allow_mixed=allow_mixed))
    if json:
        output.as_json(said)
    else:
        for one in said:
            verdicts.show(one)
