"""How the simplified model learns, step by step, with the borders of S3's three phases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nearsight.report.figures.style import (
    GRID,
    INK,
    MUTED,
    ModelStyle,
    add_legend,
    house_style,
    light_grid,
    model_style,
)
from nearsight.report.structure.numbers import conditions_of, curves_of, median_or_none, runs_of
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, seeds_in_words
from nearsight.study.simulation_folder import SimulationResults
from nearsight.train.structure.descent import MOVED, NEAR


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    quantities: Mapping[str, str]
    """Column of the curves → its name in the legend."""
    best: str | None = None
    """Column of the runs with the best value there is."""
    percent: bool = False


PANELS = (
    Panel(title="v: the feature", quantities={"alpha": "α, along the feature", "across": "across it"}),
    Panel(title="A: the sets", quantities={"gamma": "γ, within sets", "rho": "ρ, between sets"}),
    Panel(title="risk", quantities={"test_risk": "test", "train_risk": "training"}, best="best_risk"),
    Panel(
        title="accuracy, association",
        quantities={"test_acc": "test accuracy", "associated": "patches associated"},
        best="best_acc",
        percent=True,
    ),
)
NUMERALS = ("I", "II", "III")


def phase_curves(results: SimulationResults) -> Drawing:
    """Feature alignment, attention within and between sets, risk and accuracy, over steps."""
    conditions = conditions_of(results)
    with house_style():
        figure = Figure(figsize=(1.2 + 3.4 * len(conditions), 8.2), layout="constrained")
        panels = figure.subplots(len(PANELS), len(conditions), squeeze=False, sharex="col", sharey="row")
        for column, condition in enumerate(conditions):
            curves, runs = curves_of(results, condition), runs_of(results, condition)
            borders = [median_or_none(runs[name]) for name in ("phase_2", "phase_3")]
            last = float(max(curve["step"].max() for curve in curves.values()))
            for row, panel in enumerate(PANELS):
                axes = panels[row, column]
                _draw_borders(axes, borders, last, with_numerals=row == 0)
                for index, name in enumerate(panel.quantities):
                    draw_band(axes, list(curves.values()), name, model_style(index), gid=f"{name}-{condition}")
                if panel.best is not None:
                    axes.axhline(float(runs[panel.best].iloc[0]), color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
                light_grid(axes, "y")
            panels[0, column].set_title(condition, pad=18)
            panels[-1, column].set_xlabel("step")
            panels[-1, column].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        for row, panel in enumerate(PANELS):
            panels[row, 0].set_ylabel(panel.title)
            if panel.percent:
                panels[row, 0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            _add_legend(panels[row, -1], panel)
    seeds = seeds_in_words(len(runs_of(results, condition)) for condition in conditions)
    words = (
        f"Lines: mean over {seeds}; bands: from the least to the largest. Vertical lines: median step at which a phase "
        f"begins. II: γ − ρ reaches {MOVED}. III: all patches are associated and the test accuracy is within "
        f"{100 * NEAR:.0f} point of the best possible. Dotted: the best possible."
    )
    add_footnote(figure, [words])
    return Drawing(figure=figure, caption=f"How v and A learn. {words}")


def draw_band(axes: Axes, curves: Sequence[pd.DataFrame], name: str, style: ModelStyle, *, gid: str) -> None:
    """The mean of a quantity over seeds, and its range."""
    steps = curves[0]["step"].to_numpy()
    values = np.stack([curve[name].to_numpy(dtype=np.float64) for curve in curves])
    axes.fill_between(steps, values.min(0), values.max(0), color=style.colour, alpha=0.22, linewidth=0)
    axes.plot(steps, values.mean(0), color=style.colour, linestyle=style.dash, linewidth=1.6, gid=gid)


def _draw_borders(axes: Axes, borders: Sequence[float], last: float, *, with_numerals: bool) -> None:
    """A line where a phase begins, and above the first panel the phases' numerals."""
    ends = [0.0, *(border for border in borders if np.isfinite(border)), last]
    for border in ends[1:-1]:
        axes.axvline(border, color=INK, linewidth=0.8, zorder=1)
    for number, (low, high) in enumerate(pairwise(ends)):
        if number % 2:
            axes.axvspan(low, high, facecolor=GRID, alpha=0.35, linewidth=0, zorder=0)
        if with_numerals:
            axes.annotate(
                NUMERALS[number],
                ((low + high) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
                fontweight="bold",
                color=INK,
            )


def _add_legend(axes: Axes, panel: Panel) -> None:
    styles = [model_style(index) for index in range(len(panel.quantities))]
    handles = [Line2D([], [], color=style.colour, linestyle=style.dash, linewidth=1.6) for style in styles]
    add_legend(axes, handles, list(panel.quantities.values()), loc="center left", bbox_to_anchor=(1.0, 0.5))
