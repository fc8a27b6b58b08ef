"""Looks into a trained model's attention: what frozen heads lack and what the remedies repair.

Owns entropy, distance, logit scale, the QK spectrum, induction scores, recall by pairs, and the loss on recallable and
other tokens. The only part of evidence that needs torch. Refuses what is not our own transformer with a language-model
head: the inside of other models is not laid out as it reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.errors import ConfigError, DataError
from oelm.models.shapes import Shape


if TYPE_CHECKING:
    from torch import Tensor, nn

    from oelm.train.run import Run

Grid = list[list[float]]  # layers × heads
REPEATS = 4  # batches of the made sequences
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one model's attention does. Grids are layers × heads."""

    name: str
    variant: str
    entropy: Grid  # of attention, as a share of the largest possible at each position
    distance: Grid  # mean number of tokens looked back
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
    "distance": ("Distance", "Mean number of tokens that a head looks back."),
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
    from oelm.models.build import build
    from oelm.train.checkpoint import load_weights
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
    apply(model, run.variant, seed=run.seed)
    present = model.state_dict()
    found = model.load_state_dict(weights, strict=False)
    held = {tensor.data_ptr() for name, tensor in present.items() if name in weights}
    lacking = [name for name in found.missing_keys if present[name].data_ptr() not in held]
    if lacking or found.unexpected_keys:
        name = [*lacking, *found.unexpected_keys][0]
        raise DataError(f"{folder}: the checkpoint does not fit its run.toml ({name}); was one of them changed?")
    with torch.no_grad():
        model.eval()
    return run, model


