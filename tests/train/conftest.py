"""What every test of training needs: a small held-out split, one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oelm.data.recall.HELD_OUT_EXAMPLES", 32)
    torch.set_num_threads(1)  # a process that forks must have no threads of its own
