"""When frozen layers begin to train, and which parameter gets which learning rate.

Owns thaw schedules (what is frozen is a function of the step alone, so a resumed run is right at once) and the groups
for an optimiser, which hold everything that trains or will thaw from the start. Refuses to add groups later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oelm.errors import ConfigError, MethodError
from oelm.method.projections import find_sites
from oelm.method.record import Record, clean_name, holder_of, named_parameters, record_of
from oelm.method.variant import Thaw


class Schedule:
    """What thaws at which step. `step(n)` before step n's forward pass is all a training loop needs.

    After a step that changed something: capture graphs anew, and wrap anew under DistributedDataParallel (`rewrap`);
    under FSDP2's fully_shard nothing else is needed.
    """

    def __init__(self, model: nn.Module, total_steps: int | None = None) -> None:
        record, holder = record_of(model), holder_of(model)
        if record is None or holder is None:
            raise MethodError("schedule: the model is not converted; call oelm.apply(model, variant) first")
        if total_steps is not None and not (_is_whole(total_steps) and total_steps >= 1):
            raise ConfigError(f"schedule: total_steps must be a whole number above 0, got {total_steps!r}")
        self._model = holder
        self._boundaries = _boundaries(record, total_steps)

    def boundaries(self) -> dict[int, list[str]]:
        """The parameters that thaw at each step, in order; empty without a thaw."""
        return {step: list(names) for step, names in self._boundaries.items()}

    def due(self, n: int) -> list[str]:
        """The names of all parameters that have thawed when step n runs (steps count from 0)."""
        return [name for step, names in self._boundaries.items() if step <= n for name in names]

    def step(self, n: int) -> list[str]:
        """Set what trains at step n; the names that changed. Calling it again, or after a resume, is safe."""
        if not _is_whole(n):
            raise ConfigError(f"schedule: the step must be a whole number, got {n!r}")
        due = set(self.due(n))
        parameters = named_parameters(self._model)
        changed = []
        for name in (name for names in self._boundaries.values() for name in names):
            parameter = parameters[name]
            if parameter.requires_grad != (name in due):
                parameter.requires_grad_(name in due)
                parameter.grad = None
                changed.append(name)
        if changed:
            torch._dynamo.reset()  # torch before 2.13 keeps its graph and silently ignores a thaw
        return changed


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's count too


def schedule(model: nn.Module, total_steps: int | None = None) -> Schedule:
    """The thaw schedule of a converted model; fractions of the budget need `total_steps`."""
    return Schedule(model, total_steps)


def rewrap(model: DistributedDataParallel, **options: Any) -> DistributedDataParallel:
    """The same module in a new DistributedDataParallel: to be called after each thaw.

    The reducer is built from what trains when it is made; without this, thawed gradients are silently not averaged.
    `options` are those the first wrapping had, but for the devices, which are kept.
    """
    for name in ("device_ids", "output_device"):
        options.setdefault(name, getattr(model, name))
    return DistributedDataParallel(model.module, **options)


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.01,
    layer_decay: float = 1.0,
    no_decay: Callable[[str, Tensor], bool] | None = None,
) -> list[dict[str, Any]]:
    """Groups for any torch optimiser: all that trains or will thaw, never what is frozen for good, nothing twice.

    The rate of layer l of L is lr * layer_decay ** (L - l): the embeddings (l = -1) get the lowest, the head (l = L)
    gets lr; each stack of an encoder-decoder counts its own layers. `no_decay(name, parameter)` says what weight decay
    leaves alone: by default everything with fewer than two dimensions, embeddings' tables not among them. The scalars
    of add-ons never decay: their neutral value is not 0.
    """
    _positive("lr", lr)
    _positive("layer_decay", layer_decay)
    if layer_decay > 1:
        raise ConfigError(f"param_groups: layer_decay must be at most 1, got {layer_decay!r}")
    if not (isinstance(weight_decay, int | float) and math.isfinite(weight_decay) and weight_decay >= 0):
        raise ConfigError(f"param_groups: weight_decay must be 0 or more, got {weight_decay!r}")
    thawing = _thawing(model)
    spared = no_decay if no_decay is not None else _is_vector
    depth = _depths(model) if layer_decay < 1 else _flat
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for marked, parameter in model.named_parameters():  # a tied parameter comes once, under its first name
        name = clean_name(marked)
        if parameter.requires_grad or id(parameter) in thawing:
            decays = not (_is_addon(name) or spared(name, parameter))
            groups.setdefault((depth(name), decays), []).append(parameter)
    if not groups:
        raise MethodError("param_groups: nothing trains and nothing will thaw; check the variant and requires_grad")
    return [
        {
            "params": parameters,
            "lr": lr * layer_decay**below,
            "weight_decay": weight_decay if decays else 0.0,
            "name": f"{below} below the head, {'decayed' if decays else 'not decayed'}",
        }
        for (below, decays), parameters in sorted(groups.items(), key=lambda item: (-item[0][0], not item[0][1]))
    ]


def _positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"param_groups: {what} must be a number above 0, got {value!r}")


def _is_vector(name: str, parameter: Tensor) -> bool:
    return parameter.ndim < 2


def _is_addon(name: str) -> bool:
    return ".addons." in f".{name}"


def _thawing(model: nn.Module) -> set[int]:
    record, holder = record_of(model), holder_of(model)
    if record is None or holder is None:
        return set()
    parameters = named_parameters(holder)
    return {id(parameters[name]) for name in record.thawing}


def _boundaries(record: Record, total_steps: int | None) -> dict[int, list[str]]:
    """Steps in order, with the names that thaw at each; layers of several stacks thaw side by side."""
    thaw = record.variant.thaw
    if thaw is None:
        return {}
    start, end = (_as_step(value, thaw, total_steps) for value in (thaw.start, thaw.end))
    layers: dict[int, list[str]] = {}
    for name, layer in record.thawing.items():
        layers.setdefault(layer, []).append(name)
    order = sorted(layers, reverse=thaw.order == "top-down")
    found: dict[int, list[str]] = {}
    for rank, layer in enumerate(order):
        share = 0.0 if thaw.order == "at-once" or len(order) == 1 else rank / (len(order) - 1)
        found.setdefault(start + round((end - start) * share), []).extend(layers[layer])
    return found


def _as_step(value: int | float, thaw: Thaw, total_steps: int | None) -> int:
    if isinstance(value, int):
        return value
    if total_steps is None:
        raise ConfigError(
            f"schedule: the thaw from {thaw.start} to {thaw.end} is in fractions of the budget; "
            "give total_steps, or write whole steps in the variant"
        )
    return round(value * total_steps)


_EMBEDDING = re.compile(r"(^|\.)\w*embed(ding)?s?(\.|$)")


def _flat(name: str) -> int:
    return 0


def _depths(model: nn.Module) -> Callable[[str], int]:
    """How many layers below the head a parameter is, by its name: 0 for the head, L + 1 for the embeddings."""
    stacks = _stacks(model)
    bottom = max(stacks.values()) + 1
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tables = {clean_name(name) for name in tables}
    names = list(named_parameters(model))
    inside = [any(name.startswith(f"{stack}.") for stack in stacks) for name in names]
    early = set(names[: inside.index(True)])

    def depth(name: str) -> int:
        for stack, count in stacks.items():
            if name.startswith(f"{stack}."):
                return count - int(name[len(stack) + 1 :].split(".", 1)[0])
        owner = name.rpartition(".")[0]
        return bottom if name in early or owner in tables or _EMBEDDING.search(owner) else 0

    return depth


def _stacks(model: nn.Module) -> dict[str, int]:
    """The lists of blocks that hold attention, by the path of each list, with their lengths."""
    record = record_of(model)
    blocks = {clean_name(site.block) for site in find_sites(model, record.pattern if record is not None else None)}
    found: dict[str, int] = {}
    for block in blocks:
        stack, _, number = block.rpartition(".")
        if number.isdigit():
            found[stack] = max(found.get(stack, 0), int(number) + 1)
    if not found:
        raise MethodError("param_groups: layer_decay needs a list of blocks with attention, and none was found")
    return found
