"""A task's data set as a source of batches: found, split honestly, tokenised once, kept in one file.

Owns what a task's settings mean and what is said of its data. Refuses columns, settings and splits that do not fit.

`open_task` gives the source; `prepare_task` makes it anew; `describe` says what is in it (for `oelm data inspect`);
`pack` and `unpack` carry it to a machine that has neither the text nor the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from oelm.data import overlap, prepared, sources
from oelm.data.disk import held, saving
from oelm.data.examples import Arrays, classify_arrays, qa_arrays, tag_arrays
from oelm.data.prepared import Prepared
from oelm.data.recall import RecallSource
from oelm.data.sources import FilesFound, Found
from oelm.data.spec import DataSpec
from oelm.data.splits import Rows, honest_splits
from oelm.data.store import stores_folders
from oelm.data.tables import Labelled, Tagged
from oelm.data.task_table import TASKS
from oelm.data.tokens import Tokens, load_tokens
from oelm.errors import ConfigError, DataError, nearest
from oelm.values import digest


__all__ = ["TASKS", "TaskSource", "describe", "open_task", "pack", "prepare_task", "task_file", "unpack"]

TaskSource = Prepared | RecallSource
Progress = Callable[[str, int, int], None]  # split, examples done, examples in all

_ROLES = {"classify": ("text", "label"), "tag": ("tokens", "tags"), "qa": ("context", "question", "answers")}
_MORE_ROLES: dict[str, tuple[str, ...]] = {"classify": ("text2",), "tag": (), "qa": ()}
_SAMPLES = 3
_RULE = 1  # raise when the same text gives other arrays than before


def open_task(
    spec: DataSpec, *, folder: Path | str | None = None, progress: Progress | None = None, wait: bool = True
) -> TaskSource:
    """The source of a task: out of the file that keeps it, or prepared now and kept.

    Without the text on this machine (and without a folder named) a kept file of the same settings is used as it is.
    `wait` for another process that prepares the same task, else BusyError.
    """
    _check(spec)
    if spec.name == "recall":
        return RecallSource(spec)
    kept = _kept(spec)
    try:
        found = _find(spec, folder, local=kept is not None)
        tokens = load_tokens(spec.tokenizer, folder) if found is not None else None
    except DataError:
        if kept is None or folder is not None:
            raise
        found = tokens = None
    if found is None or tokens is None:
        assert kept is not None
        return prepared.load(kept, bucketing=spec.bucketing)
    fingerprint = _fingerprint(spec, found, tokens)
    source = _kept_source(spec, fingerprint)
    if source is not None:
        return source
    base = stores_folders()[0]
    with saving(base), held(base, task_file(spec), wait=wait):
        source = _kept_source(spec, fingerprint)  # another process may have made it while this one waited
        return source if source is not None else _prepared(spec, found, tokens, progress)


def prepare_task(spec: DataSpec, *, folder: Path | str | None = None, progress: Progress | None = None) -> TaskSource:
    """The source, made from the text now whatever is kept; what is kept is replaced."""
    _check(spec)
    if spec.name == "recall":
        return RecallSource(spec)
    found = _find(spec, folder, local=False)
    assert found is not None
    base = stores_folders()[0]
    with saving(base), held(base, task_file(spec), wait=True):
        return _prepared(spec, found, load_tokens(spec.tokenizer, folder), progress)


def pack(source: Prepared, folder: Path | str, spec: DataSpec) -> Path:
    """A compressed file of a prepared task in the folder, to travel; `unpack` with the same spec reads it there."""
    return prepared.save(source, Path(folder) / task_file(spec), compressed=True)


def unpack(folder: Path | str, spec: DataSpec) -> Prepared:
    """A prepared task from a folder that `pack` wrote to."""
    path = Path(folder) / task_file(spec)
    source = prepared.load(path, bucketing=spec.bucketing)
    if source.meta["settings"] != settings(spec):
        raise DataError(f"{path}: was prepared with other settings than asked for; pack it again")
    return source


def task_file(spec: DataSpec) -> str:
    """The name of the file that keeps a task of these settings, in a folder of `stores_folders()`."""
    return f"{spec.name}-{digest(settings(spec), 12)}.task.npz"


def settings(spec: DataSpec) -> dict[str, Any]:
    """What of a spec decides the examples; how they are batched does not."""
    return {
        "rule": _RULE,
        "name": spec.name,
        "kind": _kind(spec),
        "path": Path(spec.path).name if spec.path else None,
        "columns": dict(spec.columns),
        "tokenizer": spec.tokenizer if "/" not in spec.tokenizer else Path(spec.tokenizer).name,
        "context": spec.context,
        "selection": spec.selection,
        "examples": spec.examples,
        "seed": spec.seed,
    }


def describe(source: TaskSource) -> dict[str, Any]:
    """What `oelm data inspect` shows of a task, as plain data that JSON can hold.

    name, kind, fingerprint, provenance; splits: {split: {examples, tokens, lengths: {min, median, mean, p95, max},
    truncated: {examples, tokens}, labels: {name: count}}}; overlap: {within: {split: {exact, normalised}}, between:
    {"train & test": {exact, normalised}}} (copies of texts); samples: {split: [text]}; waste: {batch: share of padding}.
    """
    told: dict[str, Any] = {
        "name": source.name,
        "kind": source.kind,
        "fingerprint": source.fingerprint,
        "provenance": source.provenance,
        "waste": {str(batch): round(source.waste(batch), 4) for batch in (8, 16, 32)},
    }
    if isinstance(source, RecallSource):
        counts = source.provenance["counts"]
        told["splits"] = {
            split: {"examples": count, "tokens": count * source.context} for split, count in counts.items()
        }
        return told | {"overlap": {}, "samples": {}}
    told["splits"] = {split: _described(source, arrays) for split, arrays in source.splits.items()}
    return told | {"overlap": source.meta["overlap"], "samples": source.meta["samples"]}


def _described(source: Prepared, arrays: Arrays) -> dict[str, Any]:
    lengths = np.diff(arrays["offsets"])
    told: dict[str, Any] = {
        "examples": len(lengths),
        "tokens": int(lengths.sum()),
        "lengths": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": round(float(lengths.mean()), 2),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
        },
        "truncated": _truncated(arrays),
    }
    if source.kind == "qa":
        told["questions"] = len(arrays["cut"])
        return told
    numbers = np.bincount(arrays["labels" if source.kind == "classify" else "truth"], minlength=len(source.labels))
    told["labels"] = dict(zip(source.labels, numbers.tolist(), strict=True))
    return told


def _truncated(arrays: Arrays) -> dict[str, int]:
    """Examples that were cut, and by how many tokens (tagging: words; questions: tokens of the question) in all."""
    return {"examples": int(np.count_nonzero(arrays["cut"])), "tokens": int(arrays["cut"].sum(dtype=np.int64))}


def _check(spec: DataSpec) -> None:
    """Settings that belong to language modelling are refused, not passed over."""
    if spec.tokens is not None:
        raise ConfigError(f"data.tokens: {spec.name} is read in examples; use examples")
    if spec.packing != "windows":
        raise ConfigError(f"data.packing: {spec.name} is read in examples, which are not packed; leave packing out")


def _kind(spec: DataSpec) -> Literal["classify", "tag", "qa"]:
    if spec.name == "local":
        if spec.task not in _ROLES:
            raise ConfigError(f"data.task = {spec.task!r} is no task with labels; use classify, tag or qa")
        return cast(Literal["classify", "tag", "qa"], spec.task)
    if spec.name not in TASKS:
        raise ConfigError(f"data.name = {spec.name!r} is not a task; {nearest(spec.name, [*TASKS, 'recall'])}")
    return cast(Literal["classify", "tag", "qa"], TASKS[spec.name].kind)


def _kept(spec: DataSpec) -> Path | None:
    paths = (folder / task_file(spec) for folder in stores_folders())
    return next((path for path in paths if path.is_file()), None)


def _kept_source(spec: DataSpec, fingerprint: str) -> Prepared | None:
    """The kept source of these settings and this text; None when there is none, or a damaged one, to be made again."""
    kept = _kept(spec)
    if kept is None:
        return None
    try:
        source = prepared.load(kept, bucketing=spec.bucketing)
    except DataError:
        return None
    return source if source.fingerprint == fingerprint else None


def _find(spec: DataSpec, folder: Path | str | None, *, local: bool) -> Found | None:
    """Where the set is; with `local`, None when no folder of this machine has it."""
    kind = _kind(spec)
    if spec.name != "local":
        found = sources.find_local(TASKS[spec.name], folder) if local else sources.find(TASKS[spec.name], folder)
        return _as_from_the_hub(found) if isinstance(found, FilesFound) else found
    assert spec.path is not None
    roles = (*_ROLES[kind], *_MORE_ROLES[kind])
    for role in spec.columns:
        if role not in roles:
            raise ConfigError(f"data.columns: {role!r} is no column of a {kind} task; {nearest(role, roles)}")
    columns = {role: spec.columns.get(role, role) for role in roles if role in _ROLES[kind] or role in spec.columns}
    found = sources.local_files(spec.path, columns, kind)
    if kind != "classify" or "text2" in columns:
        return found
    pairs = replace(found, layout=replace(found.layout, columns=columns | {"text2": "text2"}))
    return pairs if _has_rows(pairs) else found  # a column of the role's own name needs no naming


def _as_from_the_hub(found: FilesFound) -> FilesFound:
    """Files of the hub under the paths of another layout: read by the hub's columns where only these fit."""
    hub = found.dataset.hub
    if hub is None or "train" not in found.splits or hub.columns == found.layout.columns:
        return found
    theirs = replace(found, layout=replace(found.layout, columns=hub.columns, only={}, partial=False, note=""))
    return theirs if not _has_rows(found) and _has_rows(theirs) else found


