"""Which devices there are, without torch: what nvidia-smi lists, within CUDA_VISIBLE_DEVICES. Refuses absent ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from oelm.errors import ConfigError, MachineError


def gpus() -> list[str]:
    """The GPUs a child process can be given, as values of CUDA_VISIBLE_DEVICES."""
    listed = _listed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    allowed = [part.strip() for part in visible.split(",") if part.strip()]
    return [part for part in allowed if not part.isdigit() or part in listed]


def _listed() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        found = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(i) for i, line in enumerate(line for line in found.stdout.splitlines() if line.startswith("GPU "))]


def parse_devices(text: str | None) -> list[str]:
    """`0,1`, `all`, `cpu`; without a choice every GPU, or the processor when there is none."""
    there = gpus()
    if text is None or text.strip() == "auto":
        return there or ["cpu"]
    if text.strip() == "all":
        if not there:
            raise MachineError("--devices all: no GPU on this machine (nvidia-smi lists none); use --devices cpu")
        return there
    chosen = [part.strip().removeprefix("cuda:") for part in text.split(",") if part.strip()]
    if not chosen:
        raise ConfigError("--devices: is empty; write cpu, all, or GPU numbers as in --devices 0,1")
    for device in chosen:
        if chosen.count(device) > 1:
            raise ConfigError(f"--devices: {device} is given twice; for several runs on it use --per-device")
        if device == "cpu":
            continue
        if not device.isdigit() and not device.startswith(("GPU-", "MIG-")):
            raise ConfigError(f"--devices: {device!r} is neither cpu, all nor a GPU number")
        if device not in there:
            shown = ", ".join(there) if there else "none"
            raise MachineError(f"--devices: GPU {device} is not there (this machine has: {shown}); see nvidia-smi -L")
    return chosen


def imagined(text: str) -> list[str]:
    """`gpu` or `gpu:N`: so many GPUs that need not be here, to plan for; empty for anything else."""
    found = re.fullmatch(r"gpu(?::([1-9][0-9]{0,3}))?", text.strip())
    return [str(number) for number in range(int(found[1] or 1))] if found else []


def environment(device: str, per_device: int) -> dict[str, str]:
    """What a worker of a device gets, set before it starts: which device it sees and how many threads it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {"CUDA_VISIBLE_DEVICES": "" if device == "cpu" else device, "PYTHONUNBUFFERED": "1"}
    values["OELM_BESIDE"] = str(per_device)
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = str(max(1, cores // per_device))
    return values
