"""What changed heads cost, in three figures: every head beside its distance, every reach, and more and more heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from nearsight.report.figures.heat import HEAD, LAYER, draw_cells, largest_cell, number_cells, panel_size
from nearsight.report.figures.looks import depth_of, shade
from nearsight.report.figures.style import INK, MUTED, add_legend, colour_bar, house_style, light_grid

_LAYERS, _ORDERS = "#0072b2", ("#d55e00", "#0072b2")
_OWN_PATCH = "#ff5a36"
"""Not in viridis."""
ENDS = ("low", "high")
"""Of intervals; where their product is above 0, 0 is excluded."""
_UNCHANGED: dict[str, Any] = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2))}


def worth_figure(heads: pd.DataFrame, own_patch: NDArray[np.bool_]) -> Figure:
    """Mean attention distance, and for each plan the points that the model loses when one head follows it.

    `own_patch` [layers, heads]: heads to frame. What the model gains is drawn as 0; its number says so. Numbers whose
    interval excludes 0 are bold.
    """
    first = heads[heads["plan"] == heads["plan"].iloc[0]]
    panels: dict[str, NDArray[np.float64]] = {"distance": _cells(first, "mad", own_patch.shape)}
    clear: dict[str, NDArray[np.float64]] = {}
    for name, rows in heads.groupby("plan", sort=False):
        panels[f"{name}: points lost"] = 100 * _cells(rows, "loss", own_patch.shape)
        clear[f"{name}: points lost"] = np.stack([_cells(rows, f"loss_{end}", own_patch.shape) for end in ENDS]).prod(0)
    with house_style():
        width, height, with_numbers = panel_size(*own_patch.shape)
        figure = Figure(figsize=((width + 0.9) * len(panels) + 0.4, height + 1.1), layout="constrained")
        axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for number, (panel, (title, cells)) in enumerate(zip(axes, panels.items(), strict=True)):
            digits = 1 if number else 2
            image = draw_cells(panel, cells, largest_cell([cells]), with_numbers=with_numbers, digits=digits)
            image.set_gid(f"worth-{number}")
            for text in panel.texts:
                head, layer = map(int, text.get_position())
                text.set_fontweight("bold" if title in clear and clear[title][layer, head] > 0 else "normal")
            for layer, head in np.argwhere(own_patch):
                panel.add_patch(Rectangle((head - 0.46, layer - 0.44), 0.92, 0.88, fill=False, ec=_OWN_PATCH, lw=1.8))
            colour_bar(figure, image, [panel], pad=0.02)
            panel.set_title(title)
            panel.set_xlabel(HEAD)
        axes[0].set_ylabel(LAYER)
        number_cells(axes[0], range(len(own_patch)), own_patch.shape[1], width=width)
        if own_patch.any():
            frame = Rectangle((0, 0), 1, 1, fill=False, ec=_OWN_PATCH, lw=1.8)
            figure.legend(handles=[frame], labels=["own-patch head"], loc="outside lower left")
    return figure


def reach_figure(reaches: pd.DataFrame, unchanged: float, column: str, metric: str) -> Figure:
    """A score with all heads of a layer limited to a reach, a line per layer; thick, with the interval of its
    loss: all layers at once."""
    with house_style():
        figure = Figure(figsize=(6.6, 4.0), layout="constrained")
        panel = figure.subplots()
        layers = [layer for layer in reaches["layer"].unique() if layer != "all"]
        handles, labels = [], []
        for layer in (*layers, "all"):
            rows = reaches[reaches["layer"] == layer]
            colour = INK if layer == "all" else shade(_LAYERS, depth_of(layer, layers))
            width = 2.6 if layer == "all" else 1.2
            look: dict[str, Any] = {"marker": "o", "markersize": 3.5, "clip_on": False, "gid": f"reach-{layer}"}
            panel.plot(rows["reach"], rows[column], color=colour, linewidth=width, **look)
            if layer == "all":
                _band(panel, rows["reach"], rows, unchanged, colour)
            handles.append(Line2D([], [], color=colour, linewidth=width))
            labels.append("all layers" if layer == "all" else str(layer))
        panel.axhline(unchanged, **_UNCHANGED)
        add_legend(
            figure,
            [*handles, Line2D([], [], **_UNCHANGED)],
            [*labels, "unchanged"],
            title="layer (from 0)",
            loc="outside right center",
        )
        panel.set_xlabel("reach of the heads, in patches")
        _finish(figure, metric)
    return figure


def removal_figure(removals: pd.DataFrame, unchanged: float, column: str, metric: str) -> Figure:
    """A score while more and more heads give nothing, in each order; random ones thin. Bands: of the loss."""
    with house_style():
        figure = Figure(figsize=(6.6, 3.8), layout="constrained")
        panel = figure.subplots()
        legend: dict[str, Line2D] = {}
        looks = _looks_of(list(removals["order"].unique()))
        for order, rows in removals.groupby("order", sort=False):
            label, look = looks[str(order)]
            x, y = [0, *rows["removed"]], [unchanged, *rows[column]]
            (line,) = panel.plot(x, y, **look)
            line.set_gid(f"removal-{str(order).replace(' ', '-')}")
            if order == label:  # it has a colour of its own
                _band(panel, rows["removed"], rows, unchanged, look["color"])
            legend[label] = Line2D([], [], **look)
        add_legend(figure, list(legend.values()), list(legend), title="heads removed", loc="outside right center")
        panel.set_xlabel("heads removed")
        _finish(figure, metric)
    return figure


def _band(panel: Axes, x: "pd.Series[float]", rows: pd.DataFrame, unchanged: float, colour: str) -> None:
    """The interval of the loss, below the score of the unchanged model."""
    low, high = (unchanged - rows[f"loss_{end}"] for end in reversed(ENDS))
    panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _looks_of(orders: list[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Order → its label in the legend, which random ones share, and its look."""
    named = [order for order in orders if not order.startswith("random")]
    thin: dict[str, Any] = {"color": MUTED, "linewidth": 0.8}
    bold = {order: {"color": colour, "linewidth": 2.0} for order, colour in zip(named, _ORDERS, strict=True)}
    return {order: (order, dict(bold[order])) if order in bold else ("in random order", thin) for order in orders}


def _finish(figure: Figure, metric: str) -> None:
    (panel,) = figure.axes
    panel.set_ylim(bottom=0.0)
    panel.set_xlim(left=0.0)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.set_ylabel(metric)
    light_grid(panel)


def _cells(rows: pd.DataFrame, column: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Layers × heads; NaN where there is no such head."""
    cells = np.full(shape, np.nan)
    cells[rows["layer"].astype(int), rows["head"].astype(int)] = rows[column]
    return cells
