"""Several runs on one GPU: MPS serves the workers and ends with the study. A script stands in for NVIDIA's daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_studies import run_study, study

from oelm.study.sharing import CONTROL, PIPES


DAEMON = """#!/bin/sh
echo "$1 devices=${CUDA_VISIBLE_DEVICES-unset}" >> "$MPS_SAYS"
if [ "$1" = -f ]; then
  [ -z "$MPS_BROKEN" ] || exit 1
  echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/control"
  exec sleep 100
fi
read word && echo "$word" >> "$MPS_SAYS" && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/control")"
"""


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the daemon on PATH; the file it writes to."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("MPS_SAYS", str(tmp_path / "says"))
    monkeypatch.delenv(PIPES, raising=False)
    return tmp_path / "says"


def pipes(runs: Path) -> set[str]:
    """What the workers found in their environment."""
    return set((runs / "small" / "pipes.log").read_text().splitlines())


def test_the_daemon_serves_every_worker_and_ends_with_the_study(tmp_path: Path, fake: str, says: Path) -> None:
    outcome, said = run_study(study(), tmp_path, fake, devices=("0",), per_device=2)
    assert outcome.complete
    assert not any("take turns" in line for line in said)
    assert says.read_text().splitlines() == ["-f devices=unset", " devices=0", "quit"]
    (folder,) = pipes(tmp_path)
    assert "oelm-mps-" in folder
    assert not Path(folder).exists()


@pytest.mark.parametrize("options", [{"devices": ("0",)}, {"devices": ("cpu",), "per_device": 2}])
def test_nothing_is_started_where_nothing_is_shared(
    tmp_path: Path, fake: str, says: Path, options: dict[str, object]
) -> None:
    outcome, _ = run_study(study(), tmp_path, fake, **options)
    assert outcome.complete
    assert not says.exists()
    assert pipes(tmp_path) == {""}


def test_a_daemon_that_runs_already_is_used(
    tmp_path: Path, fake: str, says: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPES, "/theirs")
    run_study(study(), tmp_path, fake, devices=("0",), per_device=2)
    assert not says.exists()
    assert pipes(tmp_path) == {"/theirs"}


@pytest.mark.parametrize("fault", ["broken", "absent"])
def test_without_the_daemon_runs_take_turns_and_that_is_said(
    tmp_path: Path, fake: str, says: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "broken":
        monkeypatch.setenv("MPS_BROKEN", "1")
    else:
        (tmp_path / "bin" / CONTROL).unlink()
    outcome, said = run_study(study(), tmp_path, fake, devices=("0",), per_device=2)
    assert outcome.complete
    assert sum("take turns instead of sharing it" in line for line in said) == 1
    assert pipes(tmp_path) == {""}
