"""`oelm doctor`: what this machine can do, one line a check."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    json: bool = typer.Option(False, "--json", help="For machines and bug reports."),
) -> None:
    """Check versions, devices, self-tests, disk, hub and cluster; say what to do about anything bad.

    Exit code 5 when something is bad; notes alone are fine.

    Examples: oelm doctor; oelm doctor --json
    """
    from rich.console import Console
    from rich.text import Text

    from oelm.cli.output import as_json
    from oelm.errors import MachineError
    from oelm.train.machine import checks

    found = []
    console = Console(soft_wrap=True)
    marks = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red bold")}
    for finding in checks():
        found.append(finding)
        if not json:
            mark, style = marks[finding.state]
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            console.print(Text.assemble((mark, style), f"  {finding.check:18s} {finding.seen}{remedy}"))
    if json:
        as_json([finding.to_dict() for finding in found])
    bad = [finding.check for finding in found if finding.state == "bad"]
    if bad:
        raise MachineError(f"doctor: {', '.join(bad)}: see the lines above")
