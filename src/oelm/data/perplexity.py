"""Perplexity said properly: per token, per word, and bits per byte, with what they depend on beside them.

Perplexity per token compares within one tokenizer only; per word and bits per byte compare across tokenizers. All come
from one sum of nats over the scored tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from oelm.errors import ConfigError


_LARGEST = 700.0  # exp above this is no float


@dataclass(frozen=True, kw_only=True)
class Text:
    """A split's text in four measures."""

    tokens: int  # that can be scored: all but the first
    words: int
    bytes: int
    documents: int


def say(
    nats: float, tokens: int, text: Text, *, tokenizer: str, context: int, stride: int | None, words: str
) -> dict[str, Any]:
    """The measures of `nats`, summed over `tokens` scored tokens of a split.

    When only a part of the split was scored, words and bytes are taken in proportion and `whole` is false.
    """
    nats = float(nats)  # a numpy number would not be JSON
    if tokens < 1 or tokens > text.tokens:
        raise ConfigError(f"perplexity of {tokens:,} tokens: the split has {text.tokens:,} that can be scored")
    if math.isnan(nats) or nats < 0:
        raise ConfigError(f"perplexity of {nats!r} nats: a sum of losses is a number and not below 0")
    share = tokens / text.tokens
    per_token = nats / tokens
    per_word = nats / (text.words * share) if text.words else None
    return {
        "nats_per_token": _finite(per_token),
        "perplexity": _exp(per_token),
        "perplexity_per_word": None if per_word is None else _exp(per_word),
        "bits_per_byte": _finite(nats / (text.bytes * share) / math.log(2)) if text.bytes else None,
        "tokens": tokens,
        "words": round(text.words * share),
        "bytes": round(text.bytes * share),
        "documents": text.documents,
        "whole": tokens == text.tokens,
        "tokenizer": tokenizer,
        "context": context,
        "stride": context if stride is None else stride,
        "word_count": words,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _exp(value: float) -> float | None:
    return math.exp(value) if value < _LARGEST else None
