"""`oelm bench`: our step against the loops people write, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench")(bench)


def bench(
    preset: str = typer.Argument("gpt-512", help="One of our own shapes."),
    batch: int = typer.Option(8, "--batch", min=1, help="Sequences a step."),
    steps: int = typer.Option(60, "--steps", min=3, help="Steps that are timed; the median counts."),
    arms: str = typer.Option("", "--arms", help="Only these, with commas between [all]."),
    dropout: float = typer.Option(0.0, "--dropout", min=0.0, max=0.9, help="In every arm."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N."),
    out: Annotated[Path | None, typer.Option("--out", help="Also write the table as JSON to this file.")] = None,
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """Time a training step: ours, ours frozen, a loop by hand, Hugging Face; eager and compiled; beside the floor.

    Examples: oelm bench; oelm bench gpt-512 --batch 64 --arms "oelm,oelm frozen,by hand compiled"
    """
    from oelm.cli.output import as_json, note
    from oelm.errors import ConfigError, nearest
    from oelm.models.shapes import PRESETS
    from oelm.train.bench import ARMS, table
    from oelm.train.bench import bench as measure
    from oelm.train.folder import write_atomically
    from oelm.train.parallel import pick_device
    from oelm.values import canonical

    if preset not in PRESETS:
        raise ConfigError(f"bench: preset {preset!r} is unknown; {nearest(preset, PRESETS)}")
    wanted = tuple(name.strip() for name in arms.split(",") if name.strip()) or ARMS
    for name in wanted:
        if name not in ARMS:
            raise ConfigError(f"bench: arm {name!r} is unknown; {nearest(name, ARMS)}")
    found = measure(
        preset, batch=batch, arms=wanted, device=pick_device(device), steps=steps, dropout=dropout, say=note
    )
    if out is not None:
        write_atomically(out, canonical(found) + "\n")
    if json:
        as_json(found)
    else:
        print(table(found))
