"""oelm data: which data sets there are, preparing them, looking into them, training a tokenizer, carrying them away."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


_GROUP = "List, prepare, inspect and carry data sets; train a tokenizer."

_LIST = """Every data set by name: what it is, where its files are, and what is prepared.

Examples:

  oelm data list

  oelm data list --folder ~/corpora --json
"""

_PREPARE = """Make a data set ready to be read: tokens in a checked store. Again, it is already there; killed, it continues.

Examples:

  oelm data prepare wikipedia --tokenizer gpt2

  oelm data prepare local --path notes.txt --task lm --tokenizer bytes --json
"""

_INSPECT = """What is in a data set: splits, tokens, lengths, balance of labels, samples, duplicates between splits.

Examples:

  oelm data inspect demo --tokenizer demo-bpe

  oelm data inspect imdb --tokenizer bert --context 256 --json
"""

_PACK = """Write a prepared data set as one compressed file, for a machine that has not the text.

Examples:

  oelm data pack wikipedia --tokens 24_000_000 -o wikipedia.oelm.xz

  oelm data pack imdb --tokenizer bert --context 256 -o parcels/ --json
"""

_TOKENIZER = """Train a small byte-level BPE on the training documents of a corpus, and use the file as --tokenizer.

Examples:

  oelm data tokenizer tinystories --vocabulary 4096 -o stories.json

  oelm data tokenizer local --path notes.txt --vocabulary 1024 -o notes.json --json
"""

_UNPACK = """Bring a packed data set in: checked against its hashes, then ready to be read.

Examples:

  oelm data unpack wikipedia.oelm.xz

  OELM_HOME=/scratch/oelm oelm data unpack wikipedia.oelm.xz --json