def _has_rows(found: Found) -> bool:
    try:
        return next(iter(found.rows("train")), None) is not None
    except DataError:
        return False


def _fingerprint(spec: DataSpec, found: Found, tokens: Tokens) -> str:
    return digest({"settings": settings(spec), "tokenizer": tokens.hash, "data": found.identity()}, length=64)


def _prepared(spec: DataSpec, found: Found, tokens: Tokens, progress: Progress | None) -> Prepared:
    kind = _kind(spec)
    fingerprint = _fingerprint(spec, found, tokens)
    labels, rows, counts = honest_splits(spec, kind, found)
    arrays: dict[str, Arrays] = {}
    for split, part in rows.items():
        tell = _teller(progress, split)
        if kind == "classify":
            texts, seconds, numbers = zip(*part.items, strict=True)
            pairs = list(seconds) if seconds[0] is not None else None
            arrays[split] = classify_arrays(Labelled(list(texts), pairs, list(numbers)), tokens, spec.context, tell)
        elif kind == "tag":
            words, tags = zip(*part.items, strict=True)
            arrays[split] = tag_arrays(Tagged(list(words), list(tags)), labels, tokens, spec.context, tell)
        else:
            arrays[split] = qa_arrays(part.items, tokens, spec.context, train=split == "train", progress=tell)
    meta = {
        "kind": kind,
        "name": spec.name,
        "fingerprint": fingerprint,
        "settings": settings(spec),
        "vocab_size": tokens.vocab_size,
        "pad_id": tokens.pad_id,
        "labels": list(labels),
        "context": spec.context,
        "provenance": _provenance(spec, found, tokens, rows, counts, arrays),
        "overlap": overlap.duplicates({split: part.texts for split, part in rows.items()}),
        "samples": {split: [text[:200] for text in part.texts[:_SAMPLES]] for split, part in rows.items()},
    }
    source = Prepared(arrays, meta, bucketing=spec.bucketing)
    prepared.save(source, stores_folders()[0] / task_file(spec))
    return source


