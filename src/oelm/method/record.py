"""What was done to a model, kept on it as `model._oelm`: the variant, the seed, and a hash of every treated parameter.

Owns the record's form (JSON-able), digests of tensors, and `verify`. Refuses to repair: a difference is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oelm.errors import CheckpointError, FrozenWeightsChanged, MethodError
from oelm.method.variant import Variant


SCHEMA = 1
ATTRIBUTE = "_oelm"
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter that the variant drew, tied or froze."""

    name: str  # as in model.named_parameters() after apply
    role: str  # q, k, v, ffn
    kind: str  # weight or bias
    stack: str
    layer: int
    shape: tuple[int, ...]
    dtype: str
    frozen: bool  # at step 0
    drawn: str | None  # digest of the float32 that a fresh draw gives; None: the values were there before
    present: str | None  # digest of the values as they are in the model after apply; None on the meta device
    tied: bool = False  # k: the same Parameter as q's
    zeros: bool = False  # a bias that a fresh draw set to 0

    @property
    def regenerable(self) -> bool:
        """Whether the seed alone gives these values again."""
        return self.drawn is not None or self.zeros


@dataclass(kw_only=True)
class Record:
    """What `apply` did, enough to do it again and to check it."""

    variant: Variant
    seed: int
    model: str
    families: tuple[str, ...]
    entries: tuple[Entry, ...]
    versions: dict[str, str]
    pattern: dict[str, Any] | None = None
    addons: tuple[str, ...] = ()  # names of the parameters that add-ons brought
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that are frozen at step 0."""
        return tuple(e.name for e in self.entries if e.frozen and not e.tied)

    @property
    def thawing(self) -> dict[str, int]:
        """Names that will thaw, with their layer."""
        if self.variant.thaw is None:
            return {}
        return {e.name: e.layer for e in self.entries if e.frozen and not e.tied}

    @property
    def frozen_for_good(self) -> tuple[str, ...]:
        return () if self.variant.thaw is not None else self.frozen

    @property
    def regenerable(self) -> tuple[str, ...]:
        """Names of frozen parameters that the seed alone gives again: what a compact checkpoint leaves out."""
        return tuple(e.name for e in self.entries if e.frozen and not e.tied and e.regenerable)

    def entry(self, name: str) -> Entry:
        return next(e for e in self.entries if e.name == name)

    def within(self, path: str, model: str) -> Record:
        """The same record with names as the module at `path` knows them."""
        entries = tuple(replace(e, name=e.name.removeprefix(f"{path}.")) for e in self.entries)
        return replace(self, model=model, entries=entries)

    def digest(self) -> str:
        """One hash over every frozen parameter as it was at apply."""
        text = "\n".join(f"{e.name} {e.present}" for e in self.entries if e.frozen and not e.tied)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "schema": SCHEMA,
            "variant": self.variant.to_dict(),
            "seed": self.seed,
            "model": self.model,
            "families": list(self.families),
            "pattern": self.pattern,
            "versions": dict(self.versions),
            "addons": list(self.addons),
            "entries": [asdict(e) | {"shape": list(e.shape)} for e in self.entries],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """The record that `to_dict` gave; anything else is a CheckpointError."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise CheckpointError(f"not a record of oelm (schema {SCHEMA}); was the file written by another version?")
        try:
            return cls(
                variant=Variant.from_dict(data["variant"]),
                seed=int(data["seed"]),
                model=str(data["model"]),
                families=tuple(data["families"]),
                entries=tuple(Entry(**(dict(e) | {"shape": tuple(e["shape"])})) for e in data["entries"]),
                versions=dict(data["versions"]),
                pattern=data["pattern"],
                addons=tuple(data["addons"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the record is damaged ({type(error).__name__}: {error}); use another copy"
            ) from None


def versions() -> dict[str, str]:
    """What the bits of a draw may depend on, and this package."""
    found = {"torch": str(torch.__version__), "numpy": np.__version__}
    try:
        found["oelm"] = version("oelm")
    except PackageNotFoundError:
        found["oelm"] = "unknown"
    return found


def record_of(model: nn.Module) -> Record | None:
    """The record of a converted model, seen through DDP, torch.compile and modules that hold the model."""
    holder = holder_of(model)
    return None if holder is None else getattr(holder, ATTRIBUTE)


def holder_of(model: nn.Module) -> nn.Module | None:
    """The module that `apply` was called on: the model itself or, in a wrapper, one inside it."""
    return next((m for m in model.modules() if isinstance(m.__dict__.get(ATTRIBUTE), Record)), None)


def clean_name(name: str) -> str:
    """A parameter's name without the marks of torch.compile and activation checkpointing."""
    return ".".join(p for p in name.split(".") if p not in ("_orig_mod", "_checkpoint_wrapped_module"))


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name a parameter has, tied ones included, without the marks of wrappers."""
    return {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes; a sharded tensor is gathered first."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    tensor = tensor.cpu().contiguous()
    header = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} ".encode()
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    found = hashlib.sha256(header)
    found.update(flat.numpy().data)
    return found.hexdigest()


def verify(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise FrozenWeightsChanged if a frozen parameter moved, would train, or is gone.

    With an optimiser: also if it holds what is frozen for good, or lacks what trains or will thaw. A parameter that
    has thawed is not compared.
    """
    holder = holder_of(model)
    if holder is None:
        raise MethodError("verify: the model is not converted; call oelm.apply(model, variant) first")
    record: Record = getattr(holder, ATTRIBUTE)
    parameters = named_parameters(holder)
    thawing = record.thawing
    for entry in record.entries:
        if not entry.frozen:
            continue
        parameter = parameters.get(entry.name)
        if parameter is None:
            raise FrozenWeightsChanged(f"{entry.name}: the model has no such parameter any more; convert a fresh model")
        if parameter.requires_grad:
            if entry.name in thawing or (entry.tied and thawing):
                continue
            raise FrozenWeightsChanged(
                f"{entry.name}: is frozen by the variant but requires_grad is True; "
                "freezing is lost by from_pretrained and by requires_grad_(): call oelm.restore or apply again"
            )
        _compare(entry, parameter)
    if optimizer is not None:
        _verify_optimizer(model, holder, record, optimizer)


def _compare(entry: Entry, parameter: Tensor) -> None:
    if entry.present is None or parameter.is_meta:
        return
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype != entry.dtype:
        raise FrozenWeightsChanged(
            f"{entry.name}: was {entry.dtype} at apply and is {dtype} now; cast the model first, then apply"
        )
    if digest(parameter) != entry.present:
        raise FrozenWeightsChanged(
            f"{entry.name}: the frozen values are not those of apply; "
            "something wrote to them: load the right checkpoint or apply to a fresh model"
        )


def _verify_optimizer(model: nn.Module, holder: nn.Module, record: Record, optimizer: torch.optim.Optimizer) -> None:
    parameters = named_parameters(holder)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name in record.frozen_for_good:
        if id(parameters[name]) in held:
            raise FrozenWeightsChanged(
                f"{name}: is frozen for good but the optimiser holds it; build the optimiser from oelm.param_groups"
            )
    thawing = record.thawing
    whole = {} if holder is model else {n: p for n, p in named_parameters(model).items() if p.requires_grad}
    for name, parameter in (parameters | whole).items():
        if (parameter.requires_grad or name in thawing) and id(parameter) not in held:
            why = "will thaw" if name in thawing else "trains"
            raise FrozenWeightsChanged(
                f"{name}: {why} but the optimiser does not hold it; build it from oelm.param_groups after apply"
            )