"""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name of oelm data list, or local with --path and --task.")]
Folder = Annotated[Path | None, typer.Option(help="Search this folder before all other places.")]
Tokenizer = Annotated[str, typer.Option(help="gpt2, bert, bytes, demo-bpe or a tokenizer.json.")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="Only so many training tokens (24_000_000 is fine).")]
Context = Annotated[int, typer.Option(min=2, help="Tokens of a window or the longest example.")]
Examples = Annotated[int | None, typer.Option(min=1, help="Only so many training examples (tasks).")]
Selection = Annotated[str, typer.Option(help="validation, or test: the original's protocol, for replication only.")]
Seed = Annotated[int, typer.Option(min=0, help="Of splits that are carved by hash, and of made data.")]
PathOption = Annotated[Path | None, typer.Option("--path", help="local: the file or folder.")]
Task = Annotated[str | None, typer.Option(help="local: lm, classify, tag or qa.")]
Columns = Annotated[
    list[str] | None, typer.Option("--column", metavar="ROLE=COLUMN", help="local: which column has which role.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help=_GROUP, no_args_is_help=True)
    group.command("list", help=_LIST)(_list)
    group.command("prepare", help=_PREPARE)(_prepare)
    group.command("inspect", help=_INSPECT)(_inspect)
    group.command("tokenizer", help=_TOKENIZER)(_tokenizer)
    group.command("pack", help=_PACK)(_pack)
    group.command("unpack", help=_UNPACK)(_unpack)
    app.add_typer(group, name="data")


def _list(folder: Folder = None, as_json: Json = False) -> None:
    from oelm.cli import output
    from oelm.data.open import available

    rows = available(folder)
    if as_json:
        output.as_json(rows)
        return
    _table(
        ("name", "kind", "where", "status", "prepared", "what"),
        [
            (
                row["name"],
                row["kind"],
                row["place"] or "-",
                row["status"] or "-",
                ", ".join(row["prepared"]) or "-",
                row["title"],
            )
            for row in rows
        ],
    )


def _prepare(
    name: Name,
    folder: Folder = None,
    tokenizer: Tokenizer = "gpt2",
    tokens: Tokens = None,
    examples: Examples = None,
    context: Context = 512,
    selection: Selection = "validation",
    seed: Seed = 0,
    path: PathOption = None,
    task: Task = None,
    column: Columns = None,
    wait: Annotated[bool, typer.Option(help="Wait for another process that prepares the same.")] = False,
    as_json: Json = False,
) -> None:
    from oelm.cli import output
    from oelm.data.open import Damaged, load

    spec = _spec(name, tokenizer, tokens, examples, context, selection, seed, path, task, column)
    begun = time.monotonic()
    with _progress(name) as report:
        try:
            source = load(spec, folder=folder, report=report, wait=wait)
        except Damaged as error:
            output.note(f"{error} (done now)")
            source = load(spec, folder=folder, report=report, wait=wait, repair=True)
    said = {
        "name": source.name,
        "kind": source.kind,
        "status": source.provenance["status"],
        "fingerprint": source.fingerprint,
        "train_size": source.train_size,
        "seconds": round(time.monotonic() - begun, 2),
        "provenance": source.provenance,
    }
    if as_json:
        output.as_json(said)
        return
    print(f"{source.name}: ready, {said['status']} ({source.kind}, {source.train_size:,} training sequences)")
    for split, held in (source.provenance.get("splits") or source.provenance.get("counts") or {}).items():
        shown = ", ".join(f"{value:,} {key}" for key, value in held.items()) if isinstance(held, dict) else f"{held:,}"
        print(f"  {split}: {shown}")
    print(f"  fingerprint {source.fingerprint[:16]}, licence {source.provenance.get('licence', 'none')}")
    if source.provenance.get("note"):
        print(f"  note: {output.clean(source.provenance['note'])}")


def _inspect(
    name: Name,
    folder: Folder = None,
    tokenizer: Tokenizer = "gpt2",
    tokens: Tokens = None,
    examples: Examples = None,
    context: Context = 512,
    selection: Selection = "validation",
    seed: Seed = 0,
    path: PathOption = None,
    task: Task = None,
    column: Columns = None,
    as_json: Json = False,
) -> None:
    from oelm.cli import output
    from oelm.data.open import describe, load

    spec = _spec(name, tokenizer, tokens, examples, context, selection, seed, path, task, column)
    with _progress(name) as report:
        source = load(spec, folder=folder, report=report)
    said = describe(source)
    if as_json:
        output.as_json(said)
    else:
        _show(said)


def _tokenizer(
    name: Name,
    out: Annotated[Path, typer.Option("--out", "-o", help="The tokenizer.json to write.")],
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="At most so many tokens, the 256 bytes among them.")
    ] = 4096,
    folder: Folder = None,
    seed: Seed = 0,
    path: PathOption = None,
    column: Columns = None,
    as_json: Json = False,
) -> None:
    from oelm.cli import output
    from oelm.data.open import train_tokenizer

    task = "lm" if name == "local" else None
    spec = _spec(name, "bytes", None, None, 512, "validation", seed, path, task, column)
    said = train_tokenizer(spec, vocabulary, out, folder=folder)
    if as_json:
        output.as_json(said)
    else:
        print(f"{output.clean(said['file'])}: {said['vocabulary']:,} tokens; use it with --tokenizer")


def _pack(
    name: Name,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write (a folder for tasks).")],
    folder: Folder = None,
    tokenizer: Tokenizer = "gpt2",
    tokens: Tokens = None,
    examples: Examples = None,
    context: Context = 512,
    selection: Selection = "validation",
    seed: Seed = 0,
    path: PathOption = None,
    task: Task = None,
    column: Columns = None,
    as_json: Json = False,
) -> None:
    from oelm.cli import output
    from oelm.data.open import load, pack

    spec = _spec(name, tokenizer, tokens, examples, context, selection, seed, path, task, column)
    with _progress(name) as report:
        source = load(spec, folder=folder, report=report)
    file = pack(source, spec, out)
    said = {"file": str(file), "bytes": file.stat().st_size, "fingerprint": source.fingerprint}
    if as_json:
        output.as_json(said)
    else:
        print(f"{output.clean(str(file))}: {said['bytes']:,} bytes; bring it in with: oelm data unpack")


def _unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What oelm data pack wrote.")], as_json: Json = False
) -> None:
    from oelm.cli import output
    from oelm.data.open import unpack

    said = unpack(file)
    if as_json:
        output.as_json(said)
    else:
        print(f"{output.clean(said['name'])}: ready in {output.clean(said['folder'])}")


def _spec(
    name: str,
    tokenizer: str,
    tokens: str | None,
    examples: int | None,
    context: int,
    selection: str,
    seed: int,
    path: Path | None,
    task: str | None,
    columns: list[str] | None,
) -> Any:
    from oelm.data.spec import DataSpec
    from oelm.errors import ConfigError

    mapped = {}
    for text in columns or ():
        role, mark, column = text.partition("=")
        if not mark or not role or not column:
            raise ConfigError(f"--column {text}: write ROLE=COLUMN, for example text=body")
        mapped[role] = column
    table: dict[str, Any] = {
        "name": name,
        "tokenizer": tokenizer,
        "examples": examples,
        "context": context,
        "selection": selection,
        "seed": seed,
        "columns": mapped,
    }
    if tokens is not None:
        try:
            table["tokens"] = int(tokens)
        except ValueError:
            raise ConfigError(f"--tokens {tokens}: is not a whole number; write for example 24_000_000") from None
    if path is not None:
        table["path"] = str(path)
    if task is not None:
        table["task"] = task
    return DataSpec.read(table, where=f"oelm data {name}")


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """How preparation goes, on stderr: a live line at a terminal, now and then a line in a log."""
    from oelm.cli import output

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            line = bar.add_task(f"{name}: looking", total=None)
            yield lambda split, done, more: bar.update(line, description=f"{name} {split}: {done:,} ({more:,})")
        return
    last = time.monotonic()

    def report(split: str, done: int, more: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            output.note(f"{name} {split}: {done:,} ({more:,})")

    yield report


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from oelm.cli.output import clean

    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads) - 1)]
    for row in [heads, *rows]:
        cells = [clean(cell).ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, clean(row[-1])]).rstrip())


def _show(said: dict[str, Any]) -> None:
    from oelm.cli.output import clean

    provenance = said["provenance"]
    print(f"{said['name']} ({said['kind']}), {provenance['status']}, fingerprint {said['fingerprint'][:16]}")
    print(
        f"  from: {clean(', '.join(map(str, provenance.get('from') or ['made here'])))} ({provenance.get('place', '-')})"
    )
    print(f"  licence: {provenance.get('licence', '-')}")
    if provenance.get("note"):
        print(f"  note: {clean(provenance['note'])}")
    for split, held in said["splits"].items():
        print(f"{split}:")
        for key, value in held.items():
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"  {key}: {shown if shown is not None else '-'}")
        for text in said["samples"].get(split, []):
            print(f"  sample: {clean(text)[:160]}")
    for where, counts in (said["overlap"].get("within") or {}).items():
        print(f"duplicates within {where}: {', '.join(f'{k} {v}' for k, v in counts.items())}")
    for where, counts in (said["overlap"].get("between") or {}).items():
        print(f"duplicates {where}: {', '.join(f'{k} {v}' for k, v in counts.items())}")
    for batch, waste in said.get("waste", {}).items():
        print(f"padding at batch {batch}: {waste:.1%}")
