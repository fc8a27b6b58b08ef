"""A run that is killed, stopped or starved at any moment ends bit-equal to one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import assert_same_end, ended, forked, lines, training, wait_for
from small_runs import small_run

from oelm.errors import Preempted
from oelm.train.checkpoint import Checkpoints, load_weights
from oelm.train.loop import train
from oelm.train.signals import starting


THAWING = {"base": "oelm-freeze", "thaw": {"order": "top-down", "start": 5, "end": 15}}


def undisturbed(folder: Path, **changes: Any) -> float:
    """Train to the end in a process of its own; the seconds it took."""
    began = time.monotonic()
    assert ended(training(small_run(**changes), folder)) == 0
    return time.monotonic() - began


def killed_often(folder: Path, seconds: float, rng: random.Random, kills: int, **changes: Any) -> int:
    """SIGKILL up to `kills` times at random instants, then let it end; how often it was really killed."""
    run = small_run(**changes)
    for done in range(kills):
        pid = training(run, folder, checkpoint_every=5)
        time.sleep(rng.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        if (code := ended(pid)) == 0:  # it was over before
            return done
        assert code == -signal.SIGKILL
    assert ended(training(run, folder, checkpoint_every=5)) == 0
    return kills


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"variant": THAWING, "budget__accumulate": 2},
        {"optimizer__name": "muon", "variant": "tied-shift", "budget__batch": 6},
    ],
    ids=["frozen", "thaw and accumulation", "muon, uneven epochs"],
)
def test_killed_at_random_instants_it_ends_bit_equal(tmp_path: Path, changes: dict[str, Any]) -> None:
    seconds = undisturbed(tmp_path / "reference", **changes)
    rng = random.Random(7)
    for trial in range(2):
        folder = tmp_path / f"killed-{trial}"
        killed_often(folder, seconds, rng, 3, **changes)
        assert_same_end(folder, tmp_path / "reference")


@pytest.mark.parametrize("looks", [24, 5], ids=["a line a step", "a line every four steps"])
@pytest.mark.parametrize("at", [8, 20])
def test_stopped_between_a_save_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int, at: int
) -> None:
    """Saves fall on thaws (5, 15), between train lines and on them (20)."""
    monkeypatch.setattr("oelm.train.loop.LOOKS", looks)
    run = small_run(variant=THAWING)
    train(run, tmp_path / "reference", progress="none")

    def stop(line: Any) -> None:
        if line["kind"] == "train" and line["step"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "stopped", progress="none", checkpoint_every=5, on_event=stop)
    train(run, tmp_path / "stopped", progress="none", checkpoint_every=5)
    assert_same_end(tmp_path / "stopped", tmp_path / "reference")


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    seconds = undisturbed(tmp_path / "reference", variant=THAWING)
    rng = random.Random(11)
    kills = trial = 0
    while kills < 200:
        folder = tmp_path / f"killed-{trial}"
        kills += killed_often(folder, seconds, rng, 10, variant=THAWING)
        assert_same_end(folder, tmp_path / "reference")
        trial += 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_asks_for_a_requeue(tmp_path: Path, number: signal.Signals) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "stopped"
    run = small_run(budget__steps=200, eval_every=100)
    undisturbed(reference, budget__steps=200, eval_every=100)
    for lines_seen in (5, 120):
        pid = training(run, folder, checkpoint_every=10**6)
        wait_for(lambda n=lines_seen: (folder / "metrics.jsonl").exists() and len(lines_so_far(folder)) >= n)
        began = time.monotonic()
        os.kill(pid, number)
        assert ended(pid) == 75
        assert time.monotonic() - began < 5
    assert ended(training(run, folder, checkpoint_every=10**6)) == 0
    assert_same_end(folder, reference)
    assert sum(line["kind"] == "train" for line in lines(folder)) == 200


def lines_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("which", ["latest", "best"])
def test_killed_before_a_pointer_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Validation finds its best at step 20 of 24: from then on nothing else moves that pointer."""
    run = small_run(optimizer__lr=0.5, optimizer__warmup=20, optimizer__clip=0.0, eval_every=4)
    train(run, tmp_path / "reference", progress="none")
    assert (tmp_path / "reference" / "best").read_text() == "checkpoints/step-20\n"
    honest = Checkpoints._point

    def cut(self: Any, pointer: str, name: str) -> None:
        if (pointer, name) == (which, "step-20"):
            raise KeyboardInterrupt
        honest(self, pointer, name)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_point", cut)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path / "cut", progress="none")
    assert (tmp_path / "cut" / which).read_text() != "checkpoints/step-20\n"
    train(run, tmp_path / "cut", progress="none")
    assert_same_end(tmp_path / "cut", tmp_path / "reference")


