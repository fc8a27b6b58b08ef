"""What arithmetic alone settles about the original's claims: each number computed when asked, none typed.

Owns the table ARITHMETIC: a name to a function that gives (value, sentence). Needs torch for parameter counts, bytes
and FLOPs (and transformers for BERT), and imports them only then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from oelm.errors import MachineError
from oelm.models.shapes import PRESETS, Shape


if TYPE_CHECKING:
    from oelm.method.account import Account

Settled = tuple[float, str]
MIB = 2**20


def _minutes(hours: int, minutes: int, seconds: int = 0) -> float:
    return 60.0 * hours + minutes + seconds / 60


@functools.cache
def _gpt(variant: str) -> Account:
    import torch

    from oelm.method.account import account
    from oelm.models.build import build

    shape = PRESETS["gpt-512"]
    with torch.device("meta"):
        model = build(shape)
    return account(model, variant=variant, length=512)


@functools.cache
def _bert(variant: str) -> Account:
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError:
        raise MachineError("claims: BERT's arithmetic needs transformers; pip install 'oelm[hf]'") from None
    import torch

    from oelm.method.account import account

    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig.from_dict({"num_labels": 3}))
    return account(model, variant=variant, length=128)


def gpt_parameters() -> Settled:
    total = _gpt("baseline").parameters.total
    return total, f"GPT-512 with tied embeddings has {total:,} parameters"


def gpt_frozen_share() -> Settled:
    p = _gpt("oelm-freeze").parameters
    return 100 * p.frozen_share, f"{p.frozen:,} of {p.total:,} are Q and K: {100 * p.frozen_share:.2f} %"


def gpt_trainable_share() -> Settled:
    p = _gpt("oelm-freeze").parameters
    share = 100 * p.trainable / p.total
    return share, f"{p.trainable:,} of {p.total:,} train: {share:.2f} %"


def gpt_trainable() -> Settled:
    p = _gpt("oelm-freeze").parameters
    return p.trainable, f"{p.trainable:,} parameters train"


def bert_parameters() -> Settled:
    total = _bert("orthogonalize-frozen").parameters.total
    return total, f"BERT-base with three labels has {total:,} parameters"


def bert_frozen() -> Settled:
    p = _bert("orthogonalize-frozen").parameters
    return p.frozen, f"query and key weights and biases of 12 layers: {p.frozen:,}"


def bert_frozen_share() -> Settled:
    p = _bert("orthogonalize-frozen").parameters
    return 100 * p.frozen_share, f"{p.frozen:,} of {p.total:,}: {100 * p.frozen_share:.2f} %"


def checkpoint_baseline() -> Settled:
    size = _gpt("baseline").bytes.training_checkpoint / MIB
    return size, f"weights and AdamW's two states of every parameter: {size:.1f} MiB"


def checkpoint_frozen() -> Settled:
    size = _gpt("oelm-freeze").bytes.training_checkpoint / MIB
    return size, f"the same without AdamW's states of Q and K: {size:.1f} MiB"


def bert_ceiling() -> Settled:
    a = _bert("orthogonalize-frozen")
    assert a.flops is not None
    share = 100 * a.flops.saved_share
    return share, f"freezing Q/K saves at most {share:.1f} % of BERT-base's training FLOPs (length 128)"


def gpt_ceiling() -> Settled:
    a = _gpt("oelm-freeze")
    assert a.flops is not None
    share = 100 * a.flops.saved_share
    return share, f"freezing Q/K saves at most {share:.1f} % of GPT-512's training FLOPs (length 512)"


def logit_scale() -> Settled:
    shape = PRESETS["gpt-512"]
    assert isinstance(shape, Shape)
    random, matched = 0.02**2 * shape.width, 1.0
    return (
        matched / random,
        f"on normed inputs N(0, 0.02²) gives attention logits of standard deviation {random:.2f}, orthogonal blocks "
        f"{matched:.2f}: {matched / random:.1f} times the scale, so the control differs in more than orthogonality",
    )


def _ratio(frozen: float, baseline: float) -> Callable[[], Settled]:
    def settle() -> Settled:
        value = 100 * (frozen / baseline - 1)
        nats = math.log(frozen / baseline)
        return value, f"{frozen:g} / {baseline:g} = {value:+.1f} % ({nats:+.3f} nats per token)"

    return settle


def _mean(values: tuple[float, ...], unit: str) -> Callable[[], Settled]:
    def settle() -> Settled:
        value = sum(values) / len(values)
        return value, f"the mean of {', '.join(f'{v:g}' for v in values)} is {value:.2f} {unit}"

    return settle


def _saved(before: float, after: float, unit: str) -> Callable[[], Settled]:
    def settle() -> Settled:
        value = 100 * (1 - after / before)
        return value, f"{after:,.5g} {unit} instead of {before:,.5g} is {value:.1f} % less"

    return settle


def _steps_time(steps: int, seconds: float, said: str) -> Callable[[], Settled]:
    def settle() -> Settled:
        value = seconds / steps
        return value, f"{said} over {steps:,} steps is {value:.3f} s a step at most"

    return settle


def _exp_loss(loss: float) -> Callable[[], Settled]:
    def settle() -> Settled:
        value = math.exp(loss)
        return value, f"exp({loss:g}) = {value:.2f}"

    return settle


def rows_listed() -> Settled:
    listed = ("XNLI", 2), ("GPT", 7), ("SST-2", 2), ("MNLI", 2)
    total = sum(n for _, n in listed)
    return total, "its table lists " + " + ".join(f"{n} {name}" for name, n in listed) + f" = {total} experiments"


def noise_of_accuracy() -> Settled:
    n, p = 5010, 0.77
    points = 100 * 1.96 * math.sqrt(2 * p * (1 - p) / n)
    return (
        points,
        f"sampling {n:,} test examples alone moves the difference of two independent 77 % classifiers by ±{points:.1f} points (95 %)",
    )


ARITHMETIC: dict[str, Callable[[], Settled]] = {
    "gpt-parameters": gpt_parameters,
    "gpt-trainable": gpt_trainable,
    "gpt-frozen-share": gpt_frozen_share,
    "gpt-trainable-share": gpt_trainable_share,
    "bert-parameters": bert_parameters,
    "bert-frozen": bert_frozen,
    "bert-frozen-share": bert_frozen_share,
    "checkpoint-baseline": checkpoint_baseline,
    "checkpoint-frozen": checkpoint_frozen,
    "bert-ceiling": bert_ceiling,
    "gpt-ceiling": gpt_ceiling,
    "logit-scale": logit_scale,
    "ppl-tinystories": _ratio(4.69, 4.27),
    "ppl-openwebtext": _ratio(54.29, 47.24),
    "ppl-wikitext": _ratio(29.03, 25.13),
    "ppl-random": _ratio(4.97, 4.27),
    "ppl-random-orthogonal": _ratio(4.97, 4.69),
    "ppl-gpt06": _exp_loss(3.224),
    "ppl-gpt07": _exp_loss(3.368),
    "classification-mean": _mean((7.14, 5.69, 11.60), "points"),
    "speed-mean": _mean((3.6, 5.7, 21.0), "%"),
    "bert-time": _saved(11_971, 5_138, "s"),
    "imdb-time": _saved(_minutes(0, 22, 51), _minutes(0, 22, 1), "min"),
    "agnews-time": _saved(_minutes(1, 19, 12), _minutes(1, 14, 41), "min"),
    "gxnli-time": _saved(_minutes(3, 12, 59), _minutes(2, 32, 22), "min"),
    "gpt01-step": _steps_time(100_000, 60 * _minutes(4, 31), "4 h 31 min"),
    "gpt04-step": _steps_time(100_000, 60 * _minutes(9, 10), "9 h 10 min"),
    "gpt06-time": _saved(0.06168, 0.06123, "s"),
    "sst2-share": lambda: (100 * 91.28 / 93.12, f"91.28 / 93.12 = {100 * 91.28 / 93.12:.1f} %"),
    "mnli-share": lambda: (100 * 82.23 / 83.44, f"82.23 / 83.44 = {100 * 82.23 / 83.44:.1f} %"),
    "rows-listed": rows_listed,
    "accuracy-noise": noise_of_accuracy,
}
