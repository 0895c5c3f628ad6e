"""The finding as one picture: the numbers that are compared, with their intervals."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    INK,
    MUTED,
    draw_uniform_line,
    house_style,
    label_in_figure,
    light_grid,
    model_style,
)
from nearsight.report.inputs import ModelHeads, check_labels
from nearsight.report.reading import first_layer_mean, first_layer_name, most_local_head


def locality_intervals(models: Sequence[ModelHeads], *, grid_size: tuple[int, int] | None = None) -> Figure:
    """Each model's most local head and its first layer's mean, with the range that holds about 95 % of the images."""
    check_labels(models)
    first_layer = first_layer_name(map(first_layer_mean, models))
    with house_style():
        figure = Figure(figsize=(7.4, 1.25 + 0.42 * len(models)), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        quantities = (
            ("head", "most local head", most_local_head),
            ("layer", f"{first_layer}, mean of its heads", first_layer_mean),
        )
        for panel, (name, title, estimate_of) in zip(panels, quantities, strict=True):
            for index, model in enumerate(models):
                style, estimate = model_style(index), estimate_of(model)
                if estimate.has_interval:
                    panel.plot(
                        [estimate.low, estimate.high],
                        [index, index],
                        color=style.colour,
                        linewidth=5,
                        alpha=0.35,
                        solid_capstyle="butt",
                        clip_on=False,
                        gid=f"{name}-interval-model{index}",
                    )
                panel.plot(
                    estimate.mean,
                    index,
                    color=style.colour,
                    marker=style.marker,
                    markersize=8,
                    linestyle="none",
                    clip_on=False,
                    gid=f"{name}-mean-model{index}",
                )
                panel.annotate(
                    f"{estimate.mean:.3f}",
                    (estimate.mean, index),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    fontweight="bold",
                    color=INK,
                )
            if grid_size is not None:
                distance = uniform_attention_distance(grid_size)
                draw_uniform_line(panel, distance, horizontal=False, gid=f"{name}-uniform")
            panel.set_title(title)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
            light_grid(panel, "x")
            panel.tick_params(axis="y", length=0, pad=12)
            panel.spines["left"].set_visible(False)
        if grid_size is not None:
            panels[1].annotate(
                "uniform attention",
                (uniform_attention_distance(grid_size), 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 0),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=7.5,
                color=MUTED,
            )
        panels[0].set_xlim(left=0.0)
        panels[0].set_ylim(len(models) - 0.5, -0.9)
        panels[0].set_yticks(range(len(models)), [label_in_figure(model) for model in models], parse_math=False)
        figure.supxlabel(DISTANCE_LABEL_ONE_LINE, fontsize=9.0)
    return figure
