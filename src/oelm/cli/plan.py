"""`oelm plan STUDY`: what a study wants, what is done, what the rest costs, and what will not work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer


if TYPE_CHECKING:
    from oelm.study.cost import Parameters
    from oelm.study.plan import Plan


RunsFolder = Annotated[Path, typer.Option("--runs", help="The folder of all run folders.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan", no_args_is_help=True)(plan)


def plan(
    study: str = typer.Argument(help="A study's TOML file, or the name of one (see `oelm plan list`)."),
    runs: RunsFolder = Path("runs"),
    rows: str = typer.Option(
        "", "--rows", help="Only these rows, arms or cells, with commas between; * and ? fit any text."
    ),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a setting of every run: key=value.")] = None,
    devices: str = typer.Option(
        "auto", "--devices", help="Whose speed to reckon with: as for oelm run, or gpu:N for N GPUs that are elsewhere."
    ),
    data: Annotated[Path | None, typer.Option("--data", help="A folder that holds data sets.")] = None,
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """Say what a study wants and what it will cost, without running anything.

    [bold]Examples[/]: oelm plan demo · oelm plan original --rows GPT-06,GPT-07
    """
    from oelm.cli.output import as_json
    from oelm.study.devices import imagined, parse_devices
    from oelm.study.plan import make_plan
    from oelm.study.rows import load_study, parse_overrides
    from oelm.study.runner import Options

    if study == "list":
        list_studies()
        return
    options = Options(
        devices=tuple(imagined(devices) or parse_devices(devices)),
        data_folder=data,
        rows=names(rows),
        overrides=parse_overrides(set_ or ()),
    )
    made = make_plan(load_study(study), runs, options)
    if json:
        as_json(made.to_dict())
    else:
        show(made, len(options.devices))


def names(text: str) -> tuple[str, ...]:
    """A list given with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def list_studies() -> None:
    """The studies that are known by name, with their questions."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from oelm.study.rows import load_study, studies_here

    table = Table("study", "question", box=None)
    for name, path in sorted(studies_here().items()):
        table.add_row(name, Text(load_study(path).question))
    Console().print(table)


def show(made: Plan, devices: int = 1, *, stderr: bool = False) -> None:
    """The plan for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from oelm.study.plan import STATES

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=200)  # a file has no width that names must fit
    console.print(Text(f"{made.study.name}: {made.study.question}", style="bold"), soft_wrap=True)
    present = [state for state in STATES if made.states[state]]
    table = Table(box=None)
    for name in ("arm", "runs", *present, "parameters", "frozen"):
        table.add_column(name, no_wrap=name != "arm", overflow="fold")
    for arm in made.arms.values():
        cells = [Text(str(arm.states[state] or "")) for state in present]
        table.add_row(Text(arm.name), str(arm.wanted), *cells, _sizes(arm.sizes), _frozen(arm.sizes))
    console.print(table)
    for line in summary(made, devices):
        console.print(Text(line), soft_wrap=True)
    for note in made.notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    for warning in made.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def summary(made: Plan, devices: int = 1) -> list[str]:
    """Runs, cost and significance, a line each."""
    states = made.states
    finished = states["done"] + states["diverged"]
    how = f"corrected by {made.measured} measured runs" if made.measured else "estimated, nothing measured yet"
    hours = made.seconds / 3600
    one = "one GPU" if made.kind == "cuda" else "this processor"
    wall = f", about {_time(made.seconds / devices)} on {devices}" if devices > 1 else ""
    lines = [
        f"{len(made.rows)} runs wanted, {finished} finished; left: {_time(made.seconds)} on {one}{wall} ({hours:,.2f} device-hours; {how})",
        f"disk: about {made.bytes_left / 1e9:,.2f} GB more ({'measured' if made.bytes_measured else 'estimated'})",
    ]
    if made.tests:
        p = f"; smallest p its seeds can reach: {made.smallest_p:.3g}" if made.smallest_p is not None else ""
        lines.append(f"family: {made.tests} comparison{'s' if made.tests > 1 else ''}, corrected by Holm{p}")
    return lines


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


def _millions(count: int) -> str:
    if count < 100_000:
        return f"{count:,}"
    return f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} G"


def _sizes(sizes: list[Parameters]) -> str:
    if not sizes:
        return "known after a run"
    totals = sorted({size.total for size in sizes})
    return _millions(totals[0]) + (f" to {_millions(totals[-1])}" if len(totals) > 1 else "")


def _frozen(sizes: list[Parameters]) -> str:
    if not sizes:
        return ""
    shares = sorted({round(100 * size.frozen / max(1, size.total), 2) for size in sizes})
    return f"{shares[0]:g} %" + (f" to {shares[-1]:g} %" if len(shares) > 1 else "")
