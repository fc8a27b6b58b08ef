"""Our transformer: one pre-norm block for language models, classifiers, tagging and reading comprehension.

Owns its initialisation: every parameter has a generator of its own made from (seed, name), so that one seed gives the
same weights in every variant and the global generator does not move. Refuses losses, data and freezing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from oelm.errors import ConfigError
from oelm.models.attention import Attention, LayerCache, Reading, rotation
from oelm.models.shapes import Shape


INIT_STD = 0.02


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.norm == "layer" else nn.RMSNorm(shape.width, eps=1e-5)


class Gelu(torch.autograd.Function):
    """x Φ(x) and its slope from one exponential and a polynomial, within 5e-7 of the exact ones.

    Compiled for a GPU, the error function's own arithmetic takes longer than reading and writing x does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        below, _ = _normal(x.float())
        return (x.float() * below).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].float()
        below, bell = _normal(x)
        slope: Tensor = below + x * bell / math.sqrt(2 * math.pi)
        return (grads[0] * slope).to(grads[0].dtype)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The share of a normal distribution below x (Abramowitz and Stegun 7.1.26), and exp(-x²/2)."""
    bell = torch.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.3275911 * 0.5**0.5 * x.abs())
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * tail * bell
    return torch.where(x > 0, 1.0 - tail, tail), bell


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU; the exact one by the quickest way there is for this device."""
    if approximate == "none" and x.is_cuda and x.dtype == torch.bfloat16 and torch.compiler.is_compiling():
        return Gelu.apply(x)  # type: ignore[no-any-return, no-untyped-call]
    return F.gelu(x, approximate=approximate)


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.approximate = "tanh" if shape.activation == "gelu-tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x), self.approximate))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each on the normed stream and added back to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = _norm(shape)
        self.attn = Attention(shape)
        self.norm2 = _norm(shape)
        self.mlp = MLP(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, reading: Reading, cache: LayerCache | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x), reading, cache))
        return x + self.drop(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """`model(inputs, ...)` gives features, `model.logits(features)` what its head says of them.

    Features are (B, T, width), or (B, width) pooled where the head classifies whole texts.
    """

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = False  # activations again in the backward pass instead of kept: less memory, more time
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would cost time and move the global generator
            self.embed = _embedding(shape.vocab, shape.width)
            self.position = _embedding(shape.context, shape.width) if shape.positions == "learned" else None
            self.drop = nn.Dropout(shape.dropout)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.norm = _norm(shape)
            self.head = _head(shape)
        if device.type != "meta":
            self.to_empty(device=device)
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """N(0, 0.02²) for embeddings and matrices, 0 for biases, 1 for norms; a function of the seed alone."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                draw = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(draw.normal_(0.0, INIT_STD, generator=_generator(seed, name)))

    @property
    def vocabulary(self) -> Tensor:
        """The matrix (vocab, width) that turns features into logits of tokens."""
        if self.shape.head != "lm":
            raise ConfigError(f"model.head is {self.shape.head!r}: only a language model has a vocabulary head")
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self,
        inputs: Tensor,
        *,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        types: Tensor | None = None,
        last: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """Features of `inputs` (B, T).

        mask: (B, T), true where a token is valid, those in the cache included; padding may stand on either side;
        documents: (B, T), equal numbers see each other and nothing else; last: (B,), the last valid position;
        cache: one LayerCache a layer, extended in place;
        embedded: the embeddings of the inputs, where the caller looked them up; types is not used.
        """
        done = 0 if cache is None or cache[0].keys is None else cache[0].keys.shape[2]
        positions, first = _positions(inputs, documents, done)
        if mask is not None:
            first = _after_padding(mask, first, done, inputs.shape[1])
        x = self.embed(inputs) if embedded is None else embedded
        turn = None
        if self.position is None:
            turn = rotation(positions, self.shape.head_dim)
        else:
            self._fits(done + inputs.shape[1])
            x = x + self.position(positions)
        x = self.drop(x)
        allowed, causal = _visible(self.shape.causal, inputs, mask, documents, done)
        reading = Reading(turn, allowed, causal, first)
        for number, block in enumerate(self.blocks):
            if self.recompute and self.training and cache is None:
                x = torch.utils.checkpoint.checkpoint(block, x, reading, use_reentrant=False)
            else:
                x = block(x, reading, None if cache is None else cache[number])
        x = self.norm(x)
        return self._pooled(x, mask, last) if self.shape.head == "classify" else x

    def logits(self, features: Tensor) -> Tensor:
        """What the head says: over the vocabulary, the labels, or start and end of an answer."""
        if self.head is None:
            return F.linear(features, self.embed.weight)
        return cast(Tensor, self.head(features))

    def new_cache(self) -> list[LayerCache]:
        """An empty cache for generation."""
        return [LayerCache() for _ in self.blocks]

    def _pooled(self, x: Tensor, mask: Tensor | None, last: Tensor | None) -> Tensor:
        if self.shape.pool == "mean":
            if mask is None:
                return x.mean(dim=1)
            weight = mask.to(x.dtype)[..., None]
            return (x * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)
        if last is None:
            if mask is None:
                return x[:, -1]
            last = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).amax(dim=1)
        return x[torch.arange(x.shape[0], device=x.device), last]

    def _fits(self, length: int) -> None:
        if length > self.shape.context:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than model.context = {self.shape.context}; "
                'shorten it, or use positions = "rope"'
            )


def _embedding(rows: int, width: int) -> nn.Embedding:
    # With a weight given, torch does not draw one: drawing on the meta device imports the compiler, seconds of start-up.
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def _head(shape: Shape) -> nn.Linear | None:
    if shape.head == "lm":
        return None if shape.tied else nn.Linear(shape.width, shape.vocab, bias=False)
    return nn.Linear(shape.width, 2 if shape.head == "qa" else shape.labels)


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(key[:8], "big") >> 1)


def _positions(inputs: Tensor, documents: Tensor | None, done: int) -> tuple[Tensor, Tensor | None]:
    """Position numbers (1 or B, T), starting again in each document, and where documents start (B, T) if given."""
    steps = torch.arange(done, done + inputs.shape[1], device=inputs.device)[None]
    if documents is None:
        return steps, None
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(begins, steps, 0).cummax(dim=1).values
    return steps - starts, begins


def _after_padding(mask: Tensor, first: Tensor | None, done: int, length: int) -> Tensor:
    """Where no valid token stands before a token (B, T), or a document starts."""
    if mask.shape[1] != done + length:
        raise ConfigError(f"a mask of {mask.shape[1]} tokens for {done} read and {length} new ones; give one for all")
    valid = mask.bool()
    before = valid[:, done - 1 : -1] if done else F.pad(valid[:, :-1], (1, 0))
    return ~before if first is None else first | ~before


def _visible(
    causal: bool, inputs: Tensor, mask: Tensor | None, documents: Tensor | None, done: int
) -> tuple[Tensor | None, bool]:
    """The attention mask (B or 1, 1, T, done + T) where one is needed, and whether plain causality is enough.

    A padded token of a causal model sees itself all the same: a softmax over nothing is not a number.
    """
    length = inputs.shape[1]
    parts: list[Tensor] = []
    if documents is not None:
        parts.append((documents[:, :, None] == documents[:, None, :])[:, None])
    if not causal:
        if mask is not None:
            parts.append(mask.bool()[:, None, None, :])
    elif parts or mask is not None or (done and length > 1):
        rows = torch.arange(done, done + length, device=inputs.device)[:, None]
        columns = torch.arange(done + length, device=inputs.device)
        parts.append((rows >= columns)[None, None])
        if mask is not None:
            parts.append(mask.bool()[:, None, None, :] | (rows == columns))
    elif not done:
        return None, True
    return _all(parts), False


def _all(parts: Iterable[Tensor]) -> Tensor | None:
    result: Tensor | None = None
    for part in parts:
        result = part if result is None else result & part
    return result
