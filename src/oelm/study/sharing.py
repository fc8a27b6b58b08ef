"""Several workers on one GPU at the same moment: NVIDIA's MPS, started for the length of a study where it is installed.

Without it the processes of one GPU take turns. Each run stays a process of its own, so that its result is its solo
result. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path


CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
STARTS_WITHIN = 10.0  # seconds


@contextlib.contextmanager
def shared(devices: tuple[str, ...], per_device: int, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """What workers find in their environment beside their device; empty where nothing is shared or MPS cannot serve."""
    if per_device == 1 or set(devices) == {"cpu"} or PIPES in os.environ:  # one that is running already is used
        yield {}
        return
    program = shutil.which(CONTROL)
    if program is None:
        say(f"note: {CONTROL} is not installed: the {per_device} runs of a GPU take turns instead of sharing it")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="oelm-mps-") as folder:
        environment = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        daemon = _start(program, os.environ | environment)
        try:
            if _ready(daemon, Path(folder)):
                yield environment
            else:
                say(f"note: {CONTROL} did not start: the {per_device} runs of a GPU take turns instead of sharing it")
                yield {}
        finally:
            _stop(daemon, program, os.environ | environment)


def _start(program: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The daemon in the foreground, on a leash: it must not outlive a runner that is killed."""
    environment = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    leashed = [sys.executable, "-m", "oelm.study.leash", str(os.getpid()), program, "-f"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(leashed, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def _ready(daemon: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether the daemon listens: its pipe is there and it lives."""
    until = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < until and daemon.poll() is None:
        if (folder / "control").exists():
            return True
        time.sleep(0.05)
    return False


def _stop(daemon: subprocess.Popen[bytes], program: str, environment: dict[str, str]) -> None:
    if daemon.poll() is None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([program], input=b"quit\n", env=environment, capture_output=True, timeout=10, check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=5)
    daemon.kill()
    daemon.wait()
