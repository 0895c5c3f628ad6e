"""Which kinds of heads models have: a strip per model, layer by layer."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.metrics.kinds import KINDS, OTHER
from nearsight.report.figures.style import HATCH, INK, MUTED, PAPER, add_legend, house_style
from nearsight.report.inputs import shorten

# Okabe and Ito's hues; the most local kind is the darkest and the least local one the lightest, also on a grey printer.
COLOURS = {
    "own patch": "#7a1f00",
    "neighbour": "#d55e00",
    "row/column": "#e69f00",
    "edge": "#009e73",
    "sink": "#0072b2",
    "global": "#bfe1f6",
    OTHER: "#8a9099",
}
assert COLOURS.keys() == {*KINDS, OTHER}
WORDS = {
    "own patch": "its own patch",
    "neighbour": "its 3×3 patches",
    "row/column": "its row or column",
    "edge": "the image's edge",
    "sink": "sink: few tokens, for all queries",
    "global": "global: most patches",
    OTHER: "other: by content, or mixed",
}
"""Kinds as a legend says them: where at least half of the attention goes."""
_WIDTH, _STRIP = 8.2, 0.34
"""Inches of the figure, and of a strip."""
_LONGEST_NAME = 33
_MOST_NUMBERS = 24
"""Layers of a strip that can be numbered, at a distance."""


def kind_strips(tables: Mapping[str, HeadTable]) -> Figure:
    """Models by name, measured with `what=["kinds"]`: a strip for each, from the first layer to the last, with a cell
    per head, coloured by its kind. Within a layer heads are in the order of the legend: their numbers mean nothing.

    All strips are of the same length, whatever the number of layers: the same place is the same depth.
    """
    if not tables:
        raise InputError("strips of kinds need at least one measured model")
    with house_style():
        height = 0.95 + (_STRIP + 0.3) * len(tables)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        panels = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
        found: set[str] = set()
        for place, (panel, (label, table)) in enumerate(zip(panels, tables.items(), strict=True)):
            found |= _draw_strip(panel, table, gid=f"kinds-{place}")
            panel.set_ylabel(
                _named(label, table), rotation=0, ha="right", va="center", labelpad=8, fontsize=8, parse_math=False
            )
        panels[-1].set_xlabel("layer (from 0); a cell is a head", fontsize=8.5, color=MUTED)
        shown = [kind for kind in COLOURS if kind in found]
        handles = [
            Line2D([], [], linestyle="none", marker="s", markersize=8, color=COLOURS[kind], markeredgecolor=MUTED)
            for kind in shown
        ]
        words = [WORDS[kind] for kind in shown]
        title = "Where at least half of a head's attention goes, beyond uniform attention"
        legend = add_legend(
            figure, handles, words, title=title, loc="outside upper left", ncols=min(len(words), 4), handlelength=1.0
        )
        legend.get_title().set(color=INK, fontweight="bold")
    return figure


def _named(label: str, table: HeadTable) -> str:
    num_heads = int(np.count_nonzero(table.kinds() != ""))
    return f"{shorten(label, _LONGEST_NAME)}\n{num_heads} heads"


def _draw_strip(panel: Axes, table: HeadTable, *, gid: str) -> set[str]:
    """Every layer is 1 wide, and its heads divide it; what kinds there are."""
    order = list(COLOURS)
    found: set[str] = set()
    numbers = range(len(table.layer_names)) if table.numbers is None else table.numbers
    for place, kinds in enumerate(table.kinds()):
        named = sorted((kind for kind in kinds.tolist() if kind), key=order.index)
        found |= set(named)
        if not named:
            panel.axvspan(place, place + 1, facecolor="none", hatch="////", edgecolor=HATCH, linewidth=0)
            continue
        edges = place + np.linspace(0.04, 0.96, len(named) + 1)
        codes = np.array([[order.index(kind) for kind in named]])
        panel.pcolormesh(
            edges,
            [0, 1],
            codes,
            cmap=ListedColormap(list(COLOURS.values())),
            vmin=-0.5,
            vmax=len(order) - 0.5,
            edgecolors=PAPER,
            linewidth=0.4 if len(table.layer_names) * len(named) <= 200 else 0.0,
            gid=f"{gid}-layer{place}",
        )
    panel.set(xlim=(0, len(table.layer_names)), ylim=(0, 1), yticks=[])
    ticks = range(0, len(table.layer_names), -(-len(table.layer_names) // _MOST_NUMBERS))
    panel.set_xticks([tick + 0.5 for tick in ticks], [str(numbers[tick]) for tick in ticks])
    panel.tick_params(length=0, labelsize=7)
    panel.spines[:].set_visible(False)
    return found
