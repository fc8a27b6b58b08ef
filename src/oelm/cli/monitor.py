"""`oelm monitor`: every run, live, in the terminal or as a page on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from rich.console import RenderableType


COLOURS = {
    "running": "cyan",
    "done": "green",
    "failed": "red",
    "foreign": "red",
    "diverged": "magenta",
    "stalled": "yellow",
}


RunsFolder = Annotated[Path, typer.Option("--runs", help="The folder of all run folders.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("monitor")(monitor)


def monitor(
    study: str = typer.Argument("", help="Only this study."),
    runs: RunsFolder = Path("runs"),
    once: bool = typer.Option(False, "--once", help="One look, then stop."),
    json: bool = typer.Option(False, "--json", help="One look, for machines."),
    web: bool = typer.Option(False, "--web", help="A page on 127.0.0.1 that updates by itself."),
    port: int = typer.Option(0, "--port", min=0, max=65535, help="Of the page; 0: any free one."),
    every: float = typer.Option(2.0, "--every", min=0.2, max=3600, help="Seconds between looks."),
) -> None:
    """Watch runs: state, step, loss, validation, tokens/s, time left, device, heartbeat. Reads run folders only.

    [bold]Examples[/]: oelm monitor · oelm monitor fair-lm --once · oelm monitor --web
    """
    from oelm.cli.output import as_json, note
    from oelm.study.watch import Watcher

    if web:
        serve(runs, study or None, port)
        return
    watcher = Watcher(runs, study or None)
    if json:
        as_json(watcher.snapshot(curves=True))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width that lines must fit
    shown = watcher.snapshot()
    if not shown["runs"]:
        note(f"no runs under {runs} yet; start some with `oelm run STUDY`")
    if once or not console.is_terminal:
        console.print(table(shown, None))
        return
    live(watcher, console, every)


def live(watcher: Any, console: Any, every: float) -> None:
    """The table, drawn again until Ctrl-C."""
    import contextlib
    import time

    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as screen:
        while True:
            screen.update(table(watcher.snapshot(), console.height - 4), refresh=True)
            time.sleep(every)


def table(snapshot: dict[str, Any], height: int | None) -> RenderableType:
    """A snapshot as a table; what does not fit is counted, never silently cut."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from oelm.study.watch import main_metric

    rows = snapshot["runs"] if height is None else snapshot["runs"][: max(1, height)]
    grid = Table(box=None, expand=False, pad_edge=False)
    for name in ("state", "run", "step", "loss", "", "validation", "tok/s", "left", "device", "beat"):
        if name == "run":
            grid.add_column(name, overflow="fold", min_width=16, ratio=1)
        else:
            grid.add_column(name, overflow="ellipsis", no_wrap=True)
    for row in rows:
        steps = f"{row['step'] or 0:,}/{row['steps']:,}" if row["steps"] else f"{row['step'] or ''}"
        grid.add_row(
            Text(row["state"], style=COLOURS.get(row["state"], "")),
            Text(f"{row['study']}/{row['id']}"),
            steps,
            "" if row["loss"] is None else f"{row['loss']:.3f}",
            row["spark"],
            main_metric(row["validation"]),
            "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            "" if row["eta_s"] is None else _time(row["eta_s"]),
            Text(row["device"] or ""),
            "" if row["heartbeat_age"] is None else _time(row["heartbeat_age"]),
        )
        if row["error"]:
            grid.add_row("", Text(row["error"], style="red"))
    counts = ", ".join(f"{count} {state}" for state, count in snapshot["states"].items()) or "no runs"
    hidden = len(snapshot["runs"]) - len(rows)
    more = f"; {hidden} more not shown (make the window higher, or use --once)" if hidden else ""
    return Group(grid, Text(f"{counts}{more}", style="dim"))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def serve(runs: Path, study: str | None, port: int) -> None:
    """The page, until Ctrl-C."""
    import contextlib

    from oelm.cli.output import note
    from oelm.study.web import Monitor

    page = Monitor(runs, study, port)
    note("open this address in a browser on this machine (it holds the key; Ctrl-C stops):")
    print(page.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        page.serve()
