"""A study on Slurm, through submitit: one job array, a task a run; preempted or out of time, a run saves and is requeued.

A job trains in a child process, so that the signal of Slurm reaches the trainer and the job can wait for its save.
Refuses without submitit or sbatch; `--dry-run` needs neither a cluster nor sbatch. submitit is imported when used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oelm.errors import MachineError, StudyIncomplete
from oelm.study import claim
from oelm.study.folder import look, records
from oelm.study.rates import chosen_rates, rates_that_failed
from oelm.study.rows import Planned, Slurm, Study, expand
from oelm.study.runner import Options, task_of
from oelm.study.worker import TRAINER


FOLDER = ".slurm"
SAVE_SECONDS = 120  # before the end of its time a job is told to save
REQUEUES = 10_000  # a long run goes through as many jobs as it needs
POLL = 10.0


class Job:
    """What a task of the array does; submitit calls it, and `checkpoint` when Slurm wants the node back."""

    def __init__(self, task: Mapping[str, Any], trainer: str = TRAINER, nproc: int = 1, nodes: int = 1) -> None:
        self.task = dict(task)
        self.trainer = trainer
        self.nproc = nproc
        self.nodes = nodes
        self._child: subprocess.Popen[bytes] | None = None
        self._held: claim.Held | None = None

    def __call__(self) -> dict[str, Any]:
        """Train the run to its end; the worker's answer."""
        folder = Path(self.task["folder"])
        first = int(os.environ.get("SLURM_PROCID", "0")) == 0
        if first and not self._claimed(folder):
            return {"id": self.task["id"], "code": 0, "message": "done by another job"}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".task.json"
        if first:
            path.with_suffix(".answer").unlink(missing_ok=True)
        path.write_text(json.dumps(self.task))
        self._child = subprocess.Popen(self.command(path), env=os.environ | {"PYTHONUNBUFFERED": "1"})
        status = self._wait()
        if status == 75:  # saved: the signal that this process gets as well requeues the job
            time.sleep(SAVE_SECONDS)
        self._release()
        with contextlib.suppress(OSError, ValueError):
            answer: dict[str, Any] = json.loads(path.with_suffix(".answer").read_bytes())
            return answer
        return {"id": self.task["id"], "code": status or 1, "message": f"the trainer ended with status {status}"}

    def command(self, path: Path) -> list[str]:
        """One trainer, or torchrun on every node of the job."""
        single = ["-m", "oelm.study.worker", "--single", str(path), "--trainer", self.trainer]
        if self.nproc == 1 and self.nodes == 1:
            return [sys.executable, *single, "--parent", str(os.getpid())]
        argv = [sys.executable, "-m", "oelm.study.leash", str(os.getpid()), sys.executable]
        argv += ["-m", "torch.distributed.run", f"--nproc-per-node={self.nproc}"]
        if self.nodes == 1:
            argv += ["--standalone"]
        else:
            job = int(os.environ.get("SLURM_JOB_ID", "0"))
            host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or _first_host()
            argv += [f"--nnodes={self.nodes}", f"--node-rank={os.environ.get('SLURM_NODEID', '0')}"]
            argv += [f"--master-addr={host}", f"--master-port={20_000 + job % 20_000}"]
        return [*argv, *single, "--parent", "-1"]

    def checkpoint(self) -> Any:
        """Called in the job when the node is wanted back: let the trainer save, then say what to run after requeueing."""
        import submitit

        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=SAVE_SECONDS)
        self._release()
        return submitit.helpers.DelayedSubmission(Job(self.task, self.trainer, self.nproc, self.nodes))

    def _claimed(self, folder: Path) -> bool:
        """Hold the row, waiting out the claim of a dead job; False when it is finished or is being run elsewhere."""
        end = time.monotonic() + claim.GONE + 30
        while True:
            self._held = claim.take(folder.parent, folder.name)
            if look(folder).state in ("done", "diverged"):
                self._release()
                return False
            if self._held is not None:
                return True
            if time.monotonic() > end:
                return False
            time.sleep(5)

    def _wait(self) -> int:
        assert self._child is not None
        while True:
            try:
                return self._child.wait(timeout=claim.BEAT)
            except subprocess.TimeoutExpired:
                if self._held is not None and not self._held.beat():
                    self._child.kill()

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_child": None, "_held": None}


def _first_host() -> str:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split("\n")[0] or "127.0.0.1"


# ---- submitting


