"""The attention before and after: what of the sets can be seen in it."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from nearsight.report.figures.style import INK, PAPER, house_style
from nearsight.report.structure.numbers import attention_of, conditions_of, patches_of, runs_of
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, seeds_in_words
from nearsight.study.simulation_folder import SimulationResults

TITLES = ("before", "after", "after, by sets", "by sets, mean over seeds")
PANEL = 1.85
"""Inches."""


def attention_matrices(results: SimulationResults) -> Drawing:
    """A of the first seed before and after, as it is and with the patches of a set side by side; and its mean."""
    conditions = conditions_of(results)
    rows = {condition: _matrices(results, condition) for condition in conditions}
    everything = np.concatenate([matrix.ravel() for matrices in rows.values() for matrix in matrices])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    with house_style():
        size = (len(TITLES) * PANEL + 1.2, len(conditions) * PANEL + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(conditions), len(TITLES), squeeze=False)
        for line, (condition, matrices) in zip(panels, rows.items(), strict=True):
            order, borders = _order(results, condition)
            orders = (range(len(order)), range(len(order)), order, order)
            for place, (panel, matrix, shown) in enumerate(zip(line, matrices, orders, strict=True)):
                image = panel.imshow(
                    matrix[np.ix_(shown, shown)],
                    cmap="viridis",
                    vmin=low,
                    vmax=high,
                    interpolation="none",
                    aspect="auto",
                )
                image.set_gid(f"attention-{condition}-{place}")
                _name_patches(panel, list(shown))
                if place >= 2:
                    _outline(panel, borders)
            line[0].set_ylabel(condition)
        for panel, title in zip(panels[0], TITLES, strict=True):
            panel.set_title(title, fontsize=8.5)
        bar = figure.colorbar(image, ax=list(panels.ravel()), aspect=10 * len(conditions), pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("entry of A (logit of attention)", fontsize=8.5)
    counts = [len(runs_of(results, condition)) for condition in conditions]
    first = min(int(runs_of(results, condition).index.min()) for condition in conditions)
    words = (
        f"The attention logits A; rows and columns are patches. First three: seed {first}; last: the mean over "
        f"{seeds_in_words(counts)}. Framed: the sets. The diagonal is fixed."
    )
    add_footnote(figure, [words])
    return Drawing(figure=figure, caption=words)


def _matrices(results: SimulationResults, condition: str) -> tuple[NDArray[np.float64], ...]:
    seeds = [int(seed) for seed in runs_of(results, condition).index]
    before, after = attention_of(results, condition, min(seeds))
    mean = np.mean([attention_of(results, condition, seed)[1] for seed in seeds], axis=0)
    return before, after, after, mean


def _order(results: SimulationResults, condition: str) -> tuple[list[int], int]:
    """The patches, set by set, and the size of a set."""
    sets = patches_of(results, condition).sets().numpy()
    return [int(patch) for patch in np.argsort(sets, kind="stable")], int(np.bincount(sets)[0])


def _name_patches(panel: Axes, shown: list[int]) -> None:
    panel.set_xticks(range(len(shown)), [str(patch + 1) for patch in shown], fontsize=6)
    panel.set_yticks(range(len(shown)), [str(patch + 1) for patch in shown], fontsize=6)
    panel.tick_params(length=0, pad=1.5)
    panel.spines[:].set_visible(False)


def _outline(panel: Axes, size: int) -> None:
    num_patches = len(panel.get_xticks())
    for first in range(0, num_patches, size):
        for colour, width in ((INK, 2.2), (PAPER, 1.0)):  # stands out from light and dark cells
            frame = Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor=colour, linewidth=width)
            panel.add_patch(frame)
