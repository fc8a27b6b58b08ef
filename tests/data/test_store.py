"""Token stores: what is written is what was read, a kill loses nothing, and no wrong byte is ever read."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import disk, parcel, prepare
from oelm.data import store as stores_module
from oelm.data.prepare import Wanted, prepared
from oelm.data.sources import local_files
from oelm.data.store import Damaged, Store, Stream, open_store, read_index, shard_files, stores
from oelm.data.tokens import load_tokens
from oelm.errors import BusyError, DataError, MachineError, OelmError


STORIES = [f"Story {n}: " + " ".join(f"w{(n * 7919 + k) % 501}" for k in range(n % 61)) for n in range(400)]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, rows in (("train", STORIES[:300]), ("validation", STORIES[300:350]), ("test", STORIES[350:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def _wanted(texts: Path, *, limit: int | None = None, shard: int = 2000, tokenizer: str = "bytes") -> Wanted:
    found = local_files(texts, {"text": "text"}, "lm")
    return Wanted(found=found, tokens=load_tokens(tokenizer), limit=limit, shard_tokens=shard)


def _documents(store: Store, split: str) -> list[str]:
    """Our own decoding: ids are bytes, 256 comes before each document."""
    stream = store.stream(split)
    ids = stream.read(0, len(stream))
    edges = [*stream.starts.tolist(), len(stream)]
    assert all(ids[start] == 256 for start in edges[:-1])
    return [bytes(ids[a + 1 : b].tolist()).decode() for a, b in itertools.pairwise(edges)]


def test_a_store_decodes_to_the_text(texts: Path) -> None:
    store = prepared(_wanted(texts))
    assert _documents(store, "train") == STORIES[:300]
    assert _documents(store, "validation") == STORIES[300:350]
    assert _documents(store, "test") == STORIES[350:]
    held = store.index.splits["train"]
    assert held.documents == 300
    assert held.words == sum(len(text.split()) for text in STORIES[:300])
    assert held.bytes == sum(len(text.encode()) for text in STORIES[:300])
    assert len(held.shards) == -(-held.tokens // 2000)


def test_shards_of_any_size_hold_the_same_ids(texts: Path) -> None:
    small, large = prepared(_wanted(texts, shard=1777)), prepared(_wanted(texts, shard=1 << 20))
    for split in ("train", "validation", "test"):
        a, b = small.stream(split), large.stream(split)
        assert np.array_equal(a.read(0, len(a)), b.read(0, len(b)))
        assert np.array_equal(a.starts, b.starts)


@given(start=st.integers(0, 3000), length=st.integers(0, 700), shard=st.integers(1, 500))
@settings(max_examples=150, deadline=None)
def test_reading_over_shard_edges_is_slicing(start: int, length: int, shard: int) -> None:
    whole = np.arange(4000, dtype=np.uint16)
    parts = [whole[at : at + shard] for at in range(0, len(whole), shard)]
    stream = Stream(parts, [np.zeros(0, np.uint32)] * len(parts), None)
    assert np.array_equal(stream.read(start, start + length), whole[start : start + length])


def test_reading_outside_is_refused() -> None:
    stream = Stream([np.arange(10, dtype=np.uint16)], [np.zeros(0, np.uint32)], 8)
    assert len(stream) == 8
    with pytest.raises(DataError, match="outside"):
        stream.read(5, 9)


def test_a_limited_store_is_the_beginning_of_the_whole(texts: Path) -> None:
    whole = prepared(_wanted(texts))
    for limit in (1, 1999, 2001, 5432):
        part = prepared(_wanted(texts, limit=limit))
        stream = part.stream("train")
        assert np.array_equal(stream.read(0, limit), whole.stream("train").read(0, limit))
        assert part.fingerprint() == whole.fingerprint(limit) == part.fingerprint(limit)
        assert len(part.stream("validation")) == len(whole.stream("validation"))
        assert np.array_equal(whole.stream("train", limit).starts, stream.starts)
    assert whole.fingerprint() != whole.fingerprint(5432)
    assert prepared(_wanted(texts, limit=10**9)).fingerprint() == whole.fingerprint()


def test_the_fingerprint_is_of_the_content(texts: Path, tmp_path: Path) -> None:
    one = prepared(_wanted(texts)).fingerprint()
    other = tmp_path / "elsewhere"
    os.rename(texts, other)
    for split in ("train", "validation", "test"):
        os.rename(other / f"{split}.jsonl", other / f"{split}-00000.jsonl")
    assert prepared(_wanted(other)).fingerprint() == one
    assert prepared(_wanted(other, tokenizer="demo-bpe")).fingerprint() != one
    (other / "test-00000.jsonl").write_text('{"text": "another test"}\n')
    assert prepared(_wanted(other)).fingerprint() != one


def test_prepared_twice_is_prepared_once(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(_wanted(texts))
    monkeypatch.setattr(prepare, "_write", lambda *_: pytest.fail("prepared again"))
    assert prepared(_wanted(texts)).folder == first.folder


def _all_files(store: Store) -> list[Path]:
    names = [
        name
        for split, held in store.index.splits.items()
        for n in range(len(held.shards))
        for name in shard_files(split, n)
    ]
    return [store.folder / name for name in names]


def test_every_flipped_byte_is_found(texts: Path) -> None:
    store = prepared(_wanted(texts, shard=4000))
    rng = random.Random(0)
    for path in [*_all_files(store), store.folder / "tokenizer.json"]:
        data = path.read_bytes()
        for place in {0, len(data) - 1, rng.randrange(len(data))}:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(4)]) + data[place + 1 :])
            with pytest.raises(DataError, match=path.name):
                open_store(store.folder)
        path.write_bytes(data)
    open_store(store.folder)


def test_truncated_missing_and_foreign_shards_are_named(texts: Path) -> None:
    store = prepared(_wanted(texts))
    path = _all_files(store)[2]
    data = path.read_bytes()
    for change in (data[:-1], data[:-2], b"", data + b"\0\0"):
        path.write_bytes(change)
        with pytest.raises(DataError, match=f"{path.name}: has .* bytes, the index says"):
            open_store(store.folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{path.name}: is missing"):
        open_store(store.folder)


def _edit(key: str, value: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda index: index | {key: value}


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [],
        lambda _: {},
        _edit("format", "someone-elses"),
        _edit("version", 2),
        _edit("more", 1),
        _edit("dtype", "float64"),
        _edit("name", "../../etc"),
        _edit("splits", {"train": {"tokens": -1}}),
        _edit("splits", {"../x": {"tokens": 0, "documents": 0, "words": 0, "bytes": 0, "characters": 0, "shards": []}}),
    ],
)
def test_a_damaged_or_foreign_index_is_refused(texts: Path, change: Callable[[object], object]) -> None:
    store = prepared(_wanted(texts))
    path = store.folder / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=r"index\.json") as caught:
        open_store(store.folder)
    assert "\n" not in str(caught.value)
    assert stores() == []


def test_an_index_that_does_not_add_up_is_refused(texts: Path) -> None:
    store = prepared(_wanted(texts))
    index = json.loads((store.folder / "index.json").read_text())
    index["splits"]["train"]["tokens"] += 1
    (store.folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="do not add up"):
        open_store(store.folder)


def test_ids_that_no_vocabulary_has_are_refused(texts: Path) -> None:
    """Hashes that fit do not make a store right: it may be someone's who wrote it wrong."""
    store = prepared(_wanted(texts, shard=10**6))
    path = store.folder / "index.json"
    whole = json.loads(path.read_text())

    def altered(name: str, key: str, values: np.ndarray) -> None:
        (store.folder / name).write_bytes(values.tobytes())
        index = json.loads(json.dumps(whole))
        index["splits"]["train"]["shards"][0][key] = stores_module.hash_of(values)
        path.write_text(json.dumps(index))

    ids = np.array(store.parts["train"][0])
    ids[5] = 257
    altered("train-00000.tokens", "sha256", ids)
    with pytest.raises(DataError, match=r"train-00000\.tokens: holds the id 257, the vocabulary has 257"):
        open_store(store.folder)
    ids[5] = 0
    altered("train-00000.tokens", "sha256", ids)
    open_store(store.folder)
    whole = json.loads(path.read_text())
    starts = np.array(store.starts["train"][0])
    for change in (starts[::-1].copy(), starts + np.uint32(len(ids))):
        altered("train-00000.starts", "starts_sha256", change)
        with pytest.raises(DataError, match=r"train-00000\.starts: .* not in order"):
            open_store(store.folder)
    whole["tokenizer"]["pad_id"] = 257
    path.write_text(json.dumps(whole))
    with pytest.raises(DataError, match="pad_id"):
        open_store(store.folder)


