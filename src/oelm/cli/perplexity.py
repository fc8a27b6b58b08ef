"""oelm perplexity: a trained language model's perplexity, with all that it depends on; also with sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


_HELP = """How well the language model of RUN_FOLDER predicts a split of its data, with all that such a number depends on.

Perplexity by token compares within one tokenizer only; by word, and bits by byte, across tokenizers. With --stride below
the context, windows overlap, and every token is scored with as much text before it as the context holds.

Examples:

  oelm perplexity runs/fair-lm/baseline-1a2b3c4d --stride 256

  oelm perplexity runs/train/run-1a2b3c4d --split test --json
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("perplexity", help=_HELP)(_perplexity)


def _perplexity(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, with its checkpoints.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    stride: Annotated[int | None, typer.Option(help="Tokens between windows (default: the context).")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows at a time (default: as in training).")] = None,
    checkpoint: Annotated[str, typer.Option(help="best or latest.")] = "best",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="The folder that holds the data sets and tokenizers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from oelm.cli import output

    said = measured(folder, split, stride, batch=batch, checkpoint=checkpoint, device=device, data=data)
    if as_json:
        output.as_json(said)
        return
    print(f"{output.clean(said['run'])} on {said['data']} ({said['status']}), {said['split']}:")
    shown = {name: f"{said[name]:.4f}" if said[name] is not None else "not finite" for name in _MEASURES}
    print("  " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items()))
    print(f"  over {said['tokens']:,} tokens, {said['words']:,} words ({said['word_count']}), {said['bytes']:,} bytes")
    print(f"  tokenizer {output.clean(said['tokenizer'])}, context {said['context']:,}, stride {said['stride']:,}")


_MEASURES = ("nats_per_token", "perplexity", "perplexity_per_word", "bits_per_byte")


def measured(
    folder: Path,
    split: str,
    stride: int | None = None,
    *,
    batch: int | None = None,
    checkpoint: str = "best",
    device: str = "auto",
    data: Path | None = None,
) -> dict[str, Any]:
    """What `oelm perplexity` says, as plain data."""
    from oelm.data.open import load
    from oelm.errors import ConfigError, nearest
    from oelm.evidence.probes import load_run
    from oelm.train.objectives import objective_for
    from oelm.train.parallel import pick_device
    from oelm.train.step import Step, autocast, pick_precision

    if checkpoint not in ("best", "latest"):
        raise ConfigError(f"--checkpoint {checkpoint!r}: {nearest(checkpoint, ('best', 'latest'))}")
    run, model = load_run(folder, checkpoint)
    source = load(run.data, folder=data)
    if source.kind != "lm":
        raise ConfigError(f"{folder}: was trained on {run.data.name}, which has no perplexity; name a language model")
    where = pick_device(device)
    objective = objective_for(run.model, source)
    with autocast(where, Step.dtypes.get(pick_precision(run.precision, where))):
        found = objective.evaluate(
            model.to(where), source, split, device=where, batch=batch or run.budget.batch, stride=stride
        )
    said: dict[str, Any] = source.perplexity(split, found["loss"] * found["tokens"], found["tokens"], stride=stride)
    known = {"run": folder.absolute().name, "checkpoint": checkpoint, "data": source.name, "split": split}
    return known | {"status": source.provenance["status"], "fingerprint": source.fingerprint} | said
