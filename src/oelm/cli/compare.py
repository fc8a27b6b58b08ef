"""oelm compare: should I freeze Q/K in my fine-tuning? A template study; then its runs and its report in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Examples: oelm compare my-study.toml --data reviews.csv --model bert-base-uncased · "
        "oelm compare my-study.toml --dry-run · oelm compare my-study.toml"
    )(compare)


def compare(
    study: Annotated[Path, typer.Argument(metavar="MY_STUDY.toml", help="Written if it is not there, else run.")],
    data: Annotated[Path | None, typer.Option("--data", help="Your CSV, JSONL or Parquet file or folder.")] = None,
    model: Annotated[
        str, typer.Option("--model", help="A Hugging Face name or folder, or bert-base or minilm.")
    ] = "bert-base-uncased",
    text: Annotated[str, typer.Option("--text", help="The column of texts.")] = "text",
    label: Annotated[str, typer.Option("--label", help="The column of labels.")] = "label",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="bert, gpt2 or a tokenizer.json (default: the model's, or bert).")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders go.")] = Path("runs"),
    out: Annotated[Path, typer.Option("--out", help="Where results/ and reports/ go.")] = Path("."),
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value changes of every run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many runs are wanted.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON on stdout.")] = False,
) -> None:
    """Write a study of your own model and data; called again, plan, run and report it."""
    from oelm.cli import output
    from oelm.errors import ConfigError, StudyIncomplete
    from oelm.evidence import report, results, verdicts
    from oelm.models.shapes import PRESETS, Shape
    from oelm.study.plan import make_plan
    from oelm.study.rows import load_study, parse_overrides
    from oelm.study.runner import Options, Runner

    if study.suffix != ".toml":
        raise ConfigError(f"{study}: name a file that ends in .toml")
    if not study.exists():
        if data is None:
            raise ConfigError(f"{study}: is not there yet; give --data FILE (and --model NAME) to write it")
        if not data.exists():
            raise ConfigError(f"--data {data}: no such file or folder")
        preset = PRESETS.get(model)
        if isinstance(preset, Shape):
            raise ConfigError(
                f"--model {model}: is trained from scratch, and this compares fine-tunings; use bert-base or minilm"
            )
        model = preset.path if preset is not None else model
        own = Path(model) / "tokenizer.json"
        view = {
            "model": str(Path(model).resolve()) if Path(model).is_dir() else model,
            "data": str(data.resolve()),
            "text": text,
            "label": label,
            "tokenizer": tokenizer or (str(own.resolve()) if own.is_file() else "bert"),
        }
        report.write_page(view, study, "compare.toml.j2")
        load_study(study)
        output.note(f"wrote {study}: read it, change it, then run: oelm compare {study}")
        return
    loaded = load_study(study)
    changes = parse_overrides(overrides or [])
    options = Options(overrides=changes)
    plan = make_plan(loaded, runs, options)
    output.note(f"{loaded.name}: {len(plan.rows)} runs wanted, {plan.states['done']} done")
    if dry_run:
        return
    outcome = Runner(loaded, runs, options, say=output.note).run()
    table = results.collect(loaded, runs, changes)
    results.write(table, out / "results")
    written = report.render(loaded, table, out / "reports")
    said = verdicts.summary(loaded, table)
    if json:
        output.as_json(said)
    else:
        verdicts.show(said)
        print(output.clean(f"report: {written[0]}"))
    if not outcome.complete:
        raise StudyIncomplete(f"{loaded.name}: {len(outcome.failed)} runs failed; the same command tries them again")
