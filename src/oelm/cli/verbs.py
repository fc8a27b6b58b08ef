"""The table of verbs, in the order of --help.

Each names a module of this package whose `register(app)` adds one command (or one group). Such a module imports only
typer and the standard library at its top, so that `oelm --help` stays quick.
"""

from __future__ import annotations

import importlib

import typer


VERBS: tuple[str, ...] = (
    "demo",
    "doctor",
    "train",
    "plan",
    "run",
    "monitor",
    "status",
    "runs",
    "analyze",
    "report",
    "claims",
    "probe",
    "export",
    "compare",
    "perplexity",
    "sample",
    "inspect",
    "bench",
    "data",
)


def register(app: typer.Typer) -> None:
    """Add every verb of the table."""
    for verb in VERBS:
        importlib.import_module(f"oelm.cli.{verb}").register(app)
