"""Where a run computes: one process or the ranks of torchrun, under DDP or FSDP2. Nothing home-made about communication.

Every rank reads the same run and takes the same decisions; the first one holds the folder and writes.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oelm.errors import ConfigError, MachineError, OelmError


STYLES = ("ddp", "fsdp")
AGREE_EVERY = 8  # steps of a GPU between two questions whether any rank was asked to stop; each makes the host wait
PATIENCE = dt.timedelta(minutes=30)  # of a collective: one rank may be saving or compiling


def pick_device(wanted: str) -> torch.device:
    """The device asked for; auto: this process's GPU, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted == "auto":
        wanted = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"device {wanted!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {wanted!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(f"device {wanted!r}: there is no CUDA device here; use --device cpu")
    index = local if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise MachineError(f"device {wanted!r}: there are {torch.cuda.device_count()} CUDA devices; use a lower number")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def lost_process(error: BaseException, world: World) -> OelmError | None:
    """The one line for a collective that failed because another rank died."""
    words = ("peer", "connection", "gloo", "nccl", "timed out", "timeout")
    if world.size == 1 or not isinstance(error, RuntimeError) or not any(w in str(error).lower() for w in words):
        return None
    return MachineError(
        f"rank {world.rank} of {world.size}: another process of this run was lost; run the same command again to continue"
    )


class World:
    """The processes of one run."""

    def __init__(self, device: torch.device, style: str = "ddp") -> None:
        if style not in STYLES:
            raise ConfigError(f"parallel {style!r}: use ddp or fsdp")
        self.device = device
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.sharded = style == "fsdp" and self.size > 1
        self._opened = False

    def __enter__(self) -> World:
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=PATIENCE)
            self._opened = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    # -- the model

    def shard(self, model: nn.Module) -> None:
        """Under FSDP2: every block of the model on its own, then the rest."""
        if not self.sharded:
            return
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters()):
                for block in module:
                    fully_shard(block)
                break
        fully_shard(model)

    def wrap(self, task: nn.Module) -> nn.Module:
        """The module of model and loss as the ranks train it; to be wrapped anew after a thaw."""
        if self.size == 1 or self.sharded:
            return task
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(task, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def quiet(self, task: nn.Module, *, quiet: bool) -> AbstractContextManager[Any]:
        """Inside: the gradients of a part that is not the last are not exchanged yet."""
        if quiet and self.size > 1 and not self.sharded:
            return cast("AbstractContextManager[Any]", cast(Any, task).no_sync())
        return nullcontext()

    # -- agreement

    def agree(self, asked: bool, step: int) -> bool:
        """Whether any rank was asked to stop: all ranks stop at one step."""
        if self.size == 1:
            return asked
        due = self.device.type == "cpu" or step % AGREE_EVERY == 0
        return due and self.sum(int(asked)) > 0

    def total(self, value: int) -> int | Tensor:
        """A whole number, summed over the ranks; on a GPU the host does not wait for it."""
        if self.size == 1:
            return value
        tensor = torch.full((), value, device=self.device)
        dist.all_reduce(tensor)
        return tensor

    def sum(self, value: int) -> int:
        """The same, waited for."""
        return int(self.total(value))

    def mean(self, tensor: Tensor) -> Tensor:
        """A tensor's mean over the ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor / self.size

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def told(self, text: str) -> str:
        """The first rank's text, on every rank."""
        if self.size == 1:
            return text
        raw = torch.zeros(256, dtype=torch.uint8, device=self.device)
        if self.first:
            code = text.encode()
            raw[: len(code)] = torch.tensor(list(code), dtype=torch.uint8)
        dist.broadcast(raw, 0)
        return bytes(raw.tolist()).rstrip(b"\0").decode()

    # -- what a checkpoint holds

    def random_states(self) -> dict[str, Tensor]:
        """The states of every rank's random generators."""
        mine = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(self.device)
        found = {}
        for kind, state in mine.items():
            for rank, each in enumerate(self._gathered(state)):
                found[f"rng|{kind}|{rank}"] = each
        return found

    def restore_random_states(self, tensors: dict[str, Tensor]) -> None:
        """This rank's states back; on another number of ranks the first one's serve those that have none."""
        for kind, put in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
            state = tensors.get(f"rng|{kind}|{self.rank}")
            if state is not None and (kind == "cpu" or self.device.type == "cuda"):
                put(state)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [tensor]
        here = tensor.to(self.device)
        parts = [torch.empty_like(here) for _ in range(self.size)]
        dist.all_gather(parts, here)
        return [part.cpu() for part in parts]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return cast(Tensor, full()) if full is not None else tensor


def put(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be sharded."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None:
        target.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    sharded = distribute_tensor(value.to(cast(Any, target).device), mesh, cast(Any, target).placements)
    target.copy_(sharded)


def stored(model: nn.Module, skip: Collection[str] = ()) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: every parameter once, and the buffers that persist.

    Not the state dict: that of a converted model has its family's fused projections again.
    """
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if name not in skip}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
