"""Settings of the whole suite: the processes of pytest-xdist share the cores, so each uses one thread."""

from __future__ import annotations

import os


if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
