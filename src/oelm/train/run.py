"""Run: one training run as a complete, comparable value. No torch here.

A run is model + data + variant + optimiser + budget + seed. Where it runs (device, folder, workers) is no
part of it. Its identity is the hash of its canonical form; a field added later is left out of the hash
while it has the default that reproduces the old behaviour (LATER).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from oelm.data.spec import DataSpec, as_data
from oelm.errors import ConfigError
from oelm.method.variant import Variant, as_variant
from oelm.models.shapes import HubModel, ModelSpec, Shape, as_model
from oelm.values import Value, digest


Count = Annotated[int, Field(ge=1, le=10**12)]
Rate = Annotated[float, Field(gt=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]


class Optimizer(Value):
    """AdamW or Muon, and the schedule of the learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: Rate = 1e-3
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    decay: Literal["all", "matrices"] = "all"  # what weight decay applies to; the original: everything
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    clip: Annotated[float, Field(ge=0)] = 1.0  # of the gradient's norm; 0: none
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # rate of layer l: lr * layer_decay**(layers - l)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: int | Share = 0  # steps when whole, a share of the budget when a float
    cooldown: Share = 0.2  # wsd: the share of the budget that decays
    floor: Share = 0.0  # the last rate over the highest

    @field_validator("warmup")
    @classmethod
    def _not_negative(cls, value: int | float) -> int | float:
        if value < 0:
            raise ValueError(f"warmup = {value}: must be steps >= 0 or a share in [0, 1]")
        return value


class Budget(Value):
    """How much is trained. Exactly one of steps, epochs and tokens."""

    steps: Count | None = None
    epochs: Annotated[float, Field(gt=0, le=10_000)] | None = None
    tokens: Count | None = None
    batch: Annotated[int, Field(ge=1, le=1_048_576)] = 8  # sequences of one step, over all devices
    accumulate: Annotated[int, Field(ge=1, le=65_536)] = 1  # parts a step is computed in; changes no result
    patience: Annotated[int, Field(ge=0)] = 0  # early stop after this many evaluations without a better one; 0: never

    @model_validator(mode="after")
    def _one(self) -> Budget:
        given = [name for name in ("steps", "epochs", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, epochs and tokens (given: {', '.join(given) or 'none'})")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate = {self.accumulate} does not divide batch = {self.batch}")
        return self


class Run(Value):
    """One training run, complete after defaults."""

    model: ModelSpec
    data: DataSpec
    variant: Variant
    optimizer: Optimizer = Optimizer()
    budget: Budget
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42  # of weights, data order and dropout
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    deterministic: bool = False
    eval_every: Annotated[int, Field(ge=0)] = 1000  # steps; 0: at the end only
    eval_tokens: Count | None = None  # read only so much of the validation split during training

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            if "model" in data:
                data["model"] = as_model(data["model"])
            if "data" in data:
                data["data"] = as_data(data["data"])
        return data

    @field_validator("variant", mode="before")
    @classmethod
    def _variant(cls, value: Any) -> Variant:
        return as_variant(value)

    @field_serializer("variant")
    def _plain_variant(self, value: Variant) -> dict[str, Any]:
        return value.to_dict()

    @model_validator(mode="after")
    def _fits(self) -> Run:
        steps = self.budget.steps
        warmup = self.optimizer.warmup
        if steps is not None and isinstance(warmup, int) and warmup > steps:
            raise ValueError(f"optimizer.warmup = {warmup} is longer than budget.steps = {steps}")
        if isinstance(self.model, Shape):
            self.variant.layer_numbers(self.model.layers)
            if self.data.context > self.model.context and self.model.positions == "learned":
                raise ValueError(
                    f"data.context = {self.data.context} is longer than model.context = {self.model.context}"
                )
        return self

    @property
    def is_hub(self) -> bool:
        return isinstance(self.model, HubModel)

    def identity(self) -> str:
        """Eight hex digits of the canonical form."""
        return digest(self.identified())

    def identified(self) -> dict[str, Any]:
        """The plain data that is hashed: everything but what LATER excuses."""
        data = self.model_dump()
        for dotted, default in LATER.items():
            table: Any = data
            *path, last = dotted.split(".")
            for part in path:
                table = table.get(part, {}) if isinstance(table, dict) else {}
            if isinstance(table, dict) and last in table and table[last] == default:
                del table[last]
        return data


# Fields added after the first release, with the default that reproduces what was before them.
LATER: dict[str, Any] = {"variant.turn": 0}


def run_id(row: str, run: Run) -> str:
    """`<study row>-<8 hex of the canonical form>`."""
    if not row or len(row) > 80 or not all(c.isalnum() or c in "._-" for c in row) or not row[0].isalnum():
        raise ConfigError(
            f"row name {row!r}: use 1 to 80 letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    return f"{row}-{run.identity()}"
