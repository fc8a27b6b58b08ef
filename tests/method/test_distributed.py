"""Two processes (gloo, CPU): after every thaw the gradients are those of one process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oelm
from oelm.method.thaw import rewrap
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape


WORLD, STEPS = 2, 5
KINDS = ("ddp", "ddp-addons", "ddp-unaware", "fsdp2", "fsdp2-addons")
ADDONS = ("shift-keys", "head-gain")
THAW = oelm.Thaw(order="top-down", start=1, end=3)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def model(addons: tuple[str, ...] = ()) -> GPT:
    made = GPT(Shape(width=16, layers=2, heads=2, hidden=32, vocab=50, context=8, dropout=0.0), seed=1).double()
    oelm.apply(made, oelm.Variant(thaw=THAW, addons=addons), seed=2)
    return made


def batch(step: int) -> Tensor:
    return torch.randint(50, (2 * WORLD, 8), generator=torch.Generator().manual_seed(step))


class Loss(nn.Module):
    """The whole step's forward in one module, so that a wrapper sees all of it."""

    def __init__(self, inner: GPT) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.logits(self.inner(x)).square().mean()


def whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def train(wrapped: nn.Module, inner: nn.Module, rank: int | None, again: Any = None) -> list[dict[str, Tensor | None]]:
    """The gradients of every step, by the parameters' own names."""
    plan = oelm.schedule(inner)
    optimizer = torch.optim.AdamW(oelm.param_groups(inner, lr=1e-2))
    found = []
    for step in range(STEPS):
        if plan.step(step) and again is not None:
            wrapped = again(wrapped)
        x = batch(step)
        wrapped(x if rank is None else x[2 * rank : 2 * rank + 2]).backward()
        found.append({n: whole(p.grad) for n, p in inner.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    oelm.verify(inner, optimizer)
    return found


def work(rank: int, port: int, folder: str) -> None:
    import os

    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        torch.save({kind: one(kind, rank, Path(folder)) for kind in KINDS}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def one(kind: str, rank: int, folder: Path) -> list[dict[str, Tensor | None]]:
    """One kind of training in this process."""
    inner = model(ADDONS if kind.endswith("addons") else ())
    loss = Loss(inner)
    if kind.startswith("ddp"):
        wrapped = nn.parallel.DistributedDataParallel(loss)
        return train(wrapped, inner, rank, None if kind == "ddp-unaware" else rewrap)
    from torch.distributed.fsdp import fully_shard

    for block in inner.blocks:
        fully_shard(block)
    fully_shard(loss)
    found = train(loss, inner, rank)
    oelm.save_compact(inner, folder / kind)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[dict[str, Tensor | None]]]]]:
    """What both processes found, for every kind: started once, since starting costs the most."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, str(folder)), nprocs=WORLD)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def single(addons: tuple[str, ...] = ()) -> list[dict[str, Tensor | None]]:
    inner = model(addons)
    return train(Loss(inner), inner, None)


def agree(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    def one(x: Tensor | None, y: Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return torch.allclose(x, y, rtol=0, atol=1e-12)

    return a.keys() == b.keys() and all(one(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind", ["ddp", "ddp-addons", "fsdp2", "fsdp2-addons"])
def test_gradients_after_each_thaw_equal_those_of_one_process(kind: str, ranks: Any) -> None:
    expected = single(ADDONS if kind.endswith("addons") else ())
    flags = [sum(g is not None for g in step.values()) for step in expected]
    assert flags[0] < flags[1] == flags[2] < flags[3]
    for rank in ranks[1]:
        assert all(agree(a, b) for a, b in zip(rank[kind], expected, strict=True))


def test_without_a_new_wrapping_thawed_gradients_are_not_averaged(ranks: Any) -> None:
    """Why `rewrap` is needed: no error, other gradients."""
    expected = single()
    found = [rank["ddp-unaware"] for rank in ranks[1]]
    name = "blocks.1.attn.q.weight"
    assert all(agree(rank[0], expected[0]) for rank in found)
    assert not torch.allclose(found[0][1][name], expected[1][name])


def test_sharded_models_are_saved_whole(ranks: Any) -> None:
    fresh = model()
    oelm.load_compact(fresh, ranks[0] / "fsdp2")
    oelm.verify(fresh)