def test_a_damaged_store_is_refused_and_made_again_when_asked(texts: Path) -> None:
    first = prepared(_wanted(texts))
    print_before = first.fingerprint()
    shard = _all_files(first)[2]
    for damage in (b"", shard.read_bytes()[:-1] + b"\xff"):
        shard.write_bytes(damage)
        with pytest.raises(Damaged, match=shard.name):
            prepared(_wanted(texts))
        assert shard.read_bytes() == damage
        assert prepared(_wanted(texts), repair=True).fingerprint() == print_before
    assert prepared(_wanted(texts)).fingerprint() == print_before


class _Killed(BaseException):
    pass


def _tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_stopped_anywhere_it_continues_to_the_same_bytes(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _wanted(texts, shard=5000)
    whole = _tree(prepared(wanted, base=tmp_path / "whole").folder)
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 2500)
    real = disk.write_file
    for stop in (0, 1, 2, 3, 8, 13, 22):
        base, written = tmp_path / f"stop-{stop}", []

        def counted(path: Path, data: object, written: list[Path] = written, stop: int = stop) -> str:
            written.append(path)
            if len(written) == stop:
                path.with_name(path.name + ".new").write_bytes(b"half")
                raise _Killed
            return real(path, data)  # type: ignore[arg-type]

        monkeypatch.setattr(prepare, "write_file", counted)
        if stop:
            with pytest.raises(_Killed):
                prepared(wanted, base=base)
            assert not (base / wanted.key).exists()
        made = _tree(prepared(wanted, base=base).folder)
        assert {name: data for name, data in made.items() if not name.endswith(".new")} == whole
        assert made.keys() == whole.keys()


