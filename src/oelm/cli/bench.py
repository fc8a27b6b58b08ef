"""`oelm bench`: our step against the loops people write, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench")(bench)


def bench(
    name: str = typer.Argument(
        "gpt-512", metavar="MODEL", help="A preset (gpt-512, bert-base), or a Hugging Face folder."
    ),
    batch: int = typer.Option(None, "--batch", min=1, help="Sequences a step [8; Hugging Face models: 32]."),
    context: int = typer.Option(
        None, "--context", min=2, help="Tokens a sequence [the model's; Hugging Face models: 128]."
    ),
    steps: int = typer.Option(60, "--steps", min=3, help="Steps that are timed; the median counts."),
    arms: str = typer.Option("", "--arms", help="Only these, with commas between [all]."),
    dropout: float = typer.Option(0.0, "--dropout", min=0.0, max=0.9, help="In every arm."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N."),
    out: Annotated[Path | None, typer.Option("--out", help="Also write the table as JSON to this file.")] = None,
    json: bool = typer.Option(False, "--json", help="For machines."),
) -> None:
    """Time a training step: ours, ours frozen, and the loops people write, eager and compiled; beside the floor.

    Examples: oelm bench bert-base; oelm bench gpt-512 --batch 64 --arms "oelm,oelm frozen,by hand compiled"
    """
    from oelm.cli.output import as_json, note
    from oelm.errors import ConfigError, nearest
    from oelm.models.shapes import PRESETS, HubModel, Shape
    from oelm.train.bench import arms_of, table
    from oelm.train.bench import bench as measure
    from oelm.train.folder import write_atomically
    from oelm.train.parallel import pick_device
    from oelm.values import canonical

    if name in PRESETS:
        spec = PRESETS[name]
    elif (Path(name) / "config.json").is_file():
        spec = HubModel(path=name)
    else:
        raise ConfigError(
            f"bench: {name!r} is neither a preset nor a folder with config.json; {nearest(name, PRESETS)}"
        )
    if isinstance(spec, HubModel) and spec.head != "classify":
        raise ConfigError(f"bench: {name} has no classifier to time; use bert-base, minilm or one of our own presets")
    if isinstance(spec, HubModel):
        spec = spec.changed(config_only=True)
    known = arms_of(spec)
    wanted = tuple(arm.strip() for arm in arms.split(",") if arm.strip()) or known
    for arm in wanted:
        if arm not in known:
            raise ConfigError(f"bench: arm {arm!r} is unknown for {name}; {nearest(arm, known)}")
    ours = isinstance(spec, Shape)
    found = measure(
        name,
        spec,
        batch=batch or (8 if ours else 32),
        context=context or (spec.context if isinstance(spec, Shape) else 128),
        arms=wanted,
        dropout=dropout,
        device=pick_device(device),
        steps=steps,
        say=note,
    )
    if out is not None:
        write_atomically(out, canonical(found) + "\n")
    if json:
        as_json(found)
    else:
        print(table(found))
