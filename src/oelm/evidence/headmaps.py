"""Figures of single heads: layers by heads on one scale, and attention maps of a text. For the probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.evidence.drawing import Figure, figure, mesh, readable


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
