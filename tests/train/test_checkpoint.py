"""Checkpoints: what is read is what was written, or it is refused and the one before is used."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ended, forked
from safetensors.torch import save_file

from oelm.errors import CheckpointError, FrozenWeightsChanged, MachineError
from oelm.train import checkpoint as module
from oelm.train.checkpoint import Checkpoints, Damaged, load_weights, put_weights, read_checkpoint
from oelm.train.parallel import World


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 2), value), "b": torch.tensor([1, 2], dtype=torch.int64)}


def store(folder: Path, **changes: Any) -> tuple[Checkpoints, list[str]]:
    said: list[str] = []
    settings = {"identity": "abcd1234", "fingerprint": "f" * 8, "world": World(torch.device("cpu")), "say": said.append}
    return Checkpoints(folder, **(settings | changes)), said


def write(saver: Checkpoints, step: int, *, best: bool = False) -> None:
    saver.save(step, {"model": weights(step)}, {"step": step}, best=best)
    saver.wait()


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    saver, said = store(tmp_path)
    write(saver, 10, best=True)
    found = saver.load()
    assert found is not None
    assert (found.step, found.state) == (10, {"step": 10})
    assert torch.equal(found.tensors["model"]["w"], weights(10)["w"])
    assert found.tensors["model"]["b"].dtype == torch.int64
    assert said == ["checkpoint step=10 saved"]
    assert load_weights(tmp_path, "best")[1] == load_weights(tmp_path, "latest")[1] == 10
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_snapshot_is_of_the_moment_of_saving(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    live = torch.zeros(5)
    saver.save(1, {"model": {"w": live}}, {})
    live += 1
    saver.wait()
    assert load_weights(tmp_path, "latest")[0]["w"].sum() == 0


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    saver, _ = store(tmp_path, keep_last=2)
    for step in range(1, 7):
        write(saver, step, best=step == 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-5", "step-6"]


def test_a_name_is_never_used_twice(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    write(saver, 5)
    write(saver, 5)
    assert (tmp_path / "latest").read_text() == "checkpoints/step-5.1\n"
    assert saver.load().path.name == "step-5.1"  # type: ignore[union-attr]


@pytest.mark.parametrize("all_bits", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one a byte", "every"])
def test_every_flipped_bit_is_refused(tmp_path: Path, all_bits: bool) -> None:
    saver, _ = store(tmp_path)
    saver.save(3, {"model": {"w": torch.arange(4.0)}}, {"step": 3})
    saver.wait()
    path = saver.known()[0]
    read_checkpoint(path)
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for place in range(len(raw)):
            for bit in range(8) if all_bits else (place % 8,):
                file.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :])
                with pytest.raises(CheckpointError):
                    read_checkpoint(path)
        file.write_bytes(raw)
    read_checkpoint(path)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    saver, _ = store(folder)
    write(saver, 3)
    path = saver.known()[0]
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    raw = file.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "grow", "replace", "remove", "folder", "link", "pipe", "stranger"]))
    file.unlink()
    if kind == "cut":
        file.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    elif kind == "grow":
        file.write_bytes(raw + data.draw(st.binary(min_size=1, max_size=20)))
    elif kind == "replace":
        file.write_bytes(data.draw(st.binary(max_size=2 * len(raw)).filter(lambda b: b != raw)))
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        (folder / "outside").write_bytes(raw)
        file.symlink_to(folder / "outside")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "stranger":
        file.write_bytes(raw)
        (path / "stranger").write_bytes(b"")
    with pytest.raises(Damaged):
        read_checkpoint(path)
    shutil.rmtree(folder)


def test_a_damaged_one_is_passed_over_aloud(tmp_path: Path) -> None:
    saver, said = store(tmp_path)
    write(saver, 1)
    write(saver, 2)
    (tmp_path / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"not this")
    assert saver.load().step == 1  # type: ignore[union-attr]
    assert "damaged checkpoint refused" in said[-1]
    assert "step-2" in said[-1]
    (tmp_path / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact"):
        saver.load()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"identity": "ffff0000"}, "is of run abcd1234"), ({"fingerprint": "other"}, "trained on data")],
)
def test_a_foreign_one_is_refused(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    write(store(tmp_path)[0], 1)
    with pytest.raises(CheckpointError, match=words) as found:
        store(tmp_path, **changes)[0].load()
    assert not isinstance(found.value, Damaged)


def test_one_of_a_newer_form_asks_for_the_newer_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "SCHEMA", 99)
        write(store(tmp_path)[0], 1)
    with pytest.raises(CheckpointError, match="form 99"):
        store(tmp_path)[0].load()


def test_left_over_folders_are_swept_and_never_read(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    write(saver, 1)
    shutil.copytree(tmp_path / "checkpoints" / "step-1", tmp_path / "checkpoints" / "step-9.ab12.tmp")
    (tmp_path / "checkpoints" / ".DS_Store").write_bytes(b"x")
    assert saver.load().step == 1  # type: ignore[union-attr]
    saver.sweep()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [".DS_Store", "step-1"]


def test_a_frozen_tensor_that_moved_is_not_saved(tmp_path: Path) -> None:
    from oelm.method.record import digest

    saver, _ = store(tmp_path)
    good = digest(weights(1)["w"])
    saver.save(1, {"model": weights(1)}, {}, frozen={"w": good})
    saver.wait()
    saver.save(2, {"model": weights(2)}, {}, frozen={"w": good})
    with pytest.raises(FrozenWeightsChanged, match="w: frozen"):
        saver.wait()
    assert saver.load().step == 1  # type: ignore[union-attr]


def faulty(monkeypatch: pytest.MonkeyPatch, fault: int, code: int) -> Callable[[], int]:
    """Make the n-th of the saver's calls to the operating system fail; tells how many calls there were."""
    count = 0

    def wrap(owner: Any, name: str) -> None:
        honest = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == fault:
                raise OSError(code, os.strerror(code))
            return honest(*args, **more)

        monkeypatch.setattr(owner, name, call)

    for name in ("fsync", "rename", "replace", "open"):
        wrap(os, name)
    wrap(Path, "mkdir")
    wrap(module, "_put")
    return lambda: count


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_call_may_fail_and_nothing_is_lost(tmp_path: Path, code: int) -> None:
    fault = 0
    while True:
        fault += 1
        folder = tmp_path / str(fault)
        folder.mkdir()
        saver, _ = store(folder)
        write(saver, 1)
        with pytest.MonkeyPatch.context() as patch:
            calls = faulty(patch, fault, code)
            saver.save(2, {"model": weights(2)}, {"step": 2})
            try:
                saver.wait()
            except MachineError as error:
                assert "disk full" in str(error) if code == errno.ENOSPC else "check the disk" in str(error)  # noqa: PT017
                assert "\n" not in str(error)  # noqa: PT017
        found = saver.load()
        assert found is not None
        assert not list(folder.rglob("*.tmp"))
        if calls() < fault:
            assert found.step == 2
            break
    assert fault > 12


