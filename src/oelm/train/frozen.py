"""What is frozen, as training records it, checks it at every checkpoint and leaves it out of compact ones."""

from __future__ import annotations

import hashlib

from torch import nn

from oelm.method.record import digest, record_of


def frozen_digest(model: nn.Module) -> str | None:
    """One hash over the names and present values of what the variant freezes for good; None where that is nothing."""
    found = record_of(model)
    names = sorted(found.frozen_for_good) if found is not None else []
    if not names:
        return None
    there = dict(model.named_parameters())
    text = "\n".join(f"{name} {digest(there[name])}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()


def frozen_hashes(model: nn.Module) -> dict[str, str]:
    """What every tensor that is frozen now must hash to, as `apply` left it."""
    found = record_of(model)
    still = {name for name, p in model.named_parameters() if not p.requires_grad}
    entries = found.entries if found is not None else ()
    return {e.name: e.present for e in entries if e.frozen and not e.tied and e.name in still and e.present}


def regenerable(model: nn.Module) -> frozenset[str]:
    """Names that the seed gives again and that never train: what a compact checkpoint does not hold."""
    found = record_of(model)
    return frozenset(found.regenerable) & frozenset(found.frozen_for_good) if found is not None else frozenset()
