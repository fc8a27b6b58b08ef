"""What a run will cost: parameters, operations, seconds and bytes; estimated, then corrected by what runs measured.

Counts of our own shapes are exact; a Hugging Face model is known once one run has recorded it.
No torch here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oelm.method.variant import Variant
from oelm.models.shapes import HubModel, Shape
from oelm.train.run import Run


# Operations a second that a first estimate assumes, and seconds that a run needs besides its steps.
SPEED = {"cuda": 1.5e14, "cpu": 4e10}
STARTUP = {"cuda": 25.0, "cpu": 6.0}
# Known sizes of models that are named but not here yet: total without a task head, width, layers.
HUB_SIZES = {
    "bert-base-uncased": (109_482_240, 768, 12),
    "t5-small": (60_506_624, 512, 12),
    "facebook/bart-base": (139_420_416, 768, 12),
    "sentence-transformers/all-MiniLM-L6-v2": (22_713_216, 384, 6),
}
# Training examples of the named sets, for budgets in epochs: the official counts.
EXAMPLES = {
    "imdb": 25_000,
    "ag-news": 120_000,
    "xnli-en": 392_702,
    "mnli": 392_702,
    "snli": 550_152,
    "sst2": 67_349,
    "trec": 5_452,
    "20newsgroups": 11_314,
    "wnut17": 3_394,
    "squad": 87_599,
}


@dataclass(frozen=True)
class Parameters:
    """How many there are and how many never train."""

    total: int
    frozen: int
    measured: bool = False

    @property
    def trainable(self) -> int:
        return self.total - self.frozen


def parameters(run: Run, record: Mapping[str, Any] | None = None) -> Parameters | None:
    """From a record of such a run, else from the shape; None for a model that nobody has seen."""
    said = (record or {}).get("params")
    if isinstance(said, Mapping) and isinstance(said.get("total"), int) and isinstance(said.get("frozen"), int):
        return Parameters(said["total"], said["frozen"], measured=True)
    if isinstance(run.model, Shape):
        return _of_shape(run.model, run.variant, _vocab(run))
    if run.model.path in HUB_SIZES:
        total, width, layers = HUB_SIZES[run.model.path]
        head = 0 if run.model.head == "lm" else run.model.labels * (width + 1)
        return Parameters(total + head, _frozen_of_hub(run.variant, width, layers))
    return None


def _vocab(run: Run) -> int:
    assert isinstance(run.model, Shape)
    if run.data.name == "recall":
        return run.data.symbols + 1
    named = {"gpt2": 50257, "bert": 30522, "demo-bpe": 1536, "bytes": 257}
    return named.get(run.data.tokenizer, run.model.vocab)


def _of_shape(shape: Shape, variant: Variant, vocab: int) -> Parameters:
    width, key_width = shape.width, shape.head_dim * (shape.kv_heads or shape.heads)
    norm = width * (2 if shape.norm == "layer" else 1)
    bias = 1 if shape.qkv_bias else 0
    q = width * width + bias * width
    k = v = width * key_width + bias * key_width
    o = width * width + bias * width
    ffn = 2 * width * shape.hidden + shape.hidden + width
    total = vocab * width + shape.layers * (q + k + v + o + ffn + 2 * norm) + norm
    total += shape.context * width if shape.positions == "learned" else 0
    scalars = {
        "shift-keys": key_width,
        "head-gain": shape.heads,
        "channel-gain": width,
        "query-mix": width * shape.head_dim,
    }
    total += shape.layers * sum(scalars[kind] for kind in variant.addons)
    if shape.head == "lm":
        total += 0 if shape.tied else vocab * width
    else:
        outputs = 2 if shape.head == "qa" else shape.labels
        total += outputs * width + outputs
    layers = len(variant.layer_numbers(shape.layers))
    if variant.init == "slices":
        return Parameters(total - layers * (q + k), 0)
    frozen = 0
    if variant.thaw is None:
        frozen = sum({"q": q, "k": k, "ffn": ffn}[role] for role in variant.frozen_roles)
        frozen -= width * key_width if variant.tie and {"q", "k"} <= set(variant.frozen_roles) else 0
    if variant.tie:  # one matrix for both; K keeps its bias
        total -= layers * width * key_width
    return Parameters(total, layers * frozen)


def _frozen_of_hub(variant: Variant, width: int, layers: int) -> int:
    if variant.thaw is not None or variant.init == "slices":
        return 0
    one = width * width + width
    sizes = {"q": one, "k": one, "ffn": 8 * width * width + 5 * width}
    return len(variant.layer_numbers(layers)) * sum(sizes[role] for role in variant.frozen_roles)


def steps(run: Run) -> int:
    """Steps of the budget; epochs by the set's official size where it is known."""
    budget = run.budget
    if budget.steps is not None:
        return budget.steps
    if budget.tokens is not None:
        return max(1, budget.tokens // (budget.batch * run.data.context))
    examples = run.data.examples or EXAMPLES.get(run.data.name, 25_000)
    return max(1, round((budget.epochs or 1) * examples / budget.batch))


def operations(run: Run) -> float:
    """Floating-point operations of the training, about: six a parameter and token."""
    size = parameters(run)
    return 6.0 * (size.total if size else 1e8) * steps(run) * run.budget.batch * run.data.context


def kind_of(device: str) -> str:
    return "cpu" if device.startswith("cpu") else "cuda"


def likeness(run: Run) -> str:
    """Runs that cost alike a step: same model, data shape and batch."""
    model = run.model.path if isinstance(run.model, HubModel) else f"{run.model.width}x{run.model.layers}"
    return f"{model}/{run.data.name}/{run.data.context}/{run.budget.batch}"


def devices_of(record: Mapping[str, Any]) -> float:
    """How much of a device a run had: several for one of several processes, a part for one of several side by side."""
    environment = record.get("environment") or {}
    world, beside = (environment.get(name) or 1 for name in ("world", "beside"))
    return float(world) / float(beside)


class Estimator:
    """Seconds and bytes of a run, from what finished runs took: of its kind if there are any, else of all."""

    def __init__(self, records: Iterable[Mapping[str, Any]], device: str = "cuda") -> None:
        self.kind = kind_of(device)
        self._ratios: dict[str, list[float]] = {}
        for record in records:
            seconds = (record.get("cost") or {}).get("seconds")
            if record.get("status") != "done" or not isinstance(seconds, int | float) or seconds <= 0:
                continue
            if kind_of(str((record.get("environment") or {}).get("device", self.kind))) != self.kind:
                continue
            try:
                run = Run.model_validate(record.get("run"))
            except ValueError:
                continue
            self._ratios.setdefault(likeness(run), []).append(float(seconds) * devices_of(record) / self._guess(run))
        every = [ratio for ratios in self._ratios.values() for ratio in ratios]
        self._all = statistics.median(every) if every else 1.0
        self.measured = len(every)

    def _guess(self, run: Run) -> float:
        return operations(run) / SPEED[self.kind] + STARTUP[self.kind]

    def seconds(self, run: Run) -> float:
        """Of one run on one device that it has for itself, all in."""
        alike = self._ratios.get(likeness(run))
        return self._guess(run) * (statistics.median(alike) if alike else self._all)


KEPT = {"all": 2, "best": 1, "none": 0}  # checkpoints of a finished run


def disk_bytes(run: Run, checkpoints: int = KEPT["all"]) -> int:
    """Checkpoints (12 bytes a trained parameter, 4 a frozen one) and about a megabyte of logs."""
    size = parameters(run)
    if size is None:
        return checkpoints * 12 * 110_000_000
    return checkpoints * (12 * size.trainable + 4 * size.frozen) + 1_000_000
