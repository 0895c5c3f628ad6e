"""The deviations and strengths of LocAt's Gaussians over the layers (S2, Figure 6)."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from nearsight.lens.widths import ALPHA, COLUMNS, ROWS
from nearsight.report.figures.heat import LAYER
from nearsight.report.figures.style import MUTED, UNIFORM, add_title, house_style, light_grid

_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"
_PANELS = (
    (ROWS, "σ along rows (patches)", _BLUE),
    (COLUMNS, "σ along columns (patches)", _ORANGE),
    (ALPHA, "α", _GREEN),
)


def widths_figure(widths: pd.DataFrame, *, label: str) -> Figure:
    """Mean, middle half and 5 to 95 % of each layer; dotted, the largest deviation that the model can have."""
    with house_style():
        figure = Figure(figsize=(9.0, 3.1), layout="constrained")
        for axes, (key, title, colour) in zip(figure.subplots(1, 3), _PANELS, strict=True):
            rows = widths[widths["what"] == key]
            _draw(axes, rows, colour)
            axes.set_title(title)
            axes.set_xlabel(LAYER)
        handles = [
            Line2D([], [], color=MUTED, marker="o", markersize=3.5),
            Patch(color=MUTED, alpha=0.45, linewidth=0),
            Patch(color=MUTED, alpha=0.18, linewidth=0),
            Line2D([], [], **UNIFORM),
        ]
        labels = ["mean", "middle half", "5 to 95 %", "largest possible"]
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        add_title(figure, label)
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, colour: str) -> None:
    layers = rows["layer"]
    for low, high, alpha in (("p5", "p95", 0.18), ("p25", "p75", 0.45)):
        axes.fill_between(layers, rows[low], rows[high], color=colour, alpha=alpha, linewidth=0)
    axes.plot(layers, rows["mean"], color=colour, marker="o", markersize=3.5, linewidth=1.4)
    if rows["largest"].notna().all():
        axes.plot(layers, rows["largest"], **UNIFORM)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    light_grid(axes, "y")
