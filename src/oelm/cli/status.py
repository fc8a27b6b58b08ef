"""`oelm status`: every study that has runs, with counts of their states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


RunsFolder = Annotated[Path, typer.Option("--runs", help="The folder of all run folders.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("status")(status)


def status(
    study: str = typer.Argument("", help="Only this study."),
    runs: RunsFolder = Path("runs"),
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """Say how far each study is: done, running, partial, failed.

    [bold]Examples[/]: oelm status · oelm status fair-lm --json
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from oelm.cli.output import as_json, note
    from oelm.study.watch import study_states

    found = study_states(runs, study or None)
    if json:
        as_json(found)
        return
    if not found:
        note(f"no runs under {runs}; start some with `oelm run STUDY`")
        return
    table = Table("study", "runs", "states", "last change", box=None)
    for one in found:
        states = ", ".join(f"{count} {state}" for state, count in one["states"].items())
        table.add_row(Text(one["study"]), str(one["runs"]), states, one["changed"])
    Console().print(table)
