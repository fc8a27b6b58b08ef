"""oelm probe: what the attention heads of finished runs do, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Examples: oelm probe runs/fair-lm/baseline-s11-1a2b3c4d runs/fair-lm/oelm-freeze-s11-5e6f7a8b · "
        'oelm probe RUN --text "the cat sat on the mat and the cat sat" --json'
    )(probe)


def probe(
    run: Annotated[
        list[Path], typer.Argument(metavar="RUN_FOLDER...", help="Finished runs; several stand side by side.")
    ],
    text: Annotated[
        str | None, typer.Option("--text", help="Measure on this text, and draw its attention maps.")
    ] = None,
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="best or latest.")] = "best",
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("probe.html"),
    json: Annotated[bool, typer.Option("--json", help="The numbers as JSON on stdout.")] = False,
) -> None:
    """Look into the attention of trained models: entropy, distance, logit scale, spectrum, induction."""
    from dataclasses import asdict, replace

    from oelm.cli import output
    from oelm.evidence import headmaps, probes
    from oelm.evidence.labels import variant_label
    from oelm.evidence.report import write_page

    found, maps = [], {}
    for folder in run:
        settings, model = probes.load_run(folder, checkpoint)
        ids, given = probes.reading_of(settings, text)
        name = folder.resolve().name
        one = probes.probe(model, name=name, variant=variant_label(settings.variant), ids=ids, given=given)
        if settings.data.name == "recall":
            one = replace(one, recall=probes.recall_by_pairs(model, settings))
        found.append(one)
        if text is not None:
            maps[name] = probes.maps_of(model, settings, ids, given)
    write_page(headmaps.as_view(found, maps), out, "probes.html.j2")
    if json:
        output.as_json([_finite(asdict(one)) for one in found])
    else:
        print(output.clean(str(out)))


def _finite(value: object) -> object:
    """NaN (a head without a matrix) as null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value != value else value
