"""Where a run computes: one process or the ranks of torchrun, under DDP or FSDP2. Nothing home-made about communication."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oelm.errors import ConfigError, MachineError


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
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise MachineError(f"device {wanted!r}: there is no CUDA device here; use --device cpu")
        index = local if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise MachineError(
                f"device {wanted!r}: there are {torch.cuda.device_count()} CUDA devices; use a lower number"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


class World:
    """The processes of one run."""

    def __init__(self, device: torch.device, style: str = "ddp") -> None:
        self.device = device
        self.style = style
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._opened = False

    def __enter__(self) -> World:
        if self.style not in ("ddp", "fsdp"):
            raise ConfigError(f"parallel {self.style!r}: use ddp or fsdp")
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._opened = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the ranks train it."""
        if self.size == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def quiet(self, model: nn.Module, *, quiet: bool) -> AbstractContextManager[Any]:
        """Inside: gradients of a part that is not the last are not yet exchanged."""
        if self.size > 1 and quiet and hasattr(model, "no_sync"):
            return cast("AbstractContextManager[Any]", model.no_sync())
        return nullcontext()

    def sum(self, value: int) -> int:
        """A whole number, summed over the ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor)
        return int(tensor)

    def mean(self, tensor: Tensor) -> Tensor:
        """A tensor's mean over the ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor / self.size

    def whole(self, tensor: Tensor) -> Tensor:
        """A sharded scalar made whole."""
        full = getattr(tensor, "full_tensor", None)
        return cast("Tensor", full()) if full is not None else tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()
