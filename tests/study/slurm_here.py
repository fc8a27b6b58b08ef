"""A Slurm of one node in a temporary folder: munged, slurmctld and slurmd, started for a test and stopped after it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")

CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_min_interval=100000
JobRequeue=1
KillWait=20
MinJobAge=600
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=60 State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""


def missing() -> str:
    """Why no Slurm can be started here; empty when one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} here (Debian: apt install slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd must run as root"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch reaches the Slurm that runs until the block ends."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    config = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    cpus = os.cpu_count() or 1
    config.write_text(
        CONFIG.format(host=host, controller=_port(), daemon=_port(), folder=folder, user="root", cpus=cpus)
    )
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": _path()}
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env=environment)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for argv in (munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            with (folder / f"{argv[0]}.out").open("wb") as output:
                started.append(subprocess.Popen(argv, env=environment, stdout=output, stderr=output, cwd=folder))
            time.sleep(1)
        _until_idle(environment, folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, check=False, capture_output=True, timeout=20)
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_idle(environment: dict[str, str], folder: Path) -> None:
    for _ in range(60):
        done = subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True, check=False)
        if "idle" in done.stdout:
            return
        time.sleep(0.5)
    logs = "".join(path.read_text()[-400:] for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"the Slurm of the test did not come up: {done.stdout}{done.stderr} {logs}")
