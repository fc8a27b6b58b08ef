"""Memory: how much is used, and what to say in one line when there is too little."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import torch

from oelm.train.run import Run


def peak_bytes(device: torch.device) -> int:
    """The most used so far: of the device, or of this process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this exception means that memory ran out; on the CPU torch has no class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def memory_message(error: BaseException, run: Run, device: torch.device, folder: Path) -> str:
    """The numbers and three remedies."""
    budget = run.budget
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {peak_bytes(device) / 2**30:.1f} GiB used at most"
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        room = f"{total / 2**30:.1f} GiB in the machine, {peak_bytes(device) / 2**30:.1f} GiB used at most"
    if asked := re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", str(error), re.IGNORECASE):
        number, unit = float(asked[1]), asked[2].lower()
        room += f", {number / 2**30 if unit == 'bytes' else number:.1f} {'GiB' if unit == 'bytes' else asked[2]} more asked for"
    parts = next((n for n in range(budget.accumulate + 1, budget.batch + 1) if budget.batch % n == 0), None)
    remedies = [
        f"budget.accumulate={parts} (same result, less memory)"
        if parts
        else "a larger budget.batch split by accumulate",
        f"data.context={max(2, run.data.context // 2)} or budget.batch={max(1, budget.batch // 2)}",
        "a smaller model, or more devices (--nproc with --parallel fsdp)",
    ]
    rows = budget.batch // budget.accumulate
    return (
        f"{folder}: out of memory on {device} at {rows} x {run.data.context} tokens ({room}); try {'; '.join(remedies)}"
    )
