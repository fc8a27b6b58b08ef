"""`oelm demo`: the whole path in minutes, on the text that every Python carries. No network, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from collections.abc import Iterator

    from oelm.study.plan import Plan

NO_EVIDENCE = "This is a demonstration on a small text: it shows how the program works and is no evidence for anything."
QUICK: dict[str, Any] = {"budget.steps": 40, "optimizer.warmup": 4, "eval_every": 20}
QUICK_ARMS = ("baseline", "oelm-freeze")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option("--out", help="The folder of runs, results and the report.")] = Path("oelm-demo"),
    quick: bool = typer.Option(False, "--quick", help="Two arms and 40 steps a run: the same path in seconds."),
    json: bool = typer.Option(False, "--json", help="Verdicts and paths for machines."),
) -> None:
    """Tune and train five small models, compare them, write a report: minutes on two cores, no network, no GPU.

    Finished runs are used again; Ctrl-C and the same command continue.

    Examples: oelm demo; oelm demo --quick --out /tmp/quick-demo
    """
    from oelm.cli.output import as_json, clean, note
    from oelm.errors import StudyIncomplete
    from oelm.evidence import report, results, verdicts
    from oelm.study.plan import make_plan
    from oelm.study.rows import load_study
    from oelm.study.runner import Options, Runner

    study = load_study("demo")
    runs = out.absolute() / "runs"
    overrides = QUICK if quick else {}
    options = Options(per_device=2, rows=QUICK_ARMS if quick else (), overrides=overrides)
    plan = make_plan(study, runs, options)
    note(NO_EVIDENCE)
    done = plan.states["done"] + plan.states["diverged"]
    note(f"{len(plan.rows)} runs wanted" + (f", {done} of them are finished already and used again" if done else ""))
    with _progress(plan, runs) as say:
        outcome = Runner(study, runs, options, say=say).run()
    if not outcome.complete:
        first = next(iter(outcome.failed.values()), None) or outcome.blocked[0]
        raise StudyIncomplete(f"demo: {len(outcome.failed)} runs failed (first: {first}); the same command tries again")
    table = results.collect(study, runs, overrides)
    results.write(table, out / "results")
    written = report.render(study, table, out / "reports", ["html", "md"])
    said = verdicts.summary(study, table)
    if json:
        as_json({"note": NO_EVIDENCE, "reports": [str(path) for path in written]} | said)
        return
    verdicts.show(said)
    print(f"report: {clean(str(next(path for path in written if path.suffix == '.html')))}")
    print(NO_EVIDENCE)


def _progress(plan: Plan, runs: Path) -> Any:
    """A live display on a terminal, plain lines elsewhere; yields the function that says a message."""
    import contextlib

    from rich.console import Console

    from oelm.cli.output import note

    console = Console(stderr=True)

    @contextlib.contextmanager
    def shown() -> Iterator[Any]:
        if not console.is_terminal:
            yield note
            return
        from oelm.cli.live import StudyDisplay

        with StudyDisplay(plan, runs, console) as display:
            yield display.say

    return shown()