def _provenance(
    spec: DataSpec,
    found: Found,
    tokens: Tokens,
    rows: Mapping[str, Rows],
    counts: Mapping[str, int],
    arrays: Mapping[str, Arrays],
) -> dict[str, Any]:
    told = found.describe()
    official = {name: count for name, count in found.dataset.official.items() if name != "validation" or name in counts}
    layout = found.layout if isinstance(found, FilesFound) else None
    status, off = sources.judged(
        replace(found.dataset, official=official), counts, partial=layout is not None and layout.partial
    )
    hub = found.dataset.hub
    from_hub = layout is None and hub is not None
    notes = [layout.note if layout else "", hub.note if hub and from_hub else "", off, found.dataset.note]
    carved = [split for split in rows if split not in counts]
    if carved:
        notes.append(
            f"{' and '.join(carved)} carved from train by hash (seed {spec.seed}), near-equal texts on one side"
        )
    if spec.selection == "test":
        notes.append(
            'selection = "test": validation reads the test split, the original\'s protocol, for replication only'
        )
    left_out = {split: part.left_out for split, part in rows.items() if part.left_out}
    if left_out:
        notes.append("left out: " + ", ".join(f"{count:,} rows of {split}" for split, count in left_out.items()))
    if spec.examples is not None:
        notes.append(f"train is limited to {len(rows['train'].items):,} examples")
    return {
        "name": spec.name,
        "status": status,
        "place": told["place"],
        "from": told["from"],
        "licence": found.dataset.licence,
        "counts": {split: len(part.items) for split, part in rows.items()},
        "rows": dict(counts),
        "official": dict(found.dataset.official),
        "tokenizer": {"name": Path(tokens.name).name, "hash": tokens.hash, "vocab_size": tokens.vocab_size},
        "truncated": {split: _truncated(part) for split, part in arrays.items()},
        "selection": spec.selection,
        "note": "; ".join(note for note in notes if note),
    }


def _teller(progress: Progress | None, split: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(split, done, total)
