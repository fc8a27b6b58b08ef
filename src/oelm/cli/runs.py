"""`oelm runs ls|show|diff|rm|archive`: run folders as things to find, compare, drop and pack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


RunsFolder = Annotated[Path, typer.Option("--runs", help="The folder of all run folders.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Find, show, compare, remove and archive runs.", no_args_is_help=True)
    group.command("ls")(ls)
    group.command("show", no_args_is_help=True)(show)
    group.command("diff", no_args_is_help=True)(diff)
    group.command("rm", no_args_is_help=True)(rm)
    group.command("archive", no_args_is_help=True)(archive)
    app.add_typer(group, name="runs")


def ls(
    words: Annotated[
        list[str] | None, typer.Argument(help="Parts of ids or studies, or settings as in optimizer.lr=0.001.")
    ] = None,
    state: str = typer.Option("", "--state", help="Only runs in this state."),
    runs: RunsFolder = Path("runs"),
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """Find runs by what they are.

    [bold]Examples[/]: oelm runs ls fair-lm --state done · oelm runs ls variant.freeze=qk optimizer.lr=0.001
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from oelm.cli.output import as_json, note
    from oelm.study.archive import find
    from oelm.study.watch import main_metric

    found = find(runs, tuple(words or ()), state or None)
    if json:
        as_json([{"study": one.folder.parent.name, "id": one.id, "state": one.state} for one in found])
        return
    if not found:
        note(f"no such runs under {runs}")
        return
    table = Table("study", "run", "state", "validation", box=None)
    for one in found:
        validation = ((one.record or {}).get("metrics") or {}).get("validation") or {}
        numbers = {key: value for key, value in validation.items() if isinstance(value, int | float)}
        table.add_row(Text(one.folder.parent.name), Text(one.id), one.state, main_metric(numbers))
    Console(soft_wrap=True).print(table)


def show(
    run: str = typer.Argument(help="A run folder, an id, or a unique part of one."),
    runs: RunsFolder = Path("runs"),
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """One run: state, settings, numbers.

    [bold]Examples[/]: oelm runs show baseline-s11 · oelm runs show runs/demo/baseline-s11-0123abcd --json
    """
    from oelm.cli.output import as_json
    from oelm.study.archive import describe
    from oelm.study.folder import find_run

    said = describe(find_run(runs, run))
    if json:
        as_json(said)
        return
    typer.echo(f"{said['run']}: {said['state']}" + (f" ({said['problem']})" if said["problem"] else ""))
    typer.echo(f"  folder: {said['folder']} ({said['bytes'] / 1e6:,.1f} MB)")
    for part in ("settings", "metrics", "params", "data", "cost", "environment"):
        if said[part]:
            typer.echo(f"{part}:")
            for key, value in _lines(said[part]):
                typer.echo(f"  {key} = {value}")
    for one in said["dropped"]:
        typer.echo(f"dropped when archived: {one['path']} ({one['bytes'] / 1e6:,.1f} MB)")


def _lines(table: dict[str, Any]) -> list[tuple[str, Any]]:
    from oelm.cli.output import clean
    from oelm.study.archive import flat

    return [(key, clean(str(value))) for key, value in flat(table).items() if value is not None]


def diff(
    one: str = typer.Argument(help="A run."),
    other: str = typer.Argument(help="Another."),
    runs: RunsFolder = Path("runs"),
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """What differs between two runs' settings.

    [bold]Examples[/]: oelm runs diff GPT-06 GPT-07 · oelm runs diff baseline-s11 oelm-freeze-s11 --json
    """
    from oelm.cli.output import as_json, note
    from oelm.study.archive import differences
    from oelm.study.folder import find_run

    found = differences(find_run(runs, one), find_run(runs, other))
    if json:
        as_json([{"key": key, "one": left, "other": right} for key, left, right in found])
        return
    for key, left, right in found:
        typer.echo(f"{key}: {left} -> {right}")
    if not found:
        note("the same settings")


def rm(
    names: Annotated[list[str], typer.Argument(help="Runs: folders, ids, or unique parts of ids.")],
    runs: RunsFolder = Path("runs"),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
) -> None:
    """Delete runs, with everything they hold.

    [bold]Examples[/]: oelm runs rm baseline-s11 · oelm runs rm GPT-06 GPT-07 --yes
    """
    from oelm.cli.output import note
    from oelm.study.archive import remove
    from oelm.study.folder import find_run, folder_bytes

    folders = list(dict.fromkeys(find_run(runs, name) for name in names))
    size = sum(folder_bytes(folder) for folder in folders)
    for folder in folders:
        note(f"{folder}")
    if not yes and not typer.confirm(f"delete {len(folders)} runs ({size / 1e6:,.1f} MB)?"):
        note("nothing was deleted")
        return
    freed = sum(remove(folder) for folder in folders)
    note(f"deleted {len(folders)} runs, {freed / 1e6:,.1f} MB")


def archive(
    words: Annotated[list[str], typer.Argument(help="Parts of ids or studies, or settings as in optimizer.lr=0.001.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The .tar.gz to write; otherwise <first word>.tar.gz.")
    ] = None,
    drop: bool = typer.Option(False, "--drop", help="Then delete the checkpoints of the archived runs."),
    keep_best: bool = typer.Option(False, "--keep-best", help="With --drop: keep each run's best checkpoint."),
    runs: RunsFolder = Path("runs"),
) -> None:
    """Pack the records of finished runs (settings, metrics, results); checkpoints stay out, and with --drop go.

    [bold]Examples[/]: oelm runs archive demo · oelm runs archive original --drop --keep-best --to original.tar.gz
    """
    from oelm.cli.output import note
    from oelm.errors import ConfigError
    from oelm.study.archive import archive as pack
    from oelm.study.archive import find

    if keep_best and not drop:
        raise ConfigError("--keep-best: says what --drop leaves; give both or neither")
    found = [one.folder for one in find(runs, tuple(words))]
    target = to or Path(f"{words[0].replace('/', '-').replace('=', '-')}.tar.gz")
    done = pack(found, target, drop=drop, keep_best=keep_best)
    size = done.file.stat().st_size
    note(f"{done.file}: {done.runs} runs, {done.kept_bytes / 1e6:,.1f} MB of records in {size / 1e6:,.1f} MB")
    left_out = len(found) - done.runs
    if left_out:
        note(f"{left_out} runs are not finished and were left out")
    for path, dropped in done.dropped:
        note(f"dropped {path} ({dropped / 1e6:,.1f} MB)")
    if not drop:
        note("checkpoints are where they were; --drop deletes those of archived runs")
