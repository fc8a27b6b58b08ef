"""Two processes train what one trains: gradients, losses, checkpoints on any number of them, one of them killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import lines

from oelm.train.checkpoint import load_weights


HERE = Path(__file__).parent


def ranks(count: int, folder: Path, style: str, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Run tests/train/two_ranks.py under torchrun, or plainly for one process."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", f"--master-port={_port()}"]
    script = [str(HERE / "two_ranks.py"), str(folder), style, str(steps), *more]
    return subprocess.run(
        [*(start if count > 1 else [sys.executable]), *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if line["kind"] == "train"]


def norms(folder: Path) -> list[float]:
    return [line["grad_norm"] for line in lines(folder) if line["kind"] == "train"]


def result(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = ranks(1, folder, "ddp", 12)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("style", ["ddp", "fsdp"])
def test_two_processes_equal_one(tmp_path: Path, alone: Path, style: str) -> None:
    """Frozen, thawing, accumulating, with parts of different numbers of targets."""
    done = ranks(2, tmp_path / "run", style, 12)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5)
    assert norms(tmp_path / "run") == pytest.approx(norms(alone), rel=1e-4)
    mine, theirs = load_weights(tmp_path / "run", "latest")[0], load_weights(alone, "latest")[0]
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    assert result(tmp_path / "run")["status"] == "done"
    if style == "fsdp":
        files = {p.name for p in (tmp_path / "run" / "checkpoints" / "step-12").iterdir()}
        assert sum(name.startswith("model.shard-") for name in files) == 2


@pytest.mark.slow
@pytest.mark.parametrize("style", ["ddp", "fsdp"])
def test_one_rank_killed_stops_cleanly_and_another_number_goes_on(tmp_path: Path, alone: Path, style: str) -> None:
    folder = tmp_path / "run"
    done = ranks(2, folder, style, 12, "8")
    assert done.returncode != 0
    assert json.loads((folder / (folder / "latest").read_text().strip() / "manifest.json").read_text())["step"] == 5
    if style == "fsdp":  # whose optimiser state is sharded again
        assert ranks(2, folder, style, 12, "11").returncode != 0
        assert (
            json.loads((folder / (folder / "latest").read_text().strip() / "manifest.json").read_text())["step"] == 10
        )
    done = ranks(1, folder, "ddp", 12)  # one process continues what two began
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-4)
    assert [line["step"] for line in lines(folder) if line["kind"] == "train"] == list(range(1, 13))


@pytest.mark.slow
def test_a_batch_that_two_cannot_share_is_said(tmp_path: Path) -> None:
    done = ranks(3, tmp_path / "run", "ddp", 2)
    assert done.returncode != 0
    assert "cannot be shared by 3 ranks" in done.stderr
