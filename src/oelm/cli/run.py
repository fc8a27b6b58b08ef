"""`oelm run STUDY`: run what is not done yet, on this machine's devices or on Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer


if TYPE_CHECKING:
    from oelm.study.child import Keep


RunsFolder = Annotated[Path, typer.Option("--runs", help="The folder of all run folders.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run", no_args_is_help=True)(run)


def run(
    study: str = typer.Argument(help="A study's TOML file or name."),
    rows: str = typer.Option(
        "", "--rows", help="Only these rows, arms or cells, with commas between; * and ? fit any text."
    ),
    devices: str = typer.Option(
        "auto", "--devices", help="cpu, all, or GPU numbers as in 0,1; auto: every GPU there is."
    ),
    per_device: int = typer.Option(1, "--per-device", min=1, max=64, help="Runs side by side on each device."),
    nproc: int = typer.Option(1, "--nproc", min=1, max=1024, help="Processes (devices) for one run, by torchrun."),
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of every run: key=value. May be repeated.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    data: Annotated[Path | None, typer.Option("--data", help="A folder that holds data sets.")] = None,
    keep: str = typer.Option(
        "all", "--keep", help="Checkpoints of finished runs: all, best or none (what goes is listed)."
    ),
    minutes: float = typer.Option(
        None, "--minutes", min=0.1, help="Stop after so long: what runs is saved, what could not finish is not begun."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the plan (with --slurm: the script) and stop."),
    slurm: bool = typer.Option(False, "--slurm", help="Submit to Slurm as a job array instead of running here."),
    partition: str = typer.Option("", "--partition", help="Slurm: the partition."),
    gres: str = typer.Option("", "--gres", help="Slurm: as in gpu:1."),
    time: int = typer.Option(0, "--time", min=0, help="Slurm: minutes of one job; a longer run continues in the next."),
    nodes: int = typer.Option(0, "--nodes", min=0, help="Slurm: nodes of one run."),
    wait: bool = typer.Option(
        False, "--wait", help="Slurm: wait for the jobs, and submit the comparison after tuning."
    ),
) -> None:
    """Run a study: the plan first, then every run that is not finished. The same command continues.

    [bold]Examples[/]: oelm run demo --devices cpu · oelm run original --rows GPT-06,GPT-07 --devices 2,3 ·
    oelm run fair-lm --rows 'baseline-steps20000*' --per-device 2 --keep best --minutes 55
    """
    from oelm.cli import plan as plan_verb
    from oelm.cli.output import note
    from oelm.errors import ConfigError, StudyIncomplete, nearest
    from oelm.study.cost import KEPT
    from oelm.study.devices import parse_devices
    from oelm.study.plan import make_plan, take_over
    from oelm.study.rows import load_study, parse_overrides
    from oelm.study.runner import Options, Runner

    if keep not in KEPT:
        raise ConfigError(f"--keep: {keep!r} is not one of {', '.join(KEPT)}; {nearest(keep, KEPT)}")
    if slurm and minutes:
        raise ConfigError("--minutes is for runs on this machine; with --slurm give --time, the minutes of one job")
    loaded = load_study(study)
    chosen = ["slurm"] if slurm else parse_devices(devices)
    if nproc > 1:
        chosen = _groups(chosen, nproc, per_device) if not slurm else chosen
    options = Options(
        devices=tuple(chosen),
        per_device=per_device,
        nproc=nproc,
        data_folder=data.absolute() if data else None,
        rows=plan_verb.names(rows),
        overrides=parse_overrides(set_ or ()),
        keep=cast("Keep", keep),
        minutes=minutes,
    )
    if not dry_run and (taken := take_over(loaded, runs, options)):
        note(f"{taken} runs are taken over from other studies in {runs}")
    plan_verb.show(make_plan(loaded, runs, options), len(chosen), stderr=not dry_run)
    if slurm:
        from oelm.study import slurm as cluster

        flags = {"partition": partition, "gres": gres, "time": time, "nodes": nodes}
        settings = loaded.slurm.changed(**{key: value for key, value in flags.items() if value})
        cluster.submit(loaded, runs.absolute(), options, settings, dry_run=dry_run, wait=wait, say=note)
        return
    if partition or gres or time or nodes or wait:
        raise ConfigError("--partition, --gres, --time, --nodes and --wait belong to --slurm; add it or leave them out")
    if dry_run:
        return
    outcome = Runner(loaded, runs.absolute(), options, say=note).run()
    counts = f"{len(outcome.finished)} done, {len(outcome.already)} were done before, {len(outcome.diverged)} diverged"
    note(f"study {loaded.name}: {counts}, {len(outcome.failed)} failed")
    if not outcome.complete:
        first = next(iter(outcome.failed.items()), None)
        said = f"{first[0]}: {first[1]}" if first else outcome.blocked[0]
        count = len(outcome.failed) + len(outcome.blocked)
        raise StudyIncomplete(
            f"study {loaded.name}: {count} of its runs failed or could not start (first: {said}); "
            "mend the cause and run the same command"
        )


def _groups(devices: list[str], nproc: int, per_device: int) -> list[str]:
    """Devices in groups of `nproc`: one run takes a group."""
    from oelm.errors import ConfigError, MachineError

    if per_device > 1:
        raise ConfigError("--nproc and --per-device: a run takes several devices or shares one; give one of the two")
    if devices == ["cpu"]:
        return devices
    if len(devices) < nproc:
        raise MachineError(
            f"--nproc {nproc}: only {len(devices)} devices ({', '.join(devices)}); name more or use fewer"
        )
    return [",".join(devices[i : i + nproc]) for i in range(0, len(devices) - nproc + 1, nproc)]
