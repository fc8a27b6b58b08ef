"""Verdicts of a study as plain data (for --json) and as lines on the terminal."""

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
        "p": f"{narrative.p_value(e.p)} (the smallest with n: {narrative.p_value(e.p_smallest)})" if e else None,
        "place": c.place,
        "n": c.n,
        "said": c.said,
    }
    return asdict(c) | {"shown": shown}


def show(said: dict[str, Any]) -> None:
    """Answer and verdicts for a person at the terminal."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    console.print(Text(visible(said["study"]), style="bold"), Text(visible(said["question"])))
    for sentence in said["answer"]:
        console.print(Text(visible(sentence)))
    for c in said["comparisons"]:
        console.print(Text(visible(f"{c['arm']} against {c['against']}: {c['shown']['said']}"), style="bold"))
        for line in _numbers(c):
            console.print(Padding(Text(visible(line)), (0, 0, 0, 2), expand=False))


def _numbers(c: dict[str, Any]) -> list[str]:
    """What a verdict rests on, a line each."""
    shown = c["shown"]
    lines = [shown["place"]]
    if shown["difference"]:
        lines.append(f"{shown['difference']}; 95 % t interval {shown['interval']}; n = {shown['n']}")
        lines.append(f"p = {shown['p']}; Holm over {c['family']}: {narrative.p_value(c['p_holm'])}")
    if shown["over_examples"]:
        lines.append(f"over test examples (how many): {shown['over_examples']}")
    return lines