def probe(model: nn.Module, *, name: str, variant: str, ids: Tensor | None = None, seed: int = SEED) -> Probe:
    """Every measurement of our transformer; `ids` (rows, tokens) is text to measure the losses and attention on."""
    import torch

    from oelm.models.gpt import GPT

    if not isinstance(model, GPT) or model.shape.head != "lm":
        raise ConfigError(f"{name}: probes read our own language models (model.kind gpt, head lm)")
    shape = model.shape
    generator = torch.Generator().manual_seed(seed)
    half = max(2, min(64, shape.context // 2))
    repeated = torch.randint(0, shape.vocab, (REPEATS, half), generator=generator).repeat(1, 2)
    with torch.no_grad():
        text = repeated if ids is None else ids[:, : shape.context]
        maps = attention_maps(model, text)
        loss = (None, None, None, None) if ids is None else split_loss(model, text)
        return Probe(
            name=name,
            variant=variant,
            entropy=_grid(maps, _entropy),
            distance=_grid(maps, _distance),
            logit_std=[[float(head) for head in layer] for layer in _logit_stds(model, text)],
            qk_rank=_over_heads(model, _effective_rank),
            qk_trace=_over_heads(model, _matching),
            prefix_matching=_grid(attention_maps(model, repeated), _prefix),
            copying=_copying(model, generator),
            loss=loss[0],
            recall_loss=loss[1],
            other_loss=loss[2],
            recall_share=loss[3],
        )


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


def attention_maps(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Attention of every layer: (rows, heads, T, T), from the logits the model itself computes."""
    return [scores.softmax(-1) for scores in attention_logits(model, ids)]


def attention_logits(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The masked attention logits of every layer, taken while the model reads."""
    import torch

    from oelm.models.attention import rotate

    found: list[Tensor] = []

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        x, reading = arguments[0], arguments[1]
        q, k, _ = module.project(x)
        if module.addons is not None:
            q, k = module.addons(q, k, first=reading.first, previous=None)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if reading.rotation is not None:
            q, k = rotate(q, *reading.rotation), rotate(k, *reading.rotation)
        k = k.repeat_interleave(module.heads // module.kv_heads, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(module.head_dim)
        if reading.causal:
            length = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        elif reading.mask is not None:
            scores = scores.masked_fill(~reading.mask, -math.inf)
        found.append(scores)

    hooks = [block.attn.register_forward_pre_hook(look) for block in model.blocks]  # type: ignore[union-attr]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
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


def _grid(maps: Sequence[Tensor], measure: Any) -> Grid:
    return [[float(value) for value in measure(layer)] for layer in maps]


def _entropy(attention: Tensor) -> Tensor:
    """Mean over rows and positions that see more than one token."""
    import torch

    visible = torch.arange(1, attention.shape[-1] + 1).float()
    nats = -(attention * attention.clamp(min=1e-30).log()).sum(-1)
    return (nats[..., 1:] / visible[1:].log()).mean((0, 2))


def _distance(attention: Tensor) -> Tensor:
    import torch

    places = torch.arange(attention.shape[-1])
    back = (places[:, None] - places[None, :]).clamp(min=0).float()
    return (attention * back).sum(-1).mean((0, 2))


def _prefix(attention: Tensor) -> Tensor:
    """On tokens said twice: attention from each token of the second half to the one after its first copy."""
    half = attention.shape[-1] // 2
    rows = range(half, 2 * half - 1)
    return sum(attention[:, :, row, row - half + 1] for row in rows).mean(0) / len(rows)  # type: ignore[union-attr]


def _logit_stds(model: nn.Module, ids: Tensor) -> list[Tensor]:
    import torch

    stds = []
    for scores in attention_logits(model, ids):
        visible = torch.isfinite(scores[0, 0])
        stds.append(scores[:, :, visible].transpose(0, 1).flatten(1).std(-1))
    return stds


def _heads_of(model: nn.Module) -> list[list[tuple[Tensor, Tensor] | None]]:
    """W_Q and W_K of every head, (head width, width) each; None where slices have no matrix."""
    from torch import nn as modules

    found: list[list[tuple[Tensor, Tensor] | None]] = []
    for block in model.blocks:  # type: ignore[union-attr]
        attention = block.attn
        if not isinstance(attention.q, modules.Linear) or not isinstance(attention.k, modules.Linear):
            found.append([None] * attention.heads)
            continue
        q = attention.q.weight.float().view(attention.heads, attention.head_dim, -1)
        k = attention.k.weight.float().view(attention.kv_heads, attention.head_dim, -1)
        k = k.repeat_interleave(attention.heads // attention.kv_heads, dim=0)
        found.append(list(zip(q, k, strict=True)))
    return found


def _over_heads(model: nn.Module, measure: Any) -> Grid:
    return [[math.nan if pair is None else float(measure(*pair)) for pair in layer] for layer in _heads_of(model)]


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


def _copying(model: nn.Module, generator: Any, tokens: int = 200) -> Grid:
    """For drawn tokens: does reading one through a head's W_V W_O raise its own logit above the others'?"""
    import torch

    shape: Any = model.shape
    drawn = torch.randperm(shape.vocab, generator=generator)[: min(tokens, shape.vocab)]
    embedded = model.embed.weight[drawn].float()  # type: ignore[union-attr, index]
    unembedded = model.vocabulary[drawn].float()  # type: ignore[index]
    grid: Grid = []
    for block in model.blocks:  # type: ignore[union-attr]
        attention = block.attn
        read = block.norm1(embedded)
        values = attention.v(read).view(len(drawn), attention.kv_heads, attention.head_dim)
        values = values.repeat_interleave(attention.heads // attention.kv_heads, dim=1)
        out = attention.o.weight.float().view(-1, attention.heads, attention.head_dim)
        heads = torch.einsum("thd,whd->thw", values.float(), out)
        logits = torch.einsum("thw,vw->htv", heads, unembedded)
        right = logits.argmax(-1) == torch.arange(len(drawn))
        grid.append([float(value) for value in right.float().mean(-1)])
    return grid


def text_ids(run: Run, text: str | None, *, rows: int = 8) -> Tensor | None:
    """The given text as one row of tokens, or rows of the run's own test split; None where neither can be had."""
    import torch

    assert isinstance(run.model, Shape)
    if text is not None:
        from oelm.data.tokens import load_tokens

        ids = load_tokens(run.data.tokenizer).encode(text)
        if len(ids) < 3:
            raise ConfigError(f"the text has {len(ids)} tokens; give at least three")
        return torch.tensor([ids[: run.data.context]])
    from oelm.data.open import load

    batch = next(iter(load(run.data).eval_batches("test", rows)))
    return torch.as_tensor(np.asarray(batch["inputs"])).long()


def as_view(probes: Sequence[Probe], maps: Mapping[str, tuple[Any, Sequence[str]]] | None = None) -> dict[str, Any]:
    """What the probes' page shows, arms side by side; `maps`: attention (layers, heads, T, T) and tokens by arm."""
    from oelm.evidence import headmaps

    made = []
    for name, (title, caption) in GRIDS.items():
        grids = {one.name: np.asarray(one.grids()[name], dtype=float) for one in probes}
        drawn = {arm: values for arm, values in grids.items() if np.isfinite(values).any()}
        if drawn:
            made.append(headmaps.head_grids(f"probe-{name}", title, caption, drawn))
    for number, (title, (layers, tokens)) in enumerate((maps or {}).items()):
        made.append(headmaps.attention_map(f"map-{number}", f"Attention of {title}", layers, tokens))
    return {
        "title": "Probes: " + ", ".join(one.name for one in probes),
        "figures": made,
        "lines": [
            {
                "name": one.name,
                "variant": one.variant,
                "loss": _shown(one.loss),
                "recall": _shown(one.recall_loss),
                "other": _shown(one.other_loss),
                "share": "–" if one.recall_share is None else f"{100 * one.recall_share:.1f} %",
                "prefix": _shown(max(max(layer) for layer in one.prefix_matching)),
                "by_pairs": ", ".join(f"{pairs}: {100 * value:.1f} %" for pairs, value in one.recall.items()) or "–",
            }
            for one in probes
        ],
    }


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def maps_of(model: nn.Module, run: Run, ids: Tensor | None, *, most: int = 48) -> tuple[Any, list[str]]:
    """Attention of every layer and head on the first row of `ids`, and its tokens, for drawing."""
    import torch

    from oelm.data.tokens import load_tokens

    if ids is None:
        raise ConfigError("attention maps need a text")
    tokens = load_tokens(run.data.tokenizer)
    with torch.no_grad():
        maps = attention_maps(model, ids[:1, :most])
    said = [tokens.backend.decode([token]).strip() or "·" for token in ids[0, :most].tolist()]
    return [layer[0].numpy() for layer in maps], said