def test_a_continued_preparation_reads_no_shard_twice(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 900)
    wanted = _wanted(texts, shard=700)

    def stop(split: str, done: int, _: int) -> None:
        if done > 8000:
            raise _Killed

    with pytest.raises(_Killed):
        prepared(wanted, report=stop)
    encoded: list[int] = []
    real = type(wanted.tokens).arrays

    def counted(self: object, rows: list[str]) -> object:
        encoded.append(sum(map(len, rows)))
        return real(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(type(wanted.tokens), "arrays", counted)
    prepared(wanted)
    assert sum(encoded) < sum(map(len, STORIES)) - 6000


@pytest.mark.slow
def test_killed_processes_leave_a_store_or_a_beginning(texts: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from oelm.data import prepare; prepare.BATCH_CHARACTERS = 700\n"
        "from oelm.data.prepare import Wanted, prepared; from oelm.data.sources import local_files\n"
        "from oelm.data.tokens import load_tokens; from pathlib import Path\n"
        "print('ready', flush=True)\n"
        f"f = local_files({str(texts)!r}, {{'text': 'text'}}, 'lm')\n"
        "prepared(Wanted(found=f, tokens=load_tokens('bytes'), shard_tokens=1500), base=Path(sys.argv[1]))\n"
    )
    wanted = _wanted(texts, shard=1500)
    whole = _tree(prepared(wanted, base=tmp_path / "whole").folder)
    rng = random.Random(1)
    killed = 0

    def begun(base: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, str(base)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    undisturbed = begun(tmp_path / "timed")
    start = time.monotonic()
    assert undisturbed.wait() == 0
    undisturbed.stdout.close()  # type: ignore[union-attr]
    seconds = time.monotonic() - start
    for number in range(4):
        base = tmp_path / f"k{number}"
        for _ in range(2):
            process = begun(base)
            assert process.stdout is not None
            time.sleep(rng.uniform(0.0, 0.7 * seconds))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            killed += not (base / wanted.key).exists()
            if (base / wanted.key).exists():
                assert _tree(base / wanted.key) == whole
        assert _tree(prepared(wanted, base=base).folder) == whole
    assert killed > 1


def test_a_full_disk_leaves_nothing_half_written(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _wanted(texts)
    real = os.fsync
    calls: list[int] = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"No space left on device.*free some space"):
        prepared(wanted)
    base = stores_module.stores_folders()[0]
    assert [path.name for path in base.rglob("*")] == [f".{wanted.key}.lock"]
    assert _documents(prepared(wanted), "train") == STORIES[:300]


def test_a_cache_that_cannot_be_written_is_said(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match=r"cannot be written.*OELM_HOME"):
        prepared(_wanted(texts))


def test_a_second_process_waits_or_is_told(texts: Path) -> None:
    wanted = _wanted(texts)
    base = stores_module.stores_folders()[0]
    base.mkdir(parents=True)
    with open(base / f".{wanted.key}.lock", "w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="process 4711 is preparing"):
            prepared(wanted, wait=False)
    assert prepared(wanted, wait=False).index.name == "local"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"text": "a"}\n{"text": 1}\n', "row 2"), (b'{"text": "a\xff"}\n', "not UTF-8"), (b'{"text": ""}\n', "no text")],
)
def test_bad_text_leaves_nothing(texts: Path, content: bytes, said: str) -> None:
    (texts / "test.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=said):
        prepared(_wanted(texts))
    base = stores_module.stores_folders()[0]
    assert [path for path in base.iterdir() if path.is_dir()] == []
    (texts / "test.jsonl").write_text('{"text": "good now"}\n')
    assert _documents(prepared(_wanted(texts)), "test") == ["good now"]


def test_large_vocabularies_use_four_bytes() -> None:
    assert stores_module.vocabulary_dtype(65536) == "uint16"
    assert stores_module.vocabulary_dtype(65537) == "uint32"


@pytest.fixture
def packed(texts: Path, tmp_path: Path) -> tuple[Store, Path]:
    store = prepared(_wanted(texts))
    parcel.pack(store, tmp_path / "x.oelm.xz", tokens=5432)
    return store, tmp_path / "x.oelm.xz"


def test_a_parcel_is_the_beginning_of_its_store(packed: tuple[Store, Path], tmp_path: Path) -> None:
    store, file = packed
    there = parcel.unpack(file, tmp_path / "there")
    assert there.fingerprint() == store.fingerprint(5432)
    assert there.index.limit == 5432
    assert not there.index.whole
    assert _documents(there, "validation") == _documents(store, "validation")
    assert parcel.unpack(file, tmp_path / "there").folder == there.folder
    parcel.pack(store, file)
    assert parcel.unpack(file, tmp_path / "there").fingerprint() == store.fingerprint()
    assert len(read_index(there.folder).splits["train"].shards) == 3


def test_a_damaged_parcel_is_refused_and_leaves_nothing(packed: tuple[Store, Path], tmp_path: Path) -> None:
    _, file = packed
    data = file.read_bytes()
    rng = random.Random(3)
    places = [rng.randrange(len(data)) for _ in range(25)]
    cases = [data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :] for place in places]
    for number, case in enumerate([b"", data[: len(data) // 2], b"not a parcel", *cases]):
        file.write_bytes(case)
        base = tmp_path / f"there-{number}"
        with pytest.raises(OelmError) as caught:
            parcel.unpack(file, base)
        assert file.name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not base.exists() or [path for path in base.iterdir() if path.is_dir()] == []
    inside = bytearray(lzma.decompress(data))
    inside[-1] ^= 1
    file.write_bytes(lzma.compress(bytes(inside)))
    with pytest.raises(DataError, match=r"test-0000\d\.starts does not have the hash"):
        parcel.unpack(file, tmp_path / "altered")
    assert [path for path in (tmp_path / "altered").iterdir() if path.is_dir()] == []
    with pytest.raises(DataError, match="no such file"):
        parcel.unpack(tmp_path / "none.oelm.xz")
