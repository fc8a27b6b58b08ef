"""Looks into a trained model's attention: what frozen heads lack and what the remedies repair.

Owns entropy, distance, logit scale, the QK spectrum, induction scores, recall by pairs, and the loss on recallable and
other tokens, of our transformer and of Hugging Face models (heads.py reads them out). Scores of copying and of losses are
of language models alone; elsewhere they are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.errors import ConfigError
from oelm.evidence.heads import Layer, layers, watch
from oelm.models.shapes import Shape


if TYPE_CHECKING:
    from torch import Tensor, nn

    from oelm.train.run import Run

Grid = list[list[float]]  # layers × heads
REPEATS = 4  # rows of the made sequences
MOST_SCORES = 2**21  # logits of one head that are looked at: rows × T × T
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one model's attention does. Grids are layers × heads."""

    name: str
    variant: str
    entropy: Grid  # of attention, as a share of the largest possible at each position; NaN: has no such value
    distance: Grid  # mean number of tokens between reader and read
    logit_std: Grid
    qk_rank: Grid  # effective rank of the head's W_Q W_Kᵀ, as a share of the head's width
    qk_trace: Grid  # how far the head's kernel matches like with like: trace over nuclear norm
    prefix_matching: Grid  # attention to the token after the earlier copy
    copying: Grid  # how far the head's W_V W_O raises the logit of what it reads
    loss: float | None  # nats per token on the text
    recall_loss: float | None  # on tokens that end a pair of tokens seen before
    other_loss: float | None
    recall_share: float | None
    recall: dict[str, float] = field(default_factory=dict)  # by number of pairs, for models of the recall task

    def grids(self) -> dict[str, Grid]:
        """The measurements that have a cell per head."""
        return {name: getattr(self, name) for name in GRIDS}


GRIDS: dict[str, tuple[str, str]] = {
    "entropy": ("Entropy", "Entropy of attention over the largest possible: 1 is uniform, 0 looks at one token."),
    "distance": ("Distance", "Mean number of tokens between the reader and what it reads."),
    "logit_std": ("Logit scale", "Standard deviation of the attention logits of visible pairs."),
    "qk_rank": ("QK rank", "Effective rank of W_Q W_Kᵀ (exp of the entropy of its spectrum) over the head's width."),
    "qk_trace": (
        "QK matching",
        "Trace of the symmetric kernel over its nuclear norm: 1 matches like with like, 0 does not.",
    ),
    "prefix_matching": (
        "Prefix matching",
        "Attention, on random tokens said twice, to the token after the earlier copy.",
    ),
    "copying": ("Copying", "Share of tokens whose own logit is the one W_V W_O raises most among 200 drawn tokens."),
}


def load_run(folder: Path | str, checkpoint: str = "best") -> tuple[Run, nn.Module]:
    """A finished run's model, rebuilt from its run.toml and the weights of its checkpoint."""
    import torch

    from oelm.method.apply import apply
    from oelm.method.record import digest, record_of
    from oelm.models.build import build
    from oelm.train.checkpoint import load_weights, put_weights
    from oelm.train.run import Run
    from oelm.values import load_toml

    folder = Path(folder)
    if not (folder / "run.toml").is_file():
        raise ConfigError(f"{folder}: has no run.toml, so it is no run's folder; name one under runs/")
    run = Run.read(load_toml(folder / "run.toml"), where=str(folder / "run.toml"))
    weights, _ = load_weights(folder, checkpoint)
    vocab = labels = None
    if isinstance(run.model, Shape):
        vocab = weights["embed.weight"].shape[0]
        labels = weights["head.bias"].shape[0] if run.model.head in ("classify", "tag") else None
    model = build(run.model, vocab=vocab, labels=labels, seed=run.seed, context=run.data.context)
    if labels is None and (other := _labels_of(weights, model.state_dict())):
        model = build(run.model, labels=other, seed=run.seed, context=run.data.context)
    apply(model, run.variant, seed=run.seed)
    record = record_of(model)
    regenerable = frozenset(record.regenerable) if record is not None else frozenset[str]()
    put_weights(model, weights, folder, skip=regenerable - set(weights))  # compact ones leave out what was drawn again
    if record is not None:
        for name in record.thawing:  # what is not as it was frozen has thawed
            parameter = model.get_parameter(name)
            parameter.requires_grad_(digest(parameter) != record.entry(name).present)
    with torch.no_grad():
        model.eval()
    return run, model


