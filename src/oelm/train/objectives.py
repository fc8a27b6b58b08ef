"""What each kind of task optimises and how it is judged: language modelling, classification, tagging, answers, recall.

Owns the table from `source.kind` to a loss and an evaluation. An objective reads a model through `model(inputs, ...)` and
`model.logits(features)` alone. Refuses loops, optimisers and data: batches come from the source, scores of
predictions (F1, exact match) from `source.score`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.errors import ConfigError, DataError, nearest
from oelm.models.shapes import ModelSpec
from oelm.models.vocabulary import IGNORED, vocabulary_loss


Batch = Mapping[str, Tensor]
Sums = dict[str, Tensor]

FIELDS = ("mask", "types", "documents", "last", "embedded")  # of a batch, beside its inputs, that a model may read


class Source(Protocol):
    """What an objective needs of a data source (oelm.data)."""

    kind: str
    name: str

    def eval_batches(self, split: str, batch: int) -> Iterator[dict[str, Any]]: ...

    def score(self, split: str, outputs: Any) -> dict[str, Any]: ...


def bare(model: nn.Module) -> Any:
    """The model inside torch.compile's and DDP's wrappers: where its own methods are."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return model
        model = inner


def features(model: nn.Module, batch: Batch) -> Tensor:
    """The model's features of a batch."""
    found: Tensor = model(batch["inputs"], **{name: batch[name] for name in FIELDS if name in batch})
    return found


def to_device(batch: Mapping[str, Any], device: torch.device | str) -> dict[str, Tensor]:
    """A batch of arrays or tensors as tensors on the device; the host does not wait for the copy."""
    return {name: torch.as_tensor(value).to(device, non_blocking=True) for name, value in batch.items()}


