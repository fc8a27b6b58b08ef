"""oelm export: a finished run as a folder for transformers, with a model card written from its record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Examples: oelm export runs/fair-lm/oelm-freeze-s11-1a2b3c4d my-model · "
        "oelm export RUN my-model --checkpoint latest --push me/my-model"
    )(export)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A finished run.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write: new or empty.")],
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="best or latest.")] = "best",
    push: Annotated[str | None, typer.Option("--push", help="Upload to this repository of the hub, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The written files as JSON on stdout.")] = False,
) -> None:
    """Write a run's model, tokenizer and model card as a Hugging Face folder."""
    from oelm.cli import output
    from oelm.evidence import export as exports

    folder = exports.export(run, target, checkpoint=checkpoint, push=push)
    if json:
        output.as_json(sorted(str(path) for path in folder.iterdir()))
    else:
        print(output.clean(str(folder)))
