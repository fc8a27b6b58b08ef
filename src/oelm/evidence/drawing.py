"""How figures look, and how one is drawn: SVG that is the same bytes every time, readable on light and dark pages,
in print and without colour.

Owns the style. Ink is `currentColor`, so the page's own colour decides; arms differ by colour, marker and dash.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito's colours, a grey for black and none for yellow: they read on white and on near-black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#808890")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", "-.", ":")
INK = "#123456"  # a colour nothing else uses; becomes currentColor
STYLE: dict[str, Any] = {
    "svg.hashsalt": "oelm",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "text.usetex": False,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#8a94a0",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Figure:
    """One finished figure and how to draw it again as PDF."""

    name: str
    title: str
    caption: str
    svg: str
    pdf: Callable[[], bytes]

    @property
    def markup(self) -> Any:
        """The SVG for a template: matplotlib escaped its texts."""
        from markupsafe import Markup

        return Markup(self.svg)


def figure(
    name: str, title: str, caption: str, draw: Callable[[Canvas], None], *, width: float = 7.0, height: float = 3.6
) -> Figure:
    from matplotlib.figure import Figure as Canvas

    def saved(kind: str) -> bytes:
        with _style(kind):
            canvas = Canvas(figsize=(width, height), layout="constrained")
            draw(canvas)
            buffer = io.BytesIO()
            metadata = (
                {"Date": None, "Creator": None}
                if kind == "svg"
                else {"CreationDate": None, "Creator": None, "Producer": None}
            )
            canvas.savefig(buffer, format=kind, metadata=metadata)
            return buffer.getvalue()

    return Figure(name, title, caption, _inline(saved("svg").decode(), name), lambda: saved("pdf"))


def _style(kind: str) -> AbstractContextManager[None]:
    import matplotlib as mpl

    ink = {key: "#1b1f24" for key, value in STYLE.items() if value == INK} if kind == "pdf" else {}
    settings: Any = STYLE | ink
    return mpl.rc_context(settings)


def _inline(svg: str, name: str) -> str:
    """The SVG without its XML head, ink as currentColor, ids of its own (several share a page)."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    prefix = slug(name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    return re.sub(r"url\(#", f"url(#{prefix}-", svg)


def mesh(axis: Axes, cells: Any, low: float, high: float) -> Any:
    """Cells as vectors in twelve colours: no raster, whose bytes would depend on the compressor."""
    import matplotlib as mpl

    rows, columns = np.shape(cells)
    mesh = axis.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(cells),
        cmap=mpl.colormaps["cividis"].resampled(12),
        vmin=low,
        vmax=max(high, low + 1e-9),
    )
    axis.invert_yaxis()
    return mesh


def readable(value: float, low: float, high: float) -> str:
    """White on the dark half of the colours, near-black on the light half."""
    return "#ffffff" if value < low + 0.6 * (high - low) else "#111111"


def looks(groups: Mapping[Any, Any]) -> list[tuple[tuple[str, str, str], Any]]:
    """Colour, marker and dash for each group, the same for the same place in the order."""
    return [
        ((COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], DASHES[i % len(DASHES)]), item)
        for i, item in enumerate(groups.items())
    ]


def legend(axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        axis.legend(unique.values(), unique.keys(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)


def log_axis(axis: Axes, places: set[float], said: Callable[[float], str]) -> None:
    """A logarithmic axis with ticks where the points are, in plain text."""
    axis.set_xscale("log")
    apart = max(1.25, (max(places) / min(places)) ** 0.1)
    ticks: list[float] = []
    for place in sorted(places):
        if not ticks or place > ticks[-1] * apart:
            ticks.append(place)
    axis.set_xticks(ticks, [said(tick) for tick in ticks])
    axis.minorticks_off()


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "figure"
