"""What a run says while it trains: one live line on a terminal, a plain line now and then in a file, sinks for trackers.

Telling never stops training: a closed pipe, a full disk under the log or a broken tracker is passed over.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from oelm.errors import ConfigError, MachineError, nearest


LINE_SECONDS = 10.0
MODES = ("auto", "line", "live", "none")


class Sink(Protocol):
    """A tracker: numbers by step. TensorBoard, wandb and trackio fit behind it."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """wandb and trackio have one interface: init, log, finish."""

    def __init__(self, module: str, name: str, config: Mapping[str, Any]) -> None:
        import importlib

        self._module = importlib.import_module(module)
        self._module.init(project="oelm", name=name, config=dict(config))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": lambda folder, name, config: _Tracker("wandb", name, config),
    "trackio": lambda folder, name, config: _Tracker("trackio", name, config),
}


def open_sinks(folder: Path, name: str, config: Mapping[str, Any]) -> list[Sink]:
    """The trackers that OELM_TRACK names (comma-separated); a missing package is said in one line."""
    sinks = []
    for wanted in filter(None, (w.strip() for w in os.environ.get("OELM_TRACK", "").split(","))):
        if wanted not in SINKS:
            raise ConfigError(f"OELM_TRACK={wanted}: unknown tracker; {nearest(wanted, SINKS)}")
        try:
            sinks.append(SINKS[wanted](folder, name, config))
        except ImportError:
            raise MachineError(
                f"OELM_TRACK={wanted}: the package {wanted} is not installed; pip install {wanted}"
            ) from None
    return sinks


def check_mode(mode: str) -> None:
    """Refuse a way of showing progress that there is not."""
    if mode not in MODES:
        raise ConfigError(f"progress {mode!r}: unknown; {nearest(mode, MODES)}")


class Progress:
    """Shows a run. `log` is training.log, which also has what a terminal shows only for a moment."""

    def __init__(self, mode: str, folder: Path, name: str, total: int, *, quiet: bool, sinks: list[Sink]) -> None:
        check_mode(mode)
        if mode == "auto":
            mode = "live" if sys.stderr.isatty() else "line"
        self.mode = "none" if quiet else mode
        self.folder = folder
        self.name = name
        self.total = total
        self.sinks = sinks
        self._quiet = quiet
        self._last = 0.0
        self._live: Any = None

    def __enter__(self) -> Progress:
        if self.mode == "live":
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        for sink in self.sinks:
            with contextlib.suppress(Exception):
                sink.close()

    def say(self, text: str) -> None:
        """One line, kept in training.log and shown."""
        self._write(text)
        if self.mode == "none":
            return
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        with contextlib.suppress(OSError), open(self.folder / "training.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    def show(self, now: Mapping[str, Any], *, force: bool = False) -> None:
        """The state of the run: live at every look, as a line every few seconds."""
        text = line(self.name, self.total, now)
        if self._live is not None:
            from rich.text import Text

            with contextlib.suppress(OSError, ValueError):
                self._live.update(Text(text, overflow="ellipsis", no_wrap=True))
        seconds = time.monotonic()
        if not force and seconds - self._last < LINE_SECONDS:
            return
        self._last = seconds
        self._write(text)
        if self.mode == "line":
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)

    def track(self, numbers: Mapping[str, Any], step: int) -> None:
        """Numbers for the trackers."""
        if not self.sinks:
            return
        plain = {k: float(v) for k, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for sink in list(self.sinks):
            try:
                sink.log(plain, step)
            except Exception as error:
                self.sinks.remove(sink)
                self.say(f"warning: tracker {type(sink).__name__.strip('_')} failed ({error}); it gets no more numbers")


def line(name: str, total: int, now: Mapping[str, Any]) -> str:
    """step, losses, rate, speed, memory, elapsed < ETA, what is frozen: what is not known is left out."""
    fields = [f"{name} {now['step']:,}/{total:,}"]
    if now.get("loss") is not None:
        fields.append(f"loss {now['loss']:.4f}")
    if now.get("validation") is not None:
        fields.append(f"val {now['validation']:.4f}")
    if now.get("lr") is not None:
        fields.append(f"lr {now['lr']:.2e}")
    if now.get("tokens_per_s") is not None:
        fields.append(f"{now['tokens_per_s']:,.0f} tok/s")
    if now.get("mfu") is not None:
        fields.append(f"MFU {now['mfu']:.{0 if now['mfu'] >= 0.1 else 1}%}")
    if now.get("memory") is not None:
        fields.append(f"{now['memory'] / 2**30:.1f} GiB")
    fields.append(f"{duration(now['seconds'])} < {duration(now.get('eta'))}")
    if now.get("frozen"):
        fields.append(f"frozen {now['frozen']}")
    return " · ".join(fields)


def duration(seconds: float | None) -> str:
    """h:mm:ss, or ? when unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
