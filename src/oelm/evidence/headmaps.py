"""The probes' page: layers by heads on one scale, attention maps of a text, and what was measured, arms side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.evidence.drawing import Figure, figure, mesh, readable
from oelm.evidence.probes import GRIDS, Grid, Probe


if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def head_grids(name: str, title: str, caption: str, arms: Mapping[str, Any]) -> Figure:
    """Layers × heads, one panel an arm, on one colour scale: for the probes."""
    grids = {arm: np.asarray(values, dtype=float) for arm, values in arms.items()}
    low = min(float(np.nanmin(values)) for values in grids.values())
    high = max(float(np.nanmax(values)) for values in grids.values())

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots(1, len(grids), squeeze=False)[0]
        for axis, (arm, values) in zip(axes, grids.items(), strict=True):
            image = mesh(axis, values, low, high)
            axis.grid(visible=False)
            axis.set_title(arm, fontsize=10)
            axis.set_xlabel("head")
            axis.set_xticks(range(values.shape[1]))
            axis.set_yticks(range(values.shape[0]))
            if values.size <= 200:
                for (layer, head), value in np.ndenumerate(values):
                    axis.text(
                        head,
                        layer,
                        f"{value:.2g}",
                        ha="center",
                        va="center",
                        fontsize=6.5,
                        color=readable(float(value), low, high),
                    )
        axes[0].set_ylabel("layer")
        canvas.colorbar(image, ax=axes.tolist(), shrink=0.8)

    layers = max(values.shape[0] for values in grids.values())
    return figure(name, title, caption, draw, width=max(4.5, 3.4 * len(grids)), height=1.3 + 0.34 * layers)


def attention_map(name: str, title: str, layers: Sequence[Any], tokens: Sequence[str]) -> Figure:
    """Every head's attention on one text, layers down and heads across; only short texts are legible."""

    def draw(canvas: Canvas) -> None:
        grid = canvas.subplots(len(layers), len(layers[0]), squeeze=False)
        for layer, heads in enumerate(layers):
            for head, cells in enumerate(heads):
                axis = grid[layer, head]
                mesh(axis, np.asarray(cells), 0.0, 1.0)
                axis.grid(visible=False)
                axis.set_title(f"{layer}.{head}", fontsize=7, pad=2)
                small = head == 0 and len(tokens) <= 24
                axis.set_yticks(range(len(tokens)) if small else [], tokens if small else [], fontsize=5)
                axis.set_xticks([])

    return figure(
        name,
        title,
        "Layer.head; rows read, columns are read; yellow is all of a row's attention.",
        draw,
        width=1.5 * len(layers[0]) + 1,
        height=1.5 * len(layers) + 0.4,
    )


def as_view(probes: Sequence[Probe], maps: Mapping[str, tuple[Any, Sequence[str]]] | None = None) -> dict[str, Any]:
    """What the probes' page shows, arms side by side; `maps`: attention (layers, heads, T, T) and tokens by arm."""
    made: list[Figure] = []
    for name, (title, caption) in GRIDS.items():
        grids = {one.name: np.asarray(one.grids()[name], dtype=float) for one in probes}
        drawn = {arm: values for arm, values in grids.items() if np.isfinite(values).any()}
        if drawn:
            made.append(head_grids(f"probe-{name}", title, caption, drawn))
    for number, (title, (grid, tokens)) in enumerate((maps or {}).items()):
        made.append(attention_map(f"map-{number}", f"Attention of {title}", grid, tokens))
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
                "prefix": _best(one.prefix_matching),
                "by_pairs": ", ".join(f"{pairs}: {100 * value:.1f} %" for pairs, value in one.recall.items()) or "–",
            }
            for one in probes
        ],
    }


def _best(grid: Grid) -> str:
    return _shown(max((value for layer in grid for value in layer if math.isfinite(value)), default=None))


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
