"""From a model's value to a model: ours or Hugging Face's, behind one calling interface.

`model(inputs, mask=, types=, documents=, last=)` gives features, `model.logits(features)` what the head says.
"""

from __future__ import annotations

from torch import nn

from oelm.errors import ConfigError
from oelm.models.gpt import GPT
from oelm.models.shapes import HubModel, Shape


def build(
    spec: Shape | HubModel,
    *,
    vocab: int | None = None,
    labels: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> nn.Module:
    """The model in float32 on the CPU (or the default device), its weights a function of the seed.

    vocab, labels and context are what the data needs; they replace or are checked against the value's own.
    """
    if isinstance(spec, HubModel):
        from oelm.models.hub import load_hub

        return load_hub(spec, vocab=vocab, labels=labels, seed=seed, context=context)
    changes: dict[str, int] = {}
    if vocab is not None:
        changes["vocab"] = vocab
    if labels is not None and spec.head in ("classify", "tag"):
        changes["labels"] = labels
    if context is not None and context > spec.context and spec.positions == "learned":
        raise ConfigError(
            f"data.context = {context} is longer than model.context = {spec.context}; "
            'raise model.context or use positions = "rope"'
        )
    return GPT(spec.changed(**changes) if changes else spec, seed=seed)