def parameters(study: Study, settings: Slurm, nproc: int) -> dict[str, Any]:
    """What sbatch is asked for, under submitit's names."""
    wanted: dict[str, Any] = {
        "job_name": f"oelm-{study.name}"[:60],
        "time": settings.time,
        "nodes": settings.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": settings.cpus,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "gres": settings.gres or (f"gpu:{nproc}" if nproc > 1 else None),
        "mem": f"{settings.memory_gb}GB" if settings.memory_gb else None,
        "array_parallelism": settings.at_once,
        "signal_delay_s": min(SAVE_SECONDS, settings.time * 60 // 4),
    }
    return {key: value for key, value in wanted.items() if value is not None}


def script(study: Study, folder: Path, settings: Slurm, jobs: int, nproc: int = 1) -> str:
    """The batch script that submitit would hand to sbatch."""
    slurm = _submitit().slurm.slurm
    command = f"{sys.executable} -u -m submitit.core._submit {folder / FOLDER}"
    text: str = slurm._make_sbatch_string(
        command=command,
        folder=folder / FOLDER,
        map_count=max(1, jobs),
        additional_parameters={"requeue": True},
        **parameters(study, settings, nproc),
    )
    return text


def _submitit() -> Any:
    try:
        import submitit
        import submitit.slurm.slurm
    except ImportError:
        raise MachineError("--slurm: submitit is not installed; pip install 'oelm[slurm]'") from None
    return submitit


def submit(
    study: Study,
    runs: Path,
    options: Options,
    settings: Slurm,
    *,
    dry_run: bool = False,
    wait: bool = False,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Submit every run that is not finished and not in the queue; the job ids."""
    folder = runs / study.name
    left = _left(study, folder, options)
    if dry_run:
        print(script(study, folder, settings, len(left), options.nproc))
        return []
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise MachineError(
            "--slurm: sbatch is not on this machine; run this where jobs are submitted, or add --dry-run"
        )
    submitted: list[str] = []
    while left:
        ids = _submit(study, folder, options, settings, left)
        submitted += ids
        say(f"submitted {len(left)} runs of {study.name} to Slurm ({ids[0] if len(ids) == 1 else ids[0] + ' and on'})")
        if not wait:
            if study.tuning:
                say("the comparison follows the tuning: the same command submits it, or --wait does")
            return submitted
        _wait_for(folder, left, ids)
        failed = [one.row for one in left if look(folder / one.id).state not in ("done", "diverged")]
        left = [one for one in _left(study, folder, options) if one.row not in failed]
        if failed and not left:
            shown = ", ".join(failed[:3])
            raise StudyIncomplete(
                f"study {study.name}: {len(failed)} runs failed ({shown}); logs are in {folder / FOLDER}"
            )
    if not submitted:
        say(f"study {study.name}: nothing to submit; every run is finished or in the queue")
    for cell in rates_that_failed(study, records(folder), options.overrides):
        say(f"{cell}: diverged at every rate that was tuned; add smaller tuning.rates")
    return submitted


def _left(study: Study, folder: Path, options: Options) -> list[Planned]:
    rates = chosen_rates(study, records(folder), options.overrides)
    planned = expand(study, rates, options.overrides, options.rows)
    queued = _queued(folder)
    states = {one.id: look(folder / one.id).state for one in planned}
    return [one for one in planned if states[one.id] not in ("done", "diverged", "running") and one.id not in queued]


def _submit(study: Study, folder: Path, options: Options, settings: Slurm, left: list[Planned]) -> list[str]:
    submitit = _submitit()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.SlurmExecutor(folder=folder / FOLDER, max_num_timeout=REQUEUES)
        executor.update_parameters(
            **parameters(study, settings, options.nproc), additional_parameters={"requeue": True}
        )
        jobs = [
            Job(task_of(one, study.name, folder, "auto", options), options.trainer, options.nproc, settings.nodes)
            for one in left
        ]
        with executor.batch():
            handles = [executor.submit(job) for job in jobs]
    except (RuntimeError, OSError, ValueError, subprocess.CalledProcessError) as error:
        said = " ".join(str(error).split())[-200:] or type(error).__name__
        raise MachineError(f"Slurm did not take the jobs ({said}); check partition, gres and account") from None
    ids = [str(handle.job_id) for handle in handles]
    _remember(folder, dict(zip((one.id for one in left), ids, strict=True)))
    return ids


def _remember(folder: Path, jobs: Mapping[str, str]) -> None:
    path = folder / FOLDER / "jobs.json"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(_jobs(folder) | dict(jobs)))
    os.replace(draft, path)


def _jobs(folder: Path) -> dict[str, str]:
    try:
        data = json.loads((folder / FOLDER / "jobs.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in data.items()} if isinstance(data, dict) else {}


def _queued(folder: Path) -> set[str]:
    """Runs whose jobs Slurm still has."""
    jobs = _jobs(folder)
    there = in_queue() if jobs else set()
    return {run for run, job in jobs.items() if job in there}


def in_queue() -> set[str]:
    """The ids of all jobs and array tasks that Slurm has, pending or running."""
    program = shutil.which("squeue")
    if program is None:
        return set()
    done = subprocess.run([program, "-h", "-r", "-o", "%i"], capture_output=True, text=True, check=False, timeout=60)
    return set(done.stdout.split())


def _wait_for(folder: Path, left: list[Planned], ids: list[str]) -> None:
    """Until no job of ours is in the queue: a requeued one is."""
    while True:
        states = [look(folder / one.id).state for one in left]
        if all(state in ("done", "diverged") for state in states) or not in_queue() & set(ids):
            return
        time.sleep(POLL)
