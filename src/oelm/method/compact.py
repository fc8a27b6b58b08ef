"""Checkpoints that say what was frozen: compact ones without the drawn matrices, and oelm.json beside full ones.

A compact folder holds model.safetensors (all that the seed does not give) and oelm.json (variant, seed, versions, a
SHA-256 of every treated parameter and file). Loading makes the drawn matrices again and checks every hash before it
touches the model; it refuses what differs, by name. Nothing is ever unpickled; folders appear whole or not at all.
"""

from __future__ import annotations

import functools
import json
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.errors import CheckpointError, FrozenWeightsChanged, MachineError, MethodError
from oelm.method import matrices
from oelm.method.apply import convert
from oelm.method.flops import on_meta
from oelm.method.folder import RECORD, checksum, put_in_place, sha256, sync, write_json
from oelm.method.projections import Site, find_sites
from oelm.method.record import ATTRIBUTE, Entry, Record, digest, holder_of, record_of, verify
from oelm.method.split import Slice
from oelm.method.variant import name_of


TENSORS = "model.safetensors"
MAX_RECORD_BYTES = 64_000_000


def save_compact(model: nn.Module, path: str | Path) -> Path:
    """Write the folder `path` without what the seed gives again; the frozen weights are verified first.

    Under FSDP2 every process must call it; the first one writes.
    """
    holder, record = _converted(model, "save_compact")
    verify(holder)
    path = Path(path)
    if path.exists() and not (path.is_dir() and ((path / RECORD).is_file() or not any(path.iterdir()))):
        raise CheckpointError(f"{path}: exists and is no oelm checkpoint; choose another name")
    own = dict(_tensors(holder))
    left_out = [name for name in record.regenerable if not own[name].requires_grad]
    kept = {name: _whole(tensor) for name, tensor in own.items() if name not in set(left_out)}
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return path
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        save_file(kept, temporary / TENSORS, metadata={"format": "pt"})
        sync(temporary / TENSORS)
        write_json(temporary, _document(holder, record, "compact", left_out, [temporary / TENSORS]))
        sync(temporary)
        put_in_place(temporary, path)
    except OSError as error:
        raise MachineError(
            f"{path}: cannot be written ({error.strerror or error}); check disk and permissions"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def load_compact(model: nn.Module, path: str | Path) -> None:
    """Load what `save_compact` wrote, into a converted model or into a plain one, which is converted as recorded.

    Everything is checked first: on any difference the model stays as it was.
    """
    path = Path(path)
    document, record = _read(path)
    if document.get("format") != "compact":
        raise CheckpointError(f"{path}: holds full weights; load them with their own library, then oelm.restore")
    present = record_of(model)
    if present is not None:
        _same_treatment(present, record, path)
        skeleton = holder_of(model)
    else:
        skeleton = on_meta(model)
        _convert(skeleton, record, path)
    assert skeleton is not None
    drawn = _draw_again(skeleton, record, document, path)
    loaded = _load_tensors(path, document)
    _check_document(document, path)
    _check_fits(skeleton, record, loaded, drawn, path)
    if present is None:
        convert(model, record.variant, record.pattern)
        setattr(model, ATTRIBUTE, record)
    holder = holder_of(model)
    assert holder is not None
    target = dict(_tensors(holder))
    with torch.no_grad():
        for name, tensor in (*loaded.items(), *drawn.items()):
            target[name].copy_(tensor)
    _thaw_as_saved(holder, document)


def save_pretrained(model: nn.Module, path: str | Path, **options: Any) -> None:
    """A converted Hugging Face model as its own library saves it, verified, with oelm.json beside config.json.

    It loads in plain transformers, without oelm, and gives equal logits. Add-ons have no place there: they are refused.
    Of a module that wraps such a model, the model inside is saved.
    """
    holder, record = _converted(model, "save_pretrained")
    saves = ((name, m) for name, m in holder.named_modules() if hasattr(type(m), "save_pretrained"))
    name, inner = next(saves, ("", None))
    if inner is None:
        raise MethodError(
            f"save_pretrained: {type(holder).__name__} is no Hugging Face model; use save_compact or its state_dict()"
        )
    if record.addons:
        raise MethodError(
            f"save_pretrained: plain transformers has no place for the add-ons {', '.join(record.variant.addons)}, "
            "and its logits would differ; use oelm.save_compact, or a variant without add-ons"
        )
    verify(holder)
    _save_with_record(inner, record.within(name, type(inner).__name__) if name else record, str(path), **options)


def write_record(model: nn.Module, folder: str | Path) -> None:
    """Write oelm.json into the folder of a full checkpoint, for `restore`."""
    holder, record = _converted(model, "write_record")
    write_json(Path(folder), _document(holder, record, "full", [], []))


def restore(model: nn.Module, path: str | Path) -> None:
    """After from_pretrained: freeze again what oelm.json in `path` records, once every frozen value has its hash."""
    path = Path(path)
    document, record = _read(path)
    if document.get("format") != "full":
        raise CheckpointError(f"{path}: is a compact checkpoint, without the drawn matrices; use oelm.load_compact")
    if record_of(model) is not None:
        raise MethodError("restore: the model is converted already; load a fresh one with from_pretrained")
    if record.addons:
        raise CheckpointError(f"{path}: the add-ons are not in a full checkpoint of another library; use save_compact")
    sites = _sites(model, record, path)
    for entry in record.entries:
        if entry.frozen and entry.name not in document["thawed"]:
            _compare(entry, _values(model, sites, entry, path), path)
    if record.variant.init == "slices":
        _check_slices(sites, record, path)
    _check_document(document, path)
    _convert(model, record, path)
    setattr(model, ATTRIBUTE, record)
    _thaw_as_saved(model, document)


def record_when_saving(model: nn.Module) -> None:
    """Make `model.save_pretrained` write oelm.json beside the weights, or say that plain transformers drops the add-ons.

    So whoever saves the model, Trainer and push_to_hub too, leaves a folder that `restore` understands.
    """
    if hasattr(type(model), "save_pretrained"):
        model.__dict__["save_pretrained"] = functools.partial(_own_save, model)  # survives deepcopy and pickle


def _own_save(model: nn.Module, save_directory: str | Path, *args: Any, **options: Any) -> Any:
    record = record_of(model)
    if record is not None and record.addons:
        warnings.warn(
            "this model has add-ons, which plain transformers will ignore on loading: its logits will differ; "
            "use oelm.save_compact to keep them",
            UserWarning,
            stacklevel=2,
        )
    return _save_with_record(model, record, save_directory, *args, **options)


def _save_with_record(model: Any, record: Record | None, folder: str | Path, *args: Any, **options: Any) -> Any:
    saved = type(model).save_pretrained(model, folder, *args, **options)
    first = options.get("is_main_process", True)
    if record is not None and not record.addons and first and Path(folder).is_dir():
        write_json(Path(folder), _document(model, record, "full", [], []))
    return saved


def _converted(model: nn.Module, what: str) -> tuple[nn.Module, Record]:
    holder, record = holder_of(model), record_of(model)
    if holder is None or record is None:
        raise MethodError(f"{what}: the model is not converted; call oelm.apply(model, variant) first")
    return holder, record


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and saved buffers under their own names; a tied one once."""
    found: list[tuple[str, Tensor]] = list(model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous().clone()  # a clone: safetensors refuses views that share memory


def _document(holder: nn.Module, record: Record, kind: str, left_out: list[str], files: list[Path]) -> dict[str, Any]:
    parameters = dict(holder.named_parameters())
    data = {"format": kind, "name": name_of(record.variant)} | record.to_dict()
    data["left_out"] = left_out
    data["thawed"] = [name for name in record.thawing if parameters[name].requires_grad]
    data["files"] = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
    data["checksum"] = checksum(data)
    return data


def _read(path: Path) -> tuple[dict[str, Any], Record]:
    file = path / RECORD
    if not file.is_file():
        raise CheckpointError(
            f"{path}: has no {RECORD}; give a folder that save_compact, or save_pretrained of a converted model, wrote"
        )
    try:
        if file.stat().st_size > MAX_RECORD_BYTES:
            raise CheckpointError(
                f"{file}: {file.stat().st_size:,} bytes is too large for a record; is it the right file?"
            )
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file}: is truncated or damaged (not JSON); use another copy") from None
    try:
        record = Record.from_dict(document)
        whole = all(
            isinstance(document[key], kind) for key, kind in (("left_out", list), ("thawed", list), ("files", dict))
        )
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file}: the record is damaged (left_out, thawed or files is missing); use another copy")
    return document, record


def _check_document(document: Mapping[str, Any], path: Path) -> None:
    """Last, so that a difference in what it records is named first."""
    if document.get("checksum") != checksum(document):
        raise CheckpointError(f"{path / RECORD}: its checksum differs, so it was edited or damaged; use another copy")


def _same_treatment(present: Record, record: Record, path: Path) -> None:
    if (present.variant, present.seed, present.pattern) != (record.variant, record.seed, record.pattern):
        raise CheckpointError(
            f"{path}: was saved with variant {name_of(record.variant)} and seed {record.seed}, the model has "
            f"{name_of(present.variant)} and seed {present.seed}; load into a fresh model"
        )


def _convert(model: nn.Module, record: Record, path: Path) -> None:
    try:
        convert(model, record.variant, record.pattern)
    except MethodError as error:
        raise CheckpointError(f"{path}: does not fit this {type(model).__name__}: {error}") from None


def _sites(model: nn.Module, record: Record, path: Path) -> dict[tuple[str, int], Site]:
    try:
        return {(site.stack, site.layer): site for site in find_sites(model, record.pattern)}
    except MethodError as error:
        raise CheckpointError(f"{path}: does not fit this {type(model).__name__}: {error}") from None


def _draw_again(skeleton: nn.Module, record: Record, document: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The values that the file leaves out, each with the hash it had when it was saved."""
    sites = _sites(skeleton, record, path)
    entries = {entry.name: entry for entry in record.entries}
    found = {}
    for name in document["left_out"]:
        entry = entries.get(name)
        site = sites.get((entry.stack, entry.layer)) if entry is not None else None
        if entry is None or site is None or not entry.regenerable:
            raise CheckpointError(
                f"{path}: {name} is left out of the file and cannot be drawn again here; use another copy"
            )
        value = _drawn(record, site, entry)
        if value is None or tuple(value.shape) != entry.shape:
            raise CheckpointError(f"{path}: {name} has another shape in this model ({entry.shape} in the file)")
        if digest(value) != entry.present:
            raise CheckpointError(
                f"{path}: {name} drawn again from seed {record.seed} has another hash than recorded; the file is from "
                f"another seed or damaged, or numpy differs (saved with {record.versions.get('numpy')})"
            )
        found[name] = value
    return found


def _drawn(record: Record, site: Site, entry: Entry) -> Tensor | None:
    """What the seed gives for one entry, in its dtype and layout."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    if entry.zeros:
        return torch.zeros(entry.shape, dtype=dtype)
    part, variant = site.parts[entry.role], record.variant
    rows = part.rows()
    if rows is None:
        return None
    values = matrices.draw(
        variant.init,
        site.heads(entry.role),
        site.head_dim,
        rows.shape[-1],
        seed=record.seed,
        stack=site.stack,
        layer=site.layer,
        role=entry.role,
        scope=variant.scope,
        gain=variant.gain,
        std=variant.std,
    )
    exact = torch.from_numpy(values).flatten(0, 1)
    cast = exact if dtype == torch.float64 else exact.float().to(dtype)
    return cast.t().contiguous() if part.transposed else cast


def _load_tensors(path: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    file = path / TENSORS
    recorded = document["files"].get(TENSORS)
    if not file.is_file() or not isinstance(recorded, Mapping):
        raise CheckpointError(f"{file}: is missing; copy the whole folder")
    size = file.stat().st_size
    if size != recorded.get("bytes"):
        raise CheckpointError(
            f"{file}: {size:,} bytes where {recorded.get('bytes')} were saved; truncated or replaced: use another copy"
        )
    if sha256(file) != recorded.get("sha256"):
        raise CheckpointError(
            f"{file}: its SHA-256 is not the recorded one; damaged or from another run: use another copy"
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: is not a safetensors file ({error}); use another copy") from None


def _check_fits(
    skeleton: nn.Module, record: Record, loaded: Mapping[str, Tensor], drawn: Mapping[str, Tensor], path: Path
) -> None:
    target = dict(_tensors(skeleton))
    given = {**loaded, **drawn}
    for name in target:
        if name not in given:
            raise CheckpointError(f"{path}: {name} is in the model and not in the file; build the model that was saved")
    for name, tensor in given.items():
        own = target.get(name)
        if own is None:
            raise CheckpointError(f"{path}: {name} is in the file and not in the model; build the model that was saved")
        if own.shape != tensor.shape or own.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)} in the file and {own.dtype} {tuple(own.shape)} "
                "in the model; build and cast the model as it was saved"
            )
    for entry in record.entries:
        if entry.frozen and entry.name in loaded and entry.name not in record.thawing:
            _compare(entry, loaded[entry.name], path)


def _compare(entry: Entry, value: Tensor, path: Path) -> None:
    kind = str(value.dtype).removeprefix("torch.")
    if kind != entry.dtype:
        raise CheckpointError(
            f"{path}: {entry.name} was saved as {entry.dtype} and is {kind} here; load it as {entry.dtype}"
        )
    if digest(value) != entry.present:
        raise FrozenWeightsChanged(
            f"{path}: {entry.name} is not what was frozen (its hash differs); load the weights of this folder, or another copy"
        )


def _values(model: nn.Module, sites: Mapping[tuple[str, int], Site], entry: Entry, path: Path) -> Tensor:
    """The present values of an entry in a model whose projections may still be fused."""
    if entry.role == "ffn":
        found = dict(model.named_parameters()).get(entry.name)
        if found is None:
            raise CheckpointError(f"{path}: {entry.name} is not in this model; build the model that was saved")
        return found.detach()
    site = sites.get((entry.stack, entry.layer))
    part = site.parts.get(entry.role) if site is not None else None
    whole = None if part is None else part.parameter if entry.kind == "weight" else part.bias
    if part is None or whole is None:
        raise CheckpointError(f"{path}: {entry.name} is not in this model; build the model that was saved")
    if part.layout is None:
        return whole.detach()
    if entry.kind == "bias":
        return part.layout.take(whole, entry.role).flatten().detach()
    rows = part.rows()
    assert rows is not None
    return rows.flatten(0, 1).detach()


def _check_slices(sites: Mapping[tuple[str, int], Site], record: Record, path: Path) -> None:
    counts: dict[str, int] = {}
    for stack, layer in sites:
        counts[stack] = max(counts.get(stack, 0), layer + 1)
    for (stack, layer), site in sites.items():
        if stack.endswith(".cross") and not record.variant.cross:
            continue
        if layer not in record.variant.layer_numbers(counts[stack]):
            continue
        for role in ("q", "k"):
            rows = site.parts[role].rows()
            assert rows is not None
            heads = site.heads(role)
            turn = record.variant.turn if role == "k" else 0
            expected = Slice(heads, site.head_dim, site.n_heads // heads, rows, False, turn=turn).weight
            if not torch.equal(rows.reshape(expected.shape), expected):
                raise FrozenWeightsChanged(
                    f"{path}: {site.parts[role].name} is not the slice that was saved; load the weights of this folder"
                )


def _thaw_as_saved(model: nn.Module, document: Mapping[str, Any]) -> None:
    parameters = dict(model.named_parameters())
    for name in document["thawed"]:
        if name in parameters:
            parameters[name].requires_grad_(True)
