"""What a run leaves as its record: result.json's fields and the environment it ran in."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oelm import __version__
from oelm.train.run import Run


SCHEMA = 1


def environment(device: torch.device, precision: str) -> dict[str, Any]:
    """Versions and the machine, as far as they can change a number."""
    git, dirty = _git()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "oelm": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": f"{device.type}: {name}",
        "git": git,
        "dirty": dirty,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "world": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _git() -> tuple[str | None, bool | None]:
    """The commit of the source that runs, when it runs from a checkout."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None, None
    try:
        commit = _run_git(here, "rev-parse", "HEAD")
        dirty = bool(_run_git(here, "status", "--porcelain", "--untracked-files=no", "--", "src"))
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, dirty


def _run_git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def parameters(model: nn.Module, trainable: Iterable[int]) -> dict[str, int]:
    """Counts; a parameter that will thaw counts as trainable."""
    ids = set(trainable)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad or id(p) in ids)
    return {"total": total, "trainable": trained, "frozen": total - trained}


def record(
    run: Run, *, run_id: str, study: str | None, row: str | None, status: str, error: str | None = None, **known: Any
) -> dict[str, Any]:
    """result.json: every field is there; what is not known is null."""
    nothing: Mapping[str, Any] = {
        "metrics": {"validation": None, "test": None, "best": None},
        "params": None,
        "frozen_digest": {"start": None, "end": None},
        "logit_std": None,
        "data": None,
        "cost": None,
        "environment": None,
        "curve": [],
    }
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "study": study,
        "row": row,
        "status": status,
        "run": run.model_dump(mode="json"),
        **nothing,
        **known,
        "error": error,
    }
