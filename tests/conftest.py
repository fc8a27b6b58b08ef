"""Settings of the whole suite: the processes of pytest-xdist share the cores, so each uses one thread."""

from __future__ import annotations

import os
import signal
import threading


if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts its background jobs with Ctrl-C ignored, and what they start inherits that: tests that send it mean it.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
