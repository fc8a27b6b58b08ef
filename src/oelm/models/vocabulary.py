"""The loss over the vocabulary from features and the head's matrix, without a float32 copy of all logits.

Owns one function, `vocabulary_loss`, and its plain form, to which every faster form must be equal. Refuses metrics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.models.fused import fused_vocabulary_loss, usable


IGNORED = -100
CHUNK_LOGITS = 2**25  # logits of one chunk: 128 MiB in float32


def plain_vocabulary_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of -log p(target) in nats over all targets that are not -100: the definition."""
    logits = F.linear(hidden, weight).flatten(0, -2).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def vocabulary_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same sum, a few rows of logits at a time; the gradients are made in the forward pass, while the logits exist.

    hidden (..., width), weight (vocab, width), targets (...) with -100 where none. A float32 scalar.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    grad = torch.is_grad_enabled()
    if grad and usable(hidden, dtype):
        return fused_vocabulary_loss(hidden.flatten(0, -2).to(dtype), weight.to(dtype), targets.flatten())
    nats: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2).to(dtype),
        weight.to(dtype),
        targets.flatten(),
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return nats


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, hidden_trains: bool, weight_trains: bool
    ) -> Tensor:
        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden: list[Tensor] = []
        grad_weight: Tensor | None = None
        for part, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            valid = wanted != IGNORED
            index = wanted.clamp(min=0)[:, None]
            logs = torch.log_softmax(F.linear(part, weight), dim=-1, dtype=torch.float32)
            nats = nats - (logs.gather(1, index)[:, 0] * valid).sum()
            if hidden_trains or weight_trains:
                slope = logs.exp_().scatter_add_(1, index, logs.new_full((), -1.0).expand_as(index))
                slope = (slope * valid[:, None]).to(hidden.dtype)
                if hidden_trains:
                    grad_hidden.append(slope @ weight)
                if weight_trains:
                    found = slope.t() @ part
                    grad_weight = found.float() if grad_weight is None else grad_weight.add_(found)
        ctx.save_for_backward(torch.cat(grad_hidden) if grad_hidden else None, grad_weight)
        ctx.dtype = weight.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if by_hidden is None else (by_hidden * scale).to(by_hidden.dtype),
            None if by_weight is None else (by_weight * scale).to(ctx.dtype),
            None,
            None,
            None,
        )
