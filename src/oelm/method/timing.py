"""How much of a training step's time freezing can save, measured where the model is.

Owns what is timed: the step as the variant makes it, the matrix products that it leaves out, and AdamW on what does not
train. Sums of parts, since the difference of two whole steps drowns in noise. Refuses models without values.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from oelm.errors import MethodError
from oelm.method.apply import convert
from oelm.method.flops import some_loss
from oelm.method.split import Slice
from oelm.method.thaw import param_groups
from oelm.method.variant import Variant, as_variant


LARGE = 2**26  # parameters that AdamW takes at memory's full speed


@dataclass(frozen=True)
class Timing:
    """A training step (forward, backward, AdamW), and what would come on top if everything trained."""

    device: str
    dtype: str
    length: int | None
    batch: int
    step_seconds: float
    products_seconds: float  # the weight gradients that the step leaves out; of slices, all three products
    optimizer_seconds: float  # AdamW on the parameters that it leaves out

    @property
    def saved_share(self) -> float:
        """Of a step in which everything trains: the most that a speed-up can be."""
        saved = self.products_seconds + self.optimizer_seconds
        return saved / (self.step_seconds + saved)


def timed(
    model: nn.Module,
    variant: Variant | str | Mapping[str, Any] | None,
    make: Callable[[int, int], Mapping[str, Tensor]],
    batch: int,
    length: int,
) -> Timing:
    """Time a copy of the model, converted by `variant` if one is given, on made-up inputs."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise MethodError("account: time is measured on values, and this model is on the meta device; build it first")
    live = copy.deepcopy(model).train()
    if variant is not None:
        convert(live, as_variant(variant))
    first = next(live.parameters())
    half = first.is_cuda and first.dtype == torch.float32  # what people train in there
    dtype = torch.bfloat16 if half else first.dtype
    arguments = {name: _real(value, first.device) for name, value in make(batch, length).items()}
    optimizer = torch.optim.AdamW(param_groups(live, lr=1e-9))

    def step() -> None:
        with torch.autocast(first.device.type, dtype) if half else nullcontext():
            loss = some_loss(live, arguments)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    # The generator that dropout draws from is the caller's: put back.
    with torch.random.fork_rng(devices=[first.device] if first.is_cuda else []):
        tokens = next((value.shape[0] * value.shape[1] for value in arguments.values() if value.dim() == 2), None)
        found = step_ceiling(live, step, tokens=tokens if tokens is not None else batch * length, dtype=dtype)
    return Timing(
        device=torch.cuda.get_device_name(first.device) if first.is_cuda else _cpu(),
        dtype=str(dtype).removeprefix("torch."),
        length=length,
        batch=batch,
        step_seconds=found["step_seconds"],
        products_seconds=found["weight_gradient_seconds"],
        optimizer_seconds=found["optimizer_seconds"],
    )


def step_ceiling(
    model: nn.Module,
    step: Callable[[], object],
    *,
    tokens: int,
    dtype: torch.dtype | None = None,
    replayed: bool = False,
) -> dict[str, float]:
    """The share of a step's time that freezing can save, measured where the model is.

    `step` runs one training step of the converted model on `tokens` tokens; `dtype` is that of its products;
    `replayed`: the step is a CUDA graph, so that what it leaves out is timed as one too, without the host's time. A
    speed-up claimed far above `share` is a fault of measurement.
    """
    products, adamw = left_out(model, tokens, dtype or next(model.parameters()).dtype, replayed=replayed)
    whole = _seconds(step)
    return {
        "step_seconds": whole,
        "weight_gradient_seconds": products,
        "optimizer_seconds": adamw,
        "share": (products + adamw) / (whole + products + adamw),
    }


