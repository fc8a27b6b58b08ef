"""The trainer that only counts, for every test of studies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a trainer that only counts, importable by workers."""
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "fake_trainer:train"
