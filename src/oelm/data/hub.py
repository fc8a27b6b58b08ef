"""The Hugging Face hub and its caches, asked so that a machine without network is not kept waiting.

Owns whether the hub is wanted and answers, and loading through `datasets`. Which data set, and what its rows mean, is
sources.py's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.errors import DataError, MachineError


if TYPE_CHECKING:
    from oelm.data.sources import Hub


PATIENCE = 4.0  # seconds to find out that there is no network


def in_cache(name: str) -> bool:
    """Whether the Hugging Face caches have a folder for this data set, without loading anything.

    A path stands for a data set of the hub, as it does for `datasets`.
    """
    if Path(name).is_dir():
        return True
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    hubs = Path(named or home / "hub").expanduser()
    made = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    owner, _, short = name.rpartition("/")
    plain = f"{owner}___{short}".casefold().replace("_", "").replace("-", "")
    folders = (path.name.casefold().replace("_", "").replace("-", "") for path in made.glob("*___*"))
    return (hubs / f"datasets--{owner}--{short}").is_dir() or any(other == plain for other in folders)


def offline() -> bool:
    """Whether the user has switched the hub off."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def answers(patience: float = PATIENCE) -> bool:
    """Whether the hub can be reached, found out within `patience` seconds even where DNS hangs."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=patience):
                answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError):
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    return answered.is_set()


def load(hub: Hub, *, fetch: bool) -> dict[str, Any]:
    """Its splits out of the cache, or off the hub with `fetch`; nothing when the cache has not all of them."""
    try:
        import datasets
    except ImportError:
        if not fetch:
            return {}
        raise MachineError(f"{hub.id} is on the hub: install oelm[data] to read it, or name a --folder") from None
    read: Any = datasets.load_dataset  # type: ignore[attr-defined]
    loaded = {}
    with contextlib.nullcontext() if fetch else _without_network():
        for split, theirs in hub.splits.items():
            try:
                streaming = hub.stream and fetch
                loaded[split] = read(hub.id, hub.config, split=theirs, revision=hub.revision, streaming=streaming)
            except Exception as error:  # the hub's libraries raise what their transport raises
                if not fetch:
                    return {}
                raise DataError(f"{hub.id} ({theirs}): cannot be fetched ({brief(error)}); name a --folder") from None
    return loaded


@contextlib.contextmanager
def _without_network() -> Iterator[None]:
    """Look into the cache only. `local_files_only` is not enough: datasets 5.2 asks the hub six times all the same."""
    import datasets
    from huggingface_hub import constants

    before = (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = True, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def brief(error: Exception) -> str:
    """The first line of what a library said."""
    text = str(error).strip()
    return text.splitlines()[0][:160] if text else type(error).__name__
