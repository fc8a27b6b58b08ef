"""Verdicts of a study as plain data (for --json) and as a table on the terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from oelm.evidence import narrative
from oelm.evidence.results import Table, visible
from oelm.evidence.statistics import Comparison, judge
from oelm.study.rows import Study


def summary(study: Study, results: Table, *, allow_mixed: bool = False) -> dict[str, Any]:
    """Question, answer, comparisons and the states of the runs."""
    comparisons = judge(study, results, allow_mixed=allow_mixed)
    return {
        "study": study.name,
        "question": study.question,
        "answer": narrative.answer(comparisons, results),
        "runs": dict(sorted(Counter(row["status"] for row in results.rows).items())),
        "comparisons": [_plain(c) for c in comparisons],
        "deviations": narrative.deviations(study, comparisons, results),
    }


def _plain(c: Comparison) -> dict[str, Any]:
    e = c.estimate
    shown = {
        "difference": narrative.difference(c, e.mean) if e else None,
        "interval": narrative.interval(c, e.t_interval) if e else None,
        "over_examples": narrative.over_examples(c) if c.examples else None,
        "p": f"{narrative.p_value(e.p)} / {narrative.p_value(e.p_smallest)}" if e else "–",
        "n": c.n,
        "said": c.said,
    }
    return asdict(c) | {"shown": shown}


def show(said: dict[str, Any]) -> None:
    """Answer and verdicts for a person at the terminal."""
    from rich.console import Console
    from rich.table import Table as Lines
    from rich.text import Text

    console = Console()
    console.print(Text(visible(said["study"]), style="bold"), Text(visible(said["question"])))
    for sentence in said["answer"]:
        console.print(Text(visible(sentence)))
    budgets = {c["budget"] for c in said["comparisons"]}
    lines = Lines(show_edge=False, pad_edge=False, box=None)
    examples = any(c["shown"]["over_examples"] for c in said["comparisons"])
    over = ("over examples",) if examples else ()
    for head in ("comparison", "n", "difference", "95 % t interval", *over, "p / smallest", "Holm p", "verdict"):
        lines.add_column(head, no_wrap=head not in ("comparison", "verdict"))
    for c in said["comparisons"]:
        shown = c["shown"]
        pair = f"{c['arm']} against {c['against']}" + (f", {c['budget']}" if len(budgets) > 1 else "")
        cells = [pair, str(shown["n"]), shown["difference"] or "–", shown["interval"] or "–"]
        cells += [shown["over_examples"] or "–"] if examples else []
        cells += [shown["p"], narrative.p_value(c["p_holm"]), shown["said"]]
        lines.add_row(*(Text(visible(cell)) for cell in cells))
    if said["comparisons"]:
        console.print(lines)
        if len(budgets) == 1:
            console.print(Text(visible(f"all at {budgets.pop()}"), style="dim"))
