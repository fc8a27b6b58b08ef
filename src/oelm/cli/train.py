"""oelm train: one run from a TOML file, in a folder of its own."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Annotated, Any

import typer


_HELP = """Train one run: RUN.toml names model, data, variant, optimizer, budget and seed.

The same command continues a run that was stopped, and shows the result of one that is over.

Examples:

  oelm train run.toml

  oelm train run.toml --out runs/try --set optimizer.lr=3e-4 --set budget.steps=2000 --device cpu --json
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train", help=_HELP)(_train)


def _train(
    file: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run as TOML; a run.toml of any run folder is one.")
    ],
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/train/<name>-<id>).")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; the value is TOML.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    parallel: Annotated[str, typer.Option(help="Under torchrun: ddp or fsdp.")] = "ddp",
    data: Annotated[Path | None, typer.Option(help="The folder that holds the data sets.")] = None,
    progress: Annotated[str, typer.Option(help="auto, live, line or none.")] = "auto",
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps (default: eval_every).")] = None,
    keep_last: Annotated[int, typer.Option(min=1, help="How many checkpoints stay beside the best.")] = 2,
    compact: Annotated[
        bool, typer.Option("--compact", help="Leave out of checkpoints what the seed gives again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    from oelm.train.signals import ignored_from_here, starting

    atexit.register(ignored_from_here)
    with starting(str(out or file)):
        result, folder = _trained(
            file,
            out,
            change,
            device=device,
            data_folder=data,
            progress=progress,
            checkpoint_every=checkpoint_every,
            keep_last=keep_last,
            compact=compact,
            parallel=parallel,
        )
    if os.environ.get("RANK", "0") == "0":  # under torchrun one process speaks
        _say(result, folder, as_json=as_json)


def _trained(file: Path, out: Path | None, change: list[str] | None, **options: Any) -> tuple[dict[str, Any], Path]:
    """What became of the run, and its folder."""
    from oelm.train.progress import check_mode
    from oelm.train.run import Run, run_id
    from oelm.values import load_toml

    check_mode(options["progress"])
    table = load_toml(file)
    for text in change or ():
        _set(table, text)
    run = Run.read(table, where=str(file))
    folder = out or Path("runs") / "train" / run_id(_row(file), run)

    from oelm.train.loop import train

    return train(run, folder, **options), folder


def _row(file: Path) -> str:
    """A row's name from a file's: what a name may not hold becomes '-'."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in file.stem).lstrip("._-")
    return name[:80] or "run"


def _set(table: dict[str, Any], text: str) -> None:
    """Put `a.b=value` into the table; a value that is no TOML is taken as a string."""
    from oelm.errors import ConfigError
    from oelm.values import parse_toml

    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {text!r}: write KEY=VALUE, for example optimizer.lr=3e-4")
    try:
        plain = parse_toml(f"value = {value}", where=f"--set {text}")["value"]
    except ConfigError:
        plain = value.strip()
    for depth, name in enumerate(names[:-1]):
        inner = table.get(name)
        if inner is None:
            inner = {}
        elif isinstance(inner, str) and name in _SHORT:
            inner = {_SHORT[name]: inner}
        elif not isinstance(inner, dict):
            raise ConfigError(f"--set {text!r}: {'.'.join(names[: depth + 1])} is no table; set it whole")
        table[name] = inner
        table = inner
    table[names[-1]] = plain


_SHORT = {"model": "preset", "data": "name", "variant": "base"}  # what a bare name stands for


def _say(result: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    from oelm.cli.output import as_json as print_json
    from oelm.errors import DivergedError

    if as_json:
        print_json(result)
    else:
        _summary(result, folder)
    if result["status"] == "diverged":
        raise DivergedError(f"{folder}: diverged: {result['error']}; try a lower optimizer.lr")


def _summary(result: dict[str, Any], folder: Path) -> None:
    metrics = result["metrics"]
    typer.echo(f"{result['run_id']}: {result['status']}")
    for split in ("validation", "test"):
        numbers = metrics.get(split) or {}
        shown = "  ".join(f"{k} {v:.4f}" for k, v in numbers.items() if isinstance(v, float))
        if shown:
            typer.echo(f"  {split}: {shown}")
    params = result.get("params")
    if params:
        typer.echo(f"  parameters: {params['total']:,}, frozen {params['frozen']:,}")
    typer.echo(f"  {folder}/result.json")