def test_a_real_limit_of_file_size(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    write(saver, 1)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        mine, _ = store(tmp_path)
        mine.save(2, {"model": {"w": torch.zeros(100_000)}}, {})
        mine.wait()

    assert ended(forked(limited)) == MachineError.exit_code
    assert saver.load().step == 1  # type: ignore[union-attr]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(canary),))

    saver, _ = store(tmp_path)
    write(saver, 1)
    torch.save({"model": Evil()}, tmp_path / "checkpoints" / "step-1" / "model.safetensors")
    with pytest.raises(CheckpointError):
        saver.load()
    torch.save(Evil(), tmp_path / "checkpoints" / "step-1" / "manifest.json")
    with pytest.raises(CheckpointError):
        saver.load()
    assert not canary.exists()


@pytest.mark.parametrize("target", ["checkpoints/../elsewhere", "elsewhere", "checkpoints/step-1/../../elsewhere", ""])
def test_a_pointer_leads_nowhere_else(tmp_path: Path, target: str) -> None:
    """Not even to an intact checkpoint."""
    write(store(tmp_path)[0], 1)
    shutil.copytree(tmp_path / "checkpoints" / "step-1", tmp_path / "elsewhere")
    (tmp_path / "latest").write_text(target)
    with pytest.raises(CheckpointError, match="no checkpoint's name"):
        load_weights(tmp_path, "latest")


def test_weights_must_fit_the_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    fits = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    put_weights(model, fits, tmp_path)
    assert model.weight.sum() == 6
    for bad, words in (
        ({"weight": torch.ones(3, 2)}, "bias"),
        (fits | {"more": torch.ones(1)}, "more"),
        (fits | {"weight": torch.ones(2, 3)}, r"\[2, 3\]"),
        (fits | {"bias": torch.zeros(3, dtype=torch.float64)}, "float64"),
    ):
        with pytest.raises(CheckpointError, match=words):
            put_weights(model, bad, tmp_path)


def test_tensors_over_the_manifest_are_refused(tmp_path: Path) -> None:
    """A consistent checkpoint whose manifest somebody edited: its own hash no longer fits."""
    saver, _ = store(tmp_path)
    write(saver, 1)
    path = saver.known()[0]
    save_file({"w": torch.ones(1)}, path / "model.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = module._hashed(path / "model.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    with pytest.raises(Damaged, match="own hash"):
        read_checkpoint(path)
