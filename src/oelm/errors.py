"""What can go wrong, said in one line: what happened, where, what to do.

Every error a user can cause is an OelmError; its class fixes the exit code (docs/exit-codes.md).
Standard library only: every layer may import this one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OelmError(Exception):
    """A fault of use, data or machine. The message is one line and never empty."""

    exit_code = 1


class ConfigError(OelmError, ValueError):
    """A value that a user wrote cannot be used: options, TOML, names."""

    exit_code = 2


class MethodError(ConfigError):
    """The method cannot be applied to this model as asked; the model is as it was."""


class DataError(OelmError):
    """A data set, a tokenizer or a token store cannot be used."""

    exit_code = 3


class CheckpointError(OelmError):
    """A checkpoint is corrupt, foreign or incompatible."""

    exit_code = 4


class FrozenWeightsChanged(CheckpointError):
    """A weight that was declared frozen is not what it was when it was frozen."""


class MachineError(OelmError):
    """Disk full, no permission, no such device, a missing program or package."""

    exit_code = 5


class BusyError(OelmError):
    """Another process holds this run folder or store."""

    exit_code = 6


class DivergedError(OelmError):
    """The loss became NaN or infinite, or exploded."""

    exit_code = 7


class StudyIncomplete(OelmError):
    """Some runs of a study failed; the table says which."""

    exit_code = 8


class OutOfMemory(OelmError):
    """The device or the machine has too little memory for this run."""

    exit_code = 9


class Preempted(OelmError):
    """Stopped by a signal after saving; the same command continues. EX_TEMPFAIL."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the closest known word, or all of them when few: for the end of a message."""
    choices = sorted(set(known))
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(choices) <= 24:
        return "known: " + ", ".join(choices)
    return f"known: {', '.join(choices[:12])}, … ({len(choices)} in all)"