def _labels_of(weights: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> int | None:
    """How many labels a Hugging Face classifier was trained with, where its own settings say another number."""
    odd = [name for name, value in weights.items() if name in present and value.shape != present[name].shape]
    return int(weights[odd[0]].shape[0]) if odd else None


def probe(
    model: nn.Module,
    *,
    name: str,
    variant: str,
    ids: Tensor | None = None,
    given: Mapping[str, Tensor] | None = None,
    seed: int = SEED,
) -> Probe:
    """Every measurement that the model has; `ids` (rows, tokens) is text to measure losses and attention on.

    given: what else the model reads of that text (mask, types, last).
    """
    import torch

    vocab, context, is_lm = _sizes(model)
    generator = torch.Generator().manual_seed(seed)
    half = max(2, min(64, context // 2))
    repeated = torch.randint(0, vocab, (REPEATS, half), generator=generator).repeat(1, 2)
    with torch.no_grad():
        text = repeated if ids is None else ids[:, :context]
        rows = max(1, MOST_SCORES // text.shape[1] ** 2)
        beside = {} if ids is None else {key: value[:rows] for key, value in (given or {}).items()}
        looked = _look(model, text[:rows], beside)
        matrices = layers(model)
        loss = split_loss(model, text) if is_lm and ids is not None else (None, None, None, None)
        return Probe(
            name=name,
            variant=variant,
            entropy=looked["entropy"],
            distance=looked["distance"],
            logit_std=looked["logit_std"],
            qk_rank=[_by_head(one, _effective_rank) for one in matrices],
            qk_trace=[_by_head(one, _matching) for one in matrices],
            prefix_matching=_prefixes(model, repeated) if is_lm else _nothing(looked["entropy"]),
            copying=_copying(model, generator) if is_lm else _nothing(looked["entropy"]),
            loss=loss[0],
            recall_loss=loss[1],
            other_loss=loss[2],
            recall_share=loss[3],
        )


def _sizes(model: Any) -> tuple[int, int, bool]:
    """Vocabulary, context, and whether it is a language model."""
    from oelm.models.gpt import GPT

    if isinstance(model, GPT):
        return model.shape.vocab, model.shape.context, model.shape.head == "lm"
    config = model.inner.config
    return config.vocab_size, getattr(config, "max_position_embeddings", None) or 512, model.spec.head == "lm"


def _nothing(like: Grid) -> Grid:
    return [[math.nan] * len(layer) for layer in like]


def _look(model: nn.Module, ids: Tensor, given: Mapping[str, Tensor]) -> dict[str, Grid]:
    """What attention does on a text, a layer at a time: only the numbers are kept."""
    readers = given["mask"].bool() if "mask" in given else None
    found: dict[str, Grid] = {"entropy": [], "distance": [], "logit_std": []}

    def see(logits: Tensor) -> None:
        attention = logits.softmax(-1)
        valid = readers if readers is not None else logits.new_ones(logits.shape[0], logits.shape[2]).bool()
        found["entropy"].append(_entropy(logits, attention, valid).tolist())
        found["distance"].append(_distance(attention, valid).tolist())
        found["logit_std"].append(_spread(logits, valid).tolist())

    watch(model, ids, given, see)
    return found


def recall_by_pairs(model: nn.Module, run: Run, *, examples: int = 256) -> dict[str, float]:
    """Accuracy on the run's own recall task by number of pairs, on held-out sequences."""
    import torch

    from oelm.data.open import load

    source = load(run.data)
    outputs: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for batch in source.eval_batches("test", 32):
            features = model(torch.as_tensor(batch["inputs"]).long())
            outputs.append((batch["index"], model.logits(features).argmax(-1).numpy()))  # type: ignore[operator]
            if 32 * len(outputs) >= examples:
                break
    return dict(source.score("test", outputs)["by_pairs"])


def attention_maps(model: nn.Module, ids: Tensor, given: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Attention of every layer: (rows, heads, T, T), from the logits the model itself computes."""
    found: list[Tensor] = []
    watch(model, ids, given or {}, lambda logits: found.append(logits.softmax(-1)))
    return found


def split_loss(model: nn.Module, ids: Tensor) -> tuple[float, float | None, float | None, float]:
    """Loss per token; on tokens that end a pair of neighbours seen before in the row; on the others; their share."""
    import torch.nn.functional as F

    logits = model.logits(model(ids[:, :-1])).float()  # type: ignore[operator]
    nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)
    recall = _seen_pairs(ids)
    known, other = nats[recall], nats[~recall]
    return (
        float(nats.mean()),
        float(known.mean()) if known.numel() else None,
        float(other.mean()) if other.numel() else None,
        float(recall.float().mean()),
    )


def _seen_pairs(ids: Tensor) -> Tensor:
    """(rows, T - 1): whether (token, next) stood earlier in the row."""
    import torch

    marks = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    for row, tokens in enumerate(ids.tolist()):
        seen: set[tuple[int, int]] = set()
        for place, pair in enumerate(itertools.pairwise(tokens)):
            marks[row, place] = pair in seen
            seen.add(pair)
    return marks


def _entropy(logits: Tensor, attention: Tensor, valid: Tensor) -> Tensor:
    """Mean over rows and positions that see more than one token."""
    import torch

    visible = torch.isfinite(logits[:, 0]).sum(-1)
    nats = -(attention * attention.clamp(min=1e-30).log()).sum(-1)
    share = nats / visible.clamp(min=2).float().log()[:, None]
    counts = (valid & (visible > 1))[:, None].float()
    return (share * counts).sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)


def _distance(attention: Tensor, valid: Tensor) -> Tensor:
    import torch

    places = torch.arange(attention.shape[-1])
    apart = (places[:, None] - places[None, :]).abs().float()
    counts = valid[:, None].float()
    return ((attention * apart).sum(-1) * counts).sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)


def _spread(logits: Tensor, valid: Tensor) -> Tensor:
    """Standard deviation by head over all pairs of a reader and what it sees."""
    import torch

    pairs = torch.isfinite(logits[:, 0]) & valid[:, :, None]
    return torch.stack([logits[:, head][pairs].std() for head in range(logits.shape[1])])


def _prefixes(model: nn.Module, repeated: Tensor) -> Grid:
    found: Grid = []
    watch(model, repeated, {}, lambda logits: found.append(_prefix(logits.softmax(-1)).tolist()))
    return found


def _prefix(attention: Tensor) -> Tensor:
    """On tokens said twice: attention from each token of the second half to the one after its first copy."""
    half = attention.shape[-1] // 2
    rows = range(half, 2 * half - 1)
    return sum(attention[:, :, row, row - half + 1] for row in rows).mean(0) / len(rows)  # type: ignore[union-attr]


def _by_head(layer: Layer, measure: Callable[[Tensor, Tensor], float]) -> list[float]:
    """NaN where heads have no matrices of their own (slices)."""
    if layer.q is None or layer.k is None:
        return [math.nan] * layer.heads
    return [measure(*pair) for pair in zip(layer.q, layer.k, strict=True)]


def _spectrum(q: Tensor, k: Tensor) -> Tensor:
    """Singular values of W_Qᵀ W_K through the small factors: the kernel has the head's rank."""
    import torch

    _, rq = torch.linalg.qr(q.t())
    _, rk = torch.linalg.qr(k.t())
    values: Tensor = torch.linalg.svdvals(rq @ rk.t())
    return values


def _effective_rank(q: Tensor, k: Tensor) -> float:
    values = _spectrum(q, k)
    share = (values / values.sum().clamp(min=1e-30)).clamp(min=1e-30)
    return float((-(share * share.log()).sum()).exp() / len(values))


def _matching(q: Tensor, k: Tensor) -> float:
    return float((q * k).sum() / _spectrum(q, k).sum().clamp(min=1e-30))


def _copying(model: Any, generator: Any, tokens: int = 200) -> Grid:
    """For drawn tokens: does reading one through a head's W_V W_O raise its own logit above the others'?"""
    import torch

    inner = getattr(model, "inner", None)
    read = model.embed.weight if inner is None else inner.get_input_embeddings().weight
    said = model.vocabulary if inner is None else inner.get_output_embeddings().weight
    drawn = torch.randperm(len(said), generator=generator)[: min(tokens, len(said))]
    embedded, unembedded = read[drawn].float(), said[drawn].float()
    grid: Grid = []
    for layer in layers(model):
        if layer.v is None or layer.o is None or embedded.shape[1] != layer.v.shape[2]:
            grid.append([math.nan] * layer.heads)
            continue
        seen = embedded if layer.norm is None else layer.norm(embedded)
        heads = torch.einsum("tw,hdw,hdo->hto", seen, layer.v, layer.o)
        right = (heads @ unembedded.t()).argmax(-1) == torch.arange(len(drawn))
        grid.append(right.float().mean(-1).tolist())
    return grid


def reading_of(run: Run, text: str | None, *, rows: int = 8) -> tuple[Tensor, dict[str, Tensor]]:
    """The given text as one row of tokens, framed as the task frames its examples, or rows of the run's own test split.

    With the tokens comes what else the model reads of them (mask, types, last).
    """
    import torch

    if text is not None:
        from oelm.data.examples import Frame
        from oelm.data.tokens import load_tokens

        tokens = load_tokens(run.data.tokenizer)
        ids = tokens.encode(text)[: run.data.context]
        if len(ids) < 3:
            raise ConfigError(f"the text has {len(ids)} tokens; give at least three")
        if run.model.head != "lm":
            ids = Frame(tokens, run.data.context, parts=1).joined(ids, None)[0]
        return torch.tensor([ids]), {}
    from oelm.data.open import load

    batch = next(iter(load(run.data).eval_batches("test", rows)))
    beside = {key: torch.as_tensor(np.asarray(batch[key])) for key in ("mask", "types", "last") if key in batch}
    return torch.as_tensor(np.asarray(batch["inputs"])).long(), beside


def maps_of(
    model: nn.Module, run: Run, ids: Tensor, given: Mapping[str, Tensor], *, most: int = 48
) -> tuple[Any, list[str]]:
    """Attention of every layer and head on the first row of `ids`, and its tokens, for drawing."""
    import torch

    from oelm.data.tokens import load_tokens

    tokens = load_tokens(run.data.tokenizer)
    with torch.no_grad():
        maps = attention_maps(model, ids[:1], {key: value[:1] for key, value in given.items()})
    said = [
        tokens.backend.decode([token], skip_special_tokens=False).strip() or "·" for token in ids[0, :most].tolist()
    ]
    return [layer[0, :, :most, :most].numpy() for layer in maps], said
