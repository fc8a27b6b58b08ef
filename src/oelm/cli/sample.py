"""oelm sample: text from a trained language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from torch import nn

    from oelm.data.tokens import Tokens
    from oelm.train.run import Run


_HELP = """Write text with the language model of RUN_FOLDER, a folder that `oelm train` or a study made.

The same prompt, settings and seed give the same text on the same machine.

Examples:

  oelm sample runs/train/run-1a2b3c4d --prompt "Once upon a time"

  oelm sample runs/tinystories/baseline-1a2b3c4d --prompt "The cat" --tokens 200 --temperature 0 --json
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("sample", help=_HELP)(_sample)


def _sample(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, with its checkpoints.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with (default: a document's beginning).")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 120,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many texts; the n-th has seed + n - 1.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among the k most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the tokens that make up this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the choices.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="best or latest.")] = "best",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="The folder that holds the data sets and tokenizers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the texts as JSON.")] = False,
) -> None:
    from oelm.cli.output import as_json as print_json
    from oelm.models.generate import Sampling
    from oelm.train.parallel import pick_device

    sampling = Sampling.read(
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}, where="oelm sample"
    )
    run, model, tokenizer, step = trained(folder, checkpoint, data)
    model.to(pick_device(device)).eval()
    texts: list[str] = []
    for number in range(count):
        parts = write(model, tokenizer, prompt, tokens, sampling.changed(seed=seed + number))
        if as_json:
            texts.append("".join(parts))
            continue
        typer.echo(prompt, nl=False)
        for part in parts:
            typer.echo(part, nl=False)
        typer.echo("\n" if number < count - 1 else "")
    if as_json:
        print_json(
            {
                "run": folder.absolute().name,
                "data": run.data.name,
                "checkpoint": checkpoint,
                "step": step,
                "prompt": prompt,
                "sampling": sampling.model_dump(),
                "texts": texts,
            }
        )


def trained(folder: Path, checkpoint: str, data: Path | None) -> tuple[Run, nn.Module, Tokens, int]:
    """A finished run's model with the weights of its checkpoint, its tokenizer, and the checkpoint's step."""
    import oelm
    from oelm.data.tokens import load_tokens
    from oelm.errors import ConfigError, nearest
    from oelm.method.record import record_of
    from oelm.models.build import build
    from oelm.train.checkpoint import load_weights, put_weights
    from oelm.train.run import Run
    from oelm.values import load_toml

    if checkpoint not in ("best", "latest"):
        raise ConfigError(f"--checkpoint {checkpoint!r}: {nearest(checkpoint, ('best', 'latest'))}")
    if not (folder / "run.toml").is_file():
        raise ConfigError(f"{folder}: has no run.toml, so it is no run's folder; name one that oelm train made")
    run = Run.read(load_toml(folder / "run.toml"), where=str(folder / "run.toml"))
    if run.model.head != "lm" or run.data.name == "recall":
        raise ConfigError(
            f"{folder}: was trained on {run.data.name}, which is no text to go on with; name a language model"
        )
    tokenizer = load_tokens(run.data.tokenizer, data)
    weights, step = load_weights(folder, checkpoint)
    model = build(run.model, vocab=tokenizer.vocab_size, seed=run.seed, context=run.data.context)
    oelm.apply(model, run.variant, seed=run.seed)
    record = record_of(model)
    regenerable = frozenset(record.regenerable) if record is not None else frozenset[str]()
    # a compact checkpoint leaves out what the seed has just given again; verify compares it with its hashes
    put_weights(model, weights, folder, skip=regenerable - set(weights))
    if run.variant.thaw is None:  # what has thawed since is not what was frozen
        oelm.verify(model)
    return run, model, tokenizer, step


def write(model: nn.Module, tokenizer: Tokens, prompt: str, tokens: int, sampling: Any) -> Iterator[str]:
    """The text after the prompt, piece by piece, up to the end of its document."""
    import torch

    from oelm.models.generate import generate

    device = next(model.parameters()).device
    # without a prompt the model stands where it always stood before a document: behind the end of the last one
    start = tokenizer.encode(prompt) or [tokenizer.eos_id]
    found = generate(
        model, torch.tensor([start], device=device), tokens=tokens, sampling=sampling, stop=tokenizer.eos_id
    )
    return _pieces(tokenizer, start, (int(token) for token in found))


def _pieces(tokenizer: Tokens, before: Iterable[int], ids: Iterable[int]) -> Iterator[str]:
    """Decoded text as it grows; half a character waits for its other bytes."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    for token in before:  # spaces and joined pieces depend on what stands before
        stream.step(tokenizer.backend, token)
    for token in ids:
        piece = stream.step(tokenizer.backend, token)
        if piece:
            yield piece