def left_out(model: nn.Module, tokens: int, dtype: torch.dtype, *, replayed: bool = False) -> tuple[float, float]:
    """Seconds of the products, and of AdamW, that a step on so many tokens leaves out because of what is frozen.

    A frozen matrix costs no weight gradient, one product for each module that holds it; a slice costs none of three.
    Where q, k and v are one product, the step is spared what that takes beyond the product of those that train.
    """
    seconds = 0.0
    for (rows, columns, device), count in _products(model).items():
        grad, x = (torch.randn(tokens, n, device=device, dtype=dtype) for n in (rows, columns))
        seconds += count * _seconds(lambda grad=grad, x=x: grad.t() @ x, replayed)  # type: ignore[misc]
    seconds = max(0.0, seconds)  # differences of small times
    twins = [torch.zeros_like(p, requires_grad=True) for p in model.parameters() if not p.requires_grad]
    twins += [
        torch.zeros(m.out_features, m.in_features, dtype=m.like.dtype, device=m.like.device, requires_grad=True)
        for m in model.modules()
        if isinstance(m, Slice)
    ]
    if not twins:
        return seconds, 0.0
    if replayed:
        return seconds, _adamw_share(sum(twin.numel() for twin in twins), twins[0])
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    return seconds, _seconds(torch.optim.AdamW(twins).step)


def _products(model: nn.Module) -> Counter[tuple[int, int, torch.device]]:
    """How often a product of (rows, columns) is left out; less than nothing for what a fused one still computes."""
    products: Counter[tuple[int, int, torch.device]] = Counter()
    fused: set[int] = set()
    for module in model.modules():
        if getattr(module, "fused", False) is True:
            parts = [getattr(module, role, None) for role in ("q", "k", "v")]
            fused |= {id(part) for part in parts if part is not None}
            _count_fused(products, [part for part in parts if isinstance(part, nn.Linear | Slice)])
        elif isinstance(module, Slice) and id(module) not in fused:
            products[module.out_features, module.in_features, module.like.device] += 3
        elif not isinstance(module, nn.Embedding) and id(module) not in fused:
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.requires_grad and parameter.ndim == 2:
                    products[parameter.shape[0], parameter.shape[1], parameter.device] += 1
    return products


def _count_fused(products: Counter[tuple[int, int, torch.device]], parts: list[nn.Linear | Slice]) -> None:
    """One product of all parts, each matrix once, less one of those that train."""
    matrices = {id(part.weight) if isinstance(part, nn.Linear) else id(part): part for part in parts}
    slices = [part for part in parts if isinstance(part, Slice)]
    trained = [part for part in matrices.values() if isinstance(part, nn.Linear) and part.weight.requires_grad]
    if len(trained) == len(matrices):
        return
    times, width, device = (3 if slices else 1), parts[0].in_features, parts[-1].weight.device
    products[sum(part.out_features for part in matrices.values()), width, device] += times
    if trained:
        products[sum(part.out_features for part in trained), width, device] -= times


def _adamw_share(count: int, like: Tensor) -> float:
    """Seconds of so many parameters' part of one AdamW over very many."""
    flat = torch.zeros(max(count, LARGE), dtype=like.dtype, device=like.device, requires_grad=True)
    flat.grad = torch.zeros_like(flat)
    step = torch.optim.AdamW([flat], fused=True, capturable=True).step
    return _seconds(step, replayed=True) * count / flat.numel()


def _real(value: Tensor, device: torch.device) -> Tensor:
    """A made-up input with values: token 0, or noise for images and sound."""
    if value.is_floating_point():
        return torch.randn(value.shape, dtype=value.dtype, device=device)
    return torch.zeros(value.shape, dtype=value.dtype, device=device)


def _cpu() -> str:
    threads = torch.get_num_threads()
    return "one CPU thread" if threads == 1 else f"{threads} CPU threads"


def _seconds(call: Callable[[], object], replayed: bool = False) -> float:
    """The median time of a call, or of the graph that it makes; torch's timer warms up and waits for the device."""
    if replayed:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    return float(Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.1).median)
