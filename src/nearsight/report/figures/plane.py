"""The MAD–entropy plane: how far a head looks against how focused it is (S1, Figure 2)."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    ENTROPY_LABEL,
    INK,
    MUTED,
    add_legend,
    house_style,
    label_in_figure,
    light_grid,
    model_style,
)
from nearsight.report.inputs import ModelHeads, check_labels

LAYERS_WITH_OWN_TICK = 12
MARGIN = 0.03
"""Of the range of distances, beyond the outermost ones: room for a whole mark."""
MOST_OUTLINES = 4096
"""Points of one kind that are shapes of their own in an SVG; more of them are one picture there."""


def mad_entropy_plane(models: Sequence[ModelHeads], *, grid_size: tuple[int, int] | None = None) -> Figure:
    """One point per head: colour by layer, marker by model; the lower left corner is local and focused.

    With `grid_size` a faint cross marks uniform attention, where a head that ignores the image would lie.
    """
    check_labels(models)
    num_layers = max(max(model.layers()) for model in models) + 1
    with house_style():
        figure = Figure(figsize=(6.6, 4.8), layout="constrained")
        axes = figure.subplots()
        light_grid(axes)
        colours = mpl.colormaps["viridis"].resampled(num_layers)
        norm = BoundaryNorm(np.arange(0.5, num_layers + 1), num_layers)
        size = 46 if sum(model.matrix("mad").size for model in models) <= 400 else 18
        handles, distances = [], []
        for index, model in enumerate(models):
            style = model_style(index)
            rows = model.measured().dropna(subset=["mad", "entropy"])
            distances += rows["mad"].tolist()
            axes.scatter(
                rows["mad"],
                rows["entropy"],
                c=rows["layer"] + 1,
                cmap=colours,
                norm=norm,
                marker=style.marker,
                s=size,
                edgecolors=INK,
                linewidths=0.5,
                alpha=0.92,
                zorder=3,
                rasterized=len(rows) > MOST_OUTLINES,
                gid=f"model{index}",
            )
            handles.append(
                Line2D([], [], linestyle="none", marker=style.marker, markerfacecolor="none", markeredgecolor=INK)
            )
        if grid_size is not None:
            anchor = (uniform_attention_distance(grid_size), 1.0)
            distances.append(anchor[0])
            axes.plot(*anchor, marker="+", markersize=11, color=MUTED, linestyle="none", zorder=2, gid="uniform")
            axes.annotate(
                "uniform attention",
                anchor,
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                color=MUTED,
                fontsize=8,
                annotation_clip=False,
            )
        # Not matplotlib's own margins: they are of the data's range, which is narrow beside one that begins at 0.
        largest = max(distances, default=0.0) or 1.0
        left = min(0.0, min(distances, default=0.0) - MARGIN * largest)
        axes.set_xlim(left, largest + MARGIN * (largest - left))
        axes.set_ylim(-0.03, 1.05)
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE)
        axes.set_ylabel(ENTROPY_LABEL)
        add_legend(
            figure,
            handles,
            [label_in_figure(model) for model in models],
            loc="outside upper left",
            ncols=3,
            handlelength=1,
        )
        step = 1 if num_layers <= LAYERS_WITH_OWN_TICK else -(-num_layers // LAYERS_WITH_OWN_TICK)
        bar = figure.colorbar(
            ScalarMappable(norm, colours), ax=axes, ticks=np.arange(1, num_layers + 1, step), label="layer", aspect=32
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(which="both", length=0)
    return figure