def test_a_signal_while_torch_is_loaded_asks_for_a_requeue() -> None:
    def load(number: signal.Signals) -> None:
        with starting("runs/a"):
            os.kill(os.getpid(), number)
            time.sleep(10)

    with pytest.raises(Preempted, match=r"runs/a: stopped by SIGTERM with nothing to save; run the same command again"):
        load(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        load(signal.SIGINT)


def test_ctrl_c_saves_and_a_second_one_leaves_at_once(tmp_path: Path) -> None:
    run = small_run(budget__steps=4000, eval_every=0)
    pid = training(run, tmp_path / "once", checkpoint_every=10**6)
    wait_for(lambda: (tmp_path / "once" / "metrics.jsonl").exists() and len(lines_so_far(tmp_path / "once")) > 2)
    os.kill(pid, signal.SIGINT)
    assert ended(pid) == 130
    assert (tmp_path / "once" / "latest").exists()


def test_signal_while_it_evaluates_saves_before_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "stopped"
    undisturbed(reference)
    from oelm.data.recall import RecallSource

    honest = RecallSource.eval_batches

    def slow(self: Any, *args: Any, **more: Any) -> Any:
        for batch in honest(self, *args, **more):
            (folder / "evaluating").touch()
            time.sleep(30)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(RecallSource, "eval_batches", slow)
        pid = training(small_run(), folder)
    wait_for(lambda: (folder / "evaluating").exists())
    os.kill(pid, signal.SIGTERM)
    assert ended(pid, 5) == 75
    assert (folder / "latest").read_text() == "checkpoints/step-8\n"
    (folder / "evaluating").unlink()
    assert ended(training(small_run(), folder)) == 0
    assert_same_end(folder, reference)


def test_killed_after_the_last_step_it_makes_no_other(tmp_path: Path) -> None:
    undisturbed(tmp_path / "run")
    before = lines_so_far(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert ended(training(small_run(), tmp_path / "run")) == 0
    assert lines_so_far(tmp_path / "run") == before


def test_a_run_that_is_over_is_not_trained_again(tmp_path: Path) -> None:
    undisturbed(tmp_path / "run")
    stamp = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    assert ended(training(small_run(), tmp_path / "run")) == 0
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("torn", [b'{"step": 25, "tok', b"\xff\xfe\n", b"{}\n"])
def test_a_torn_log_is_cut_back_on_resume(tmp_path: Path, torn: bytes) -> None:
    undisturbed(tmp_path / "run")
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(whole + torn)
    assert ended(training(small_run(), tmp_path / "run")) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""

    def work() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        train(small_run(), tmp_path, progress="none", on_event=lambda line: os.kill(os.getpid(), signal.SIGHUP))

    assert ended(forked(work)) == 0


def test_two_starts_at_once_have_one_winner(tmp_path: Path) -> None:
    run = small_run()
    codes = sorted(ended(pid) for pid in [training(run, tmp_path / "run") for _ in range(4)])
    assert codes[0] == 0
    assert set(codes[1:]) <= {0, 6}  # a late one may find the run over
    assert len(lines(tmp_path / "run")) == 24 + 3


def test_compact_checkpoints_resume_bit_equal(tmp_path: Path) -> None:
    undisturbed(tmp_path / "reference")
    run, folder = small_run(), tmp_path / "compact"
    pid = training(run, folder, checkpoint_every=2, compact=True)
    wait_for((folder / "latest").exists)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    assert ended(training(run, folder, compact=True)) == 0
    mine, theirs = (load_weights(f, "latest")[0] for f in (folder, tmp_path / "reference"))
    assert len(mine) == len(theirs) - 4
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
