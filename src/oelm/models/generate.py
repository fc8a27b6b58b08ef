"""Text from a language model, one token at a time, with a cache of what has been read.

Owns sampling (temperature, top-k, top-p) from a private generator, so that one seed gives one text. Refuses training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from oelm.errors import ConfigError
from oelm.values import Value


class Sampling(Value):
    """How the next token is chosen; temperature 0 takes the most probable one."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


def allowed(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits (B, vocab) over the temperature, -inf for tokens that top-k and top-p leave out."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        before = shares.cumsum(dim=-1) - shares  # the token that crosses top_p stays
        out = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(out, float("-inf"))
    return logits


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token (B,) for each row of logits (B, vocab); drawn on the CPU, so that devices agree."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    shares = allowed(logits.cpu(), sampling).softmax(dim=-1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    tokens: int,
    sampling: Sampling | None = None,
    stop: int | None = None,
    context: int | None = None,
) -> Iterator[Tensor]:
    """The next `tokens` tokens after `prompt` (B, T), each (B,), until all rows have said `stop`.

    A model with learned positions ends at its context: the latter half is then read again from position 0, and
    generation goes on. `context` sets that limit for models that do not say it.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ConfigError("the prompt has no token; give at least one")
    if tokens < 1:
        raise ConfigError(f"tokens = {tokens}: must be at least 1")
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(sampling.seed)
    limit = context or longest(model)
    training = model.training
    model.eval()
    try:
        yield from _continue(model, prompt, tokens, sampling, generator, stop, limit)
    finally:
        model.train(training)


def longest(model: Any) -> int | None:
    """The most tokens that the model can read; None where its positions have no end."""
    shape = getattr(model, "shape", None)
    if shape is not None:
        return int(shape.context) if shape.positions == "learned" else None
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return None if found is None else int(found)


def _continue(
    model: Any,
    prompt: Tensor,
    tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None,
    limit: int | None,
) -> Iterator[Tensor]:
    history = prompt if limit is None else prompt[:, -limit:]
    cache, unread = model.new_cache(), history
    stopped = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for _ in range(tokens):
        if limit is not None and history.shape[1] > limit:
            history = history[:, -max(1, limit // 2) :]
            cache, unread = model.new_cache(), history
        logits = model.logits(model(unread, cache=cache)[:, -1])
        found = choose(logits, sampling, generator)
        yield found
        if stop is not None:
            stopped |= found == stop
            if bool(stopped.all()):
                return
        unread = found[:, None]
        history = torch.cat((history, unread), dim=1)
