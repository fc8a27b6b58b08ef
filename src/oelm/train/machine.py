"""What this machine can do, one line a check: versions, devices, self-tests, disk, hub, cluster.

Owns the checks of `oelm doctor`. A check says what it saw and, when it is bad, what to do. Nothing is changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


TESTED = {  # lowest and highest release that the test suite has seen
    "torch": ("2.11", "2.13"),
    "transformers": ("5.17", "5.23"),
    "numpy": ("2.4", "2.5"),
    "pydantic": ("2.14", "2.14"),
    "typer": ("0.29", "0.29"),
    "safetensors": ("0.8", "0.8"),
    "tokenizers": ("0.23", "0.23"),
    "scipy": ("1.17", "1.17"),
    "statsmodels": ("0.15", "0.15"),
    "matplotlib": ("3.11", "3.11"),
    "datasets": ("5.2", "5.2"),
    "submitit": ("1.5", "1.5"),
}
OPTIONAL = {"transformers": "hf", "datasets": "data", "submitit": "slurm"}
HOSTILE = {"lightning": ("2.6.2", "2.6.3")}  # releases that were malware (GHSA-w37p-236h-pfx3)
ROOM = 5 * 2**30

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what was seen, what to do."""

    check: str
    state: State
    seen: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"check": self.check, "state": self.state, "seen": self.seen, "remedy": self.remedy}


def checks(folder: Path | None = None) -> Iterator[Finding]:
    """Every finding, as soon as it is known; a check that breaks is a finding itself."""
    folder = folder or Path.cwd()
    parts: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("devices", _devices),
        ("threads", _threads),
        ("orthogonal draw", _determinism),
        ("compile and thaw", _compile),
        ("disk", lambda: _disk(folder)),
        ("hub", _hub),
        ("slurm", _slurm),
    ]
    for name, part in parts:
        try:
            yield from part()
        except Exception as error:  # a doctor must finish its round
            yield Finding(name, "bad", f"the check itself broke: {type(error).__name__}: {error}", "report this line")


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info < (3, 14)
    remedy = "" if good else "use Python 3.11, 3.12 or 3.13"
    yield Finding("python", "ok" if good else "note", f"{version} on {platform.system()} {platform.machine()}", remedy)


def _numbers(version: str) -> tuple[int, ...]:
    found = []
    for part in version.split("+")[0].split(".")[:2]:
        found.append(int("".join(c for c in part if c.isdigit()) or 0))
    return tuple(found)


def _packages() -> Iterator[Finding]:
    for name, (low, high) in TESTED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in OPTIONAL:
                yield Finding(
                    name, "note", "not installed", f"needed only for some verbs: pip install 'oelm[{OPTIONAL[name]}]'"
                )
            else:
                yield Finding(name, "bad", "not installed", f"pip install {name}")
            continue
        inside = _numbers(low) <= _numbers(version) <= _numbers(high)
        remedy = "" if inside else f"untested here (tested: {low} to {high}); constraints.txt has a set that works"
        yield Finding(name, "ok" if inside else "note", version, remedy)
    for name, versions in HOSTILE.items():
        if importlib.util.find_spec(name) and (found := importlib.metadata.version(name)) in versions:
            yield Finding(
                name,
                "bad",
                f"{found} is a release that was malware",
                f"pip uninstall {name}; change every password it saw",
            )


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = "with CUDA" if torch.version.cuda else "without CUDA"
        yield Finding(
            "devices", "note", f"CPU only (torch is built {built})", "fine for the demo and tests; studies want a GPU"
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        half = torch.cuda.is_bf16_supported(including_emulation=False)
        seen = f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, bf16 {'yes' if half else 'no'}"
        remedy = "" if half else 'use precision = "fp16" or "fp32"'
        if free < total / 2:
            remedy = f"somebody uses it; choose another with --device, or wait. {remedy}".strip()
        yield Finding(f"cuda:{index}", "note" if remedy else "ok", seen, remedy)
    fused = importlib.util.find_spec("triton") is not None
    yield Finding(
        "triton",
        "ok" if fused else "note",
        "present" if fused else "absent",
        "" if fused else "without it the plain step is used",
    )


def _threads() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0))
    used = torch.get_num_threads()
    remedy = "" if used <= cores else f"OMP_NUM_THREADS={cores} would fit"
    yield Finding("threads", "note" if remedy else "ok", f"{used} for {cores} cores", remedy)


def _determinism() -> Iterator[Finding]:
    """The frozen matrices must come out the same whatever the thread count."""
    import torch

    from oelm.method.matrices import draw

    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, before):
            torch.set_num_threads(threads)
            found.append(draw("orthogonal", 2, 64, 256, seed=0, stack="decoder", layer=0, role="q").tobytes())
    finally:
        torch.set_num_threads(before)
    same = len(set(found)) == 1
    remedy = "" if same else "use full checkpoints (the default) and report this line"
    yield Finding(
        "orthogonal draw",
        "ok" if same else "bad",
        f"bit-equal for 1, 2 and {before} threads" if same else "differs between thread counts",
        remedy,
    )


_THAW = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
model[0].requires_grad_(False)
fast = torch.compile(model)
x = torch.randn(4, 8)
for _ in range(3):
    fast(x).sum().backward()
    model.zero_grad()
model[0].requires_grad_(True)
torch._dynamo.reset()
fast(x).sum().backward()
assert model[0].weight.grad is not None, "no gradient after the thaw"
print("fine")
"""


def _compile() -> Iterator[Finding]:
    """A thawed layer must get gradients under torch.compile; in a process of its own, as compilers can hang."""
    try:
        done = subprocess.run([sys.executable, "-c", _THAW], capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(
            "compile and thaw",
            "note",
            "took over three minutes",
            "training falls back to the eager model with --device cpu",
        )
        return
    if done.returncode == 0 and "fine" in done.stdout:
        yield Finding("compile and thaw", "ok", "a thawed layer gets its gradient")
    else:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:160]
        yield Finding("compile and thaw", "note", last, "torch.compile needs a C++ compiler; the eager step needs none")


def _disk(folder: Path) -> Iterator[Finding]:
    for name, place in (("run folder", folder), ("cache", Path(os.environ.get("OELM_HOME", Path.home() / ".cache")))):
        at = next(p for p in (place, *place.parents) if p.exists())
        free = shutil.disk_usage(at).free
        writable = os.access(at, os.W_OK)
        remedy = "" if writable else "choose a folder you may write to (--out, OELM_HOME)"
        if writable and free < ROOM:
            remedy = "free some space: a study keeps checkpoints"
        state: State = "ok" if not remedy else ("note" if writable else "bad")
        yield Finding(f"disk: {name}", state, f"{free / 2**30:.1f} GiB free", remedy)


def _hub() -> Iterator[Finding]:
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        yield Finding("hub", "note", "switched off by HF_HUB_OFFLINE", "local folders and the cache are used")
        return
    try:
        socket.create_connection(("huggingface.co", 443), timeout=3).close()
    except OSError:
        yield Finding(
            "hub", "note", "not reachable", "the demo needs none; other data: a local folder (oelm data list)"
        )
    else:
        yield Finding("hub", "ok", "reachable")


def _slurm() -> Iterator[Finding]:
    found = [name for name in ("sbatch", "squeue", "scontrol") if shutil.which(name)]
    if len(found) == 3:
        yield Finding("slurm", "ok", "sbatch, squeue and scontrol are here")
    else:
        yield Finding(
            "slurm",
            "note",
            "no Slurm commands" if not found else f"only {', '.join(found)}",
            "needed only for oelm run --slurm",
        )
