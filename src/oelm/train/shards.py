"""Checkpoints of sharded models: DCP writes each rank's part as safetensors, any number of processes reads it whole.

No pickled metadata: the storage is DCP's safetensors one, whose headers say which part of which tensor a file holds.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def write_shards(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Called by every rank; files `<name>.shard-...safetensors` appear in the folder."""
    place = folder / f".{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            {key: tensor.detach() for key, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True, enable_consolidation=False),
        )
    dist.barrier()
    if dist.get_rank() == 0:
        for file in sorted(place.iterdir()):
            if file.suffix == ".safetensors":
                os.rename(file, folder / f"{name}.{file.name}")
            else:
                file.unlink()
        place.rmdir()


def read_shards(files: Sequence[Path]) -> dict[str, Tensor]:
    """Whole tensors out of all shards; the caller has verified the files."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in files:  # DCP reads a folder of one set
            os.symlink(file.absolute(), Path(place) / file.name.partition(".")[2])
        metadata = HuggingFaceStorageReader(place).read_metadata().state_dict_metadata
        whole: dict[str, Tensor] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(whole, storage_reader=HuggingFaceStorageReader(place), no_dist=True)
    return whole
