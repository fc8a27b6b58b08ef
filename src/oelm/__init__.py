"""OELM: freeze attention's Query/Key projections, orthogonally, and find out what it costs.

The public names below are resolved when first used, so that `import oelm` (and `oelm --help`) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

if TYPE_CHECKING:
    from oelm.errors import FrozenWeightsChanged as FrozenWeightsChanged
    from oelm.errors import OelmError as OelmError
    from oelm.method.account import account as account
    from oelm.method.apply import apply as apply
    from oelm.method.compact import load_compact as load_compact
    from oelm.method.compact import restore as restore
    from oelm.method.compact import save_compact as save_compact
    from oelm.method.compact import save_pretrained as save_pretrained
    from oelm.method.projections import Projection as Projection
    from oelm.method.projections import find_projections as find_projections
    from oelm.method.record import verify as verify
    from oelm.method.report import Report as Report
    from oelm.method.thaw import param_groups as param_groups
    from oelm.method.thaw import schedule as schedule
    from oelm.method.trainers import lightning_callback as lightning_callback
    from oelm.method.trainers import trainer_callback as trainer_callback
    from oelm.method.trainers import trainer_optimizer as trainer_optimizer
    from oelm.method.variant import Thaw as Thaw
    from oelm.method.variant import Variant as Variant
    from oelm.method.variant import variants as variants

_HOME = {
    "FrozenWeightsChanged": "oelm.errors",
    "OelmError": "oelm.errors",
    "Projection": "oelm.method.projections",
    "Report": "oelm.method.report",
    "Thaw": "oelm.method.variant",
    "Variant": "oelm.method.variant",
    "account": "oelm.method.account",
    "apply": "oelm.method.apply",
    "find_projections": "oelm.method.projections",
    "lightning_callback": "oelm.method.trainers",
    "load_compact": "oelm.method.compact",
    "param_groups": "oelm.method.thaw",
    "restore": "oelm.method.compact",
    "save_compact": "oelm.method.compact",
    "save_pretrained": "oelm.method.compact",
    "schedule": "oelm.method.thaw",
    "trainer_callback": "oelm.method.trainers",
    "trainer_optimizer": "oelm.method.trainers",
    "variants": "oelm.method.variant",
    "verify": "oelm.method.record",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
