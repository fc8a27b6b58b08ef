"""Studies on Slurm: the script that is printed, and a real Slurm of one node with a job that is preempted."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from pathlib import Path

import pytest
import slurm_here
from small_studies import TUNED, study

from oelm.errors import MachineError
from oelm.study import slurm
from oelm.study.folder import look, run_folders
from oelm.study.rows import Slurm, expand
from oelm.study.runner import Options, Runner, task_of


def test_the_script_asks_for_what_the_study_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Slurm(partition="gpu", gres="gpu:1", time=90, account="lab", memory_gb=16, at_once=4)
    slurm.submit(study(**TUNED), tmp_path, Options(), settings, dry_run=True)
    script = capsys.readouterr().out
    for line in ("array=0-11%4", "partition=gpu", "gres=gpu:1", "time=90", "account=lab", "mem=16GB", "requeue\n"):
        assert f"#SBATCH --{line}" in script
    assert "signal=USR2@120" in script
    assert not (tmp_path / "small").exists()


def test_finished_runs_are_not_submitted_again(tmp_path: Path, fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = study(axes={"seed": [1, 2]})
    Runner(one, tmp_path, Options(trainer=fake, rows=("baseline",)), say=lambda line: None).run()
    slurm.submit(one, tmp_path, Options(), Slurm(), dry_run=True)
    assert "--array=0-1%2" in capsys.readouterr().out


def test_without_sbatch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="sbatch is not on this machine"):
        slurm.submit(study(), tmp_path, Options(), Slurm())


def test_several_nodes_run_one_torchrun_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    planned = expand(study())[0]
    job = slurm.Job(task_of(planned, "small", tmp_path, "auto", Options(nproc=4)), nproc=4, nodes=2)
    command = job.command(tmp_path / "task.json")
    for word in ("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=4"):
        assert word in command


# ---- a real one

STEPS = 250


def weights(folder: Path) -> str:
    newest = folder / "checkpoints" / f"step-{STEPS}"
    files = [path for path in sorted(newest.rglob("*")) if path.name == "model.safetensors"]
    assert files, sorted(newest.rglob("*"))
    return hashlib.sha256(files[0].read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(420)
@pytest.mark.skipif(bool(slurm_here.missing()), reason=f"needs a Slurm to start: {slurm_here.missing()}")
def test_a_preempted_job_is_requeued_and_ends_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = study(
        arms=["oelm-freeze"],
        base={
            "model": {"preset": "gpt-tiny", "dropout": 0.1},
            "data": {"name": "demo", "tokenizer": "demo-bpe", "context": 64},
            "variant": "baseline",
            "precision": "fp32",
            "budget": {"steps": STEPS, "batch": 32},
            "eval_every": 0,
        },
    )
    assert Runner(one, tmp_path / "plain", Options(), say=print).run().complete
    with slurm_here.slurm(tmp_path / "slurm") as environment:
        for key in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(key, environment[key])
        runs = tmp_path / "runs"
        ids = slurm.submit(one, runs, Options(), Slurm(partition="low", time=10, cpus=1), say=print)
        folder = runs / "small" / expand(one)[0].id
        assert slurm.submit(one, runs, Options(), Slurm(partition="low", time=10, cpus=1), say=print) == []  # queued
        assert until_step(folder, 3), logs(runs)
        wrap = ["sbatch", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
        subprocess.run(wrap, check=True, env=environment, capture_output=True)
        end = time.monotonic() + 240
        while look(folder).state != "done" and time.monotonic() < end:
            time.sleep(1)
        shown = subprocess.run(["scontrol", "show", "job", ids[0]], env=environment, capture_output=True, text=True)
    assert look(folder).state == "done", logs(runs)
    assert "Restarts=1" in shown.stdout, shown.stdout
    assert "resumed at step" in (folder / "training.log").read_text()
    plain = run_folders(tmp_path / "plain" / "small")[0]
    assert weights(folder) == weights(plain)
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "train" in line
    ]
    assert steps == sorted(set(steps))


def until_step(folder: Path, step: int) -> bool:
    """Wait until a run has gone that far."""
    for _ in range(1200):
        try:
            if json.loads((folder / "heartbeat").read_bytes()).get("step", 0) >= step:
                return True
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    return False


def logs(runs: Path) -> str:
    return "\n".join(path.read_text()[-1500:] for path in sorted((runs / "small" / slurm.FOLDER).glob("*.err")))
