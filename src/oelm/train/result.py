"""What a run leaves as its record: result.json's fields and the environment it ran in."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oelm import __version__
from oelm.method.record import record_of
from oelm.train.clock import Clock
from oelm.train.memory import peak_bytes
from oelm.train.run import Run
from oelm.train.state import State


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
        "source": source(),
        "git": git,
        "dirty": dirty,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        "beside": int(os.environ.get("OELM_BESIDE", "1")),  # runs that shared the device, this one counted
    }


def source() -> str:
    """Twelve hex digits of this package's own files: names the code where there is no checkout to name it."""
    here = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        found.update(f"{path.relative_to(here).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


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


def parameters(model: nn.Module) -> dict[str, int]:
    """Counts; a parameter that will thaw counts as trainable."""
    found = record_of(model)
    thawing = found.thawing if found is not None else {}
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad or name in thawing)
    return {"total": total, "trainable": trained, "frozen": total - trained}


def cost(clock: Clock, device: torch.device, steps: int) -> dict[str, Any]:
    """What the run took; energy is not measured."""
    median, tokens_per_s = clock.cost()
    return {
        "seconds": clock.seconds,
        "train_seconds": float(sum(clock.steps)),
        "step_seconds_median": median,
        "tokens_per_s": tokens_per_s,
        "peak_bytes": peak_bytes(device),
        "energy_j": None,
        "steps": steps,
    }


def timing(
    clock: Clock, state: State, device: torch.device, *, mfu: float | None, ceiling: float | None
) -> dict[str, Any]:
    """timing_stats.json."""
    return {
        **clock.summary(),
        "peak_bytes": peak_bytes(device),
        "mfu": mfu,
        "ceiling_flops_per_s": ceiling,
        "best_validation_loss": (state.best or {}).get("loss"),
        "final_perplexity": (state.validation or {}).get("perplexity"),
    }


def record(
    run: Run,
    *,
    run_id: str,
    study: str | None,
    row: str | None,
    status: str,
    metrics: dict[str, Any],
    cost: dict[str, Any],
    curve: list[Any],
    error: str | None = None,
    params: dict[str, int] | None = None,
    frozen_digest: dict[str, str | None] | None = None,
    logit_std: float | None = None,
    data: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    examples: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """result.json: every field is there; what is not known is null. Only classifiers have `examples`."""
    made = {
        "schema": SCHEMA,
        "run_id": run_id,
        "study": study,
        "row": row,
        "status": status,
        "run": run.model_dump(mode="json"),
        "metrics": metrics,
        "params": params,
        "frozen_digest": frozen_digest or {"start": None, "end": None},
        "logit_std": logit_std,
        "data": data,
        "cost": cost,
        "environment": environment,
        "error": error,
        "curve": curve,
    }
    return made if examples is None else made | {"examples": examples}