def reading_batch(batch: int, context: int, device: torch.device) -> int:
    """Sequences read at once where nothing trains: a GPU is filled by 16,384 tokens and more, a processor by a batch."""
    return batch if device.type == "cpu" else max(batch, 16_384 // context)


class Objective(abc.ABC):
    """One task. A loss is a mean; its sums have "nats" (the sum it is the mean of) and "count" (over how many)."""

    heads: tuple[str, ...] = ()  # the heads of a model that this task can use

    def __init__(self, spec: ModelSpec, source: Source) -> None:
        if spec.head not in self.heads:
            raise ConfigError(
                f"model.head = {spec.head!r} does not fit data {source.name!r}, which is a {source.kind} task; "
                f"use head = {' or '.join(repr(head) for head in self.heads)}"
            )
        self.spec = spec
        self.source = source

    @abc.abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> tuple[Sums, tuple[Tensor, ...]]:
        """Sums over the batch ("nats" carries the gradient), and what evaluation needs of the predictions."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """The mean loss in nats, with its gradient, and detached sums."""
        sums, _ = self.sums(model, batch)
        loss = sums["nats"] / sums["count"].clamp(min=1)
        return loss, {name: value.detach() for name, value in sums.items()}

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """(index of the examples, predictions ...) as `source.score` takes them."""
        return batch["index"], *self.sums(model, batch)[1]

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        source: Source,
        split: str,
        *,
        device: torch.device | str,
        batch: int,
        limit: int | None = None,
        stride: int | None = None,
    ) -> dict[str, Any]:
        """Metrics over a whole split in its fixed order, every token or example with equal weight.

        limit: stop after the batch in which this many tokens have been read. stride: windows of text that overlap.
        """
        training = model.training
        model.eval()
        try:
            read: Any = source.eval_batches  # only text has strides
            batches = read(split, batch) if stride is None else read(split, batch, stride=stride)
            return self._evaluate(model, source, split, device, batches, limit)
        finally:
            model.train(training)

    def _evaluate(
        self,
        model: nn.Module,
        source: Source,
        split: str,
        device: torch.device | str,
        batches: Iterable[dict[str, Any]],
        limit: int | None,
    ) -> dict[str, Any]:
        totals: dict[str, Tensor] = {}
        outputs: list[tuple[Tensor, ...]] = []
        read = 0
        for arrays in batches:
            part = to_device(arrays, device)
            sums, predictions = self.sums(model, part)
            for name, value in sums.items():
                totals[name] = totals[name] + value.double() if name in totals else value.double()
            if predictions:
                outputs.append((part["index"], *predictions))
            read += part["inputs"].numel()
            if limit is not None and read >= limit:
                break
        if not totals:
            raise DataError(f"{source.name}: the {split} split has nothing to evaluate; choose another split")
        sums_out = {name: float(value) for name, value in totals.items()}
        arrays_out = [tuple(tensor.cpu().numpy() for tensor in output) for output in outputs]
        scored = self.scored(source, split, sums_out, arrays_out)
        return self.metrics(sums_out) | {name: v for name, v in scored.items() if isinstance(v, int | float)}

    def scored(
        self, source: Source, split: str, totals: dict[str, float], outputs: list[tuple[Any, ...]]
    ) -> dict[str, Any]:
        """What the source says of the predictions."""
        return source.score(split, outputs)

    def metrics(self, totals: dict[str, float]) -> dict[str, Any]:
        """Numbers of a split from its sums."""
        return {"loss": totals["nats"] / max(totals["count"], 1.0)}


class LanguageModel(Objective):
    """Predict each next token; the mean is over tokens."""

    heads = ("lm",)

    def sums(self, model: nn.Module, batch: Batch) -> tuple[Sums, tuple[Tensor, ...]]:
        targets = batch["targets"]
        hidden = features(model, batch)
        return {"nats": token_nats(bare(model), hidden, targets), "count": (targets != IGNORED).sum()}, ()

    def metrics(self, totals: dict[str, float]) -> dict[str, Any]:
        loss = totals["nats"] / max(totals["count"], 1.0)
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": int(totals["count"])}

    def scored(
        self, source: Source, split: str, totals: dict[str, float], outputs: list[tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Perplexity per word and bits per byte beside the perplexity per token."""
        if not math.isfinite(totals["nats"]) or not totals["count"]:
            return {}
        said = source.score(split, (totals["nats"], int(totals["count"])))
        return {name: said[name] for name in ("perplexity_per_word", "bits_per_byte") if name in said}


class Recall(LanguageModel):
    """Language modelling whose targets are the answers to questions; judged by accuracy."""

    def sums(self, model: nn.Module, batch: Batch) -> tuple[Sums, tuple[Tensor, ...]]:
        targets = batch["targets"]
        hidden = features(model, batch)
        sums = {"nats": token_nats(bare(model), hidden, targets), "count": (targets != IGNORED).sum()}
        return sums, () if model.training else (bare(model).logits(hidden).argmax(dim=-1),)

    scored = Objective.scored


class Classification(Objective):
    """One label a text; the mean is over texts."""

    heads = ("classify", "seq2seq-classify")

    def sums(self, model: nn.Module, batch: Batch) -> tuple[Sums, tuple[Tensor, ...]]:
        labels = batch["labels"]
        logits = bare(model).logits(features(model, batch)).float()
        said = logits.argmax(dim=-1)
        nats = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
        sums = {"nats": nats, "count": (labels != IGNORED).sum(), "correct": (said == labels).sum()}
        return sums, (said,)

    def metrics(self, totals: dict[str, float]) -> dict[str, Any]:
        count = max(totals["count"], 1.0)
        return {"loss": totals["nats"] / count, "accuracy": totals["correct"] / count, "examples": int(totals["count"])}


class Tagging(Objective):
    """One label a word (its first piece; other pieces are -100); the mean is over words."""

    heads = ("tag",)

    def sums(self, model: nn.Module, batch: Batch) -> tuple[Sums, tuple[Tensor, ...]]:
        labels = batch["labels"]
        logits = bare(model).logits(features(model, batch)).float()
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return {"nats": nats, "count": (labels != IGNORED).sum()}, (logits.argmax(dim=-1),)


class Answers(Objective):
    """Where an answer starts and ends; the mean of both losses, over questions whose answer is in the window."""

    heads = ("qa",)

    def sums(self, model: nn.Module, batch: Batch) -> tuple[Sums, tuple[Tensor, ...]]:
        logits = bare(model).logits(features(model, batch)).float()
        if "mask" in batch:
            logits = logits.masked_fill(~batch["mask"].bool()[..., None], float("-inf"))
        start, end = logits.unbind(dim=-1)
        nats = 0.5 * (
            F.cross_entropy(start, batch["start"], reduction="sum", ignore_index=IGNORED)
            + F.cross_entropy(end, batch["end"], reduction="sum", ignore_index=IGNORED)
        )
        return {"nats": nats, "count": (batch["start"] != IGNORED).sum()}, (start, end)


def token_nats(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of all targets; from all logits at once only where a head is not one matrix."""
    weight = model.vocabulary
    if weight is not None:
        return vocabulary_loss(hidden, weight, targets)
    logits = model.logits(hidden).flatten(0, -2).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


OBJECTIVES: dict[str, type[Objective]] = {
    "lm": LanguageModel,
    "classify": Classification,
    "tag": Tagging,
    "qa": Answers,
    "recall": Recall,
}


def objective_for(spec: ModelSpec, source: Source) -> Objective:
    """The objective of a source's kind, or an error that says which kinds there are."""
    if source.kind not in OBJECTIVES:
        raise ConfigError(f"data {source.name!r} is of kind {source.kind!r}; {nearest(source.kind, OBJECTIVES)}")
    return OBJECTIVES[source.kind](spec, source)
