"""Sorted profiles of mean attention distance (S1, Figure 1)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.style import (
    DISTANCE_LABEL,
    MUTED,
    add_legend,
    depth_of,
    draw_uniform_line,
    house_style,
    label_in_figure,
    light_grid,
    model_style,
    shade,
)
from nearsight.report.inputs import ModelHeads, check_labels

# More lines than two models times four layers in one panel cannot be followed by eye.
MODELS_IN_ONE_PANEL = 2
LAYERS_IN_LEGEND = 8
PANELS_PER_ROW = 4


def mad_profiles(
    models: Sequence[ModelHeads], layers: Sequence[int] | None = None, *, grid_size: tuple[int, int] | None = None
) -> Figure:
    """Each layer's heads from the most local to the least, with bands of ± one standard deviation over images.

    `layers` count from 0; without them the first two and the last two are drawn, or all where there are at most four.
    One or two models share a panel; more get one panel each, on the same scale.
    """
    check_labels(models)
    shown = extreme_layers(models) if layers is None else sorted(set(layers))
    known = {layer for model in models for layer in model.layers()}
    unknown = [layer for layer in shown if layer not in known]
    if unknown or not shown:
        raise InputError(f"no measured layer has the number {', '.join(map(str, unknown)) or 'asked for'} (from 0)")
    with house_style():
        num_panels = 1 if len(models) <= MODELS_IN_ONE_PANEL else len(models)
        num_columns = min(num_panels, PANELS_PER_ROW)
        num_rows = -(-num_panels // num_columns)
        size = (7.2, 4.1) if num_panels == 1 else (2.3 * num_columns + 1.6, 2.5 * num_rows + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).ravel()
        for index, model in enumerate(models):
            panel = panels[index if num_panels > 1 else 0]
            _draw_model(panel, model, index, shown)
            if num_panels > 1:
                panel.set_title(label_in_figure(model), parse_math=False)
        for place, panel in enumerate(panels[:num_panels]):
            light_grid(panel)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            if grid_size is not None:
                distance = uniform_attention_distance(grid_size)
                draw_uniform_line(panel, distance, horizontal=True, gid=f"uniform-{place}")
        for panel in panels[num_panels:]:
            panel.remove()
        panels[0].set_ylim(bottom=0.0)
        figure.supxlabel("heads of a layer, from the most local to the least", fontsize=9.0)
        figure.supylabel(DISTANCE_LABEL, fontsize=9.0)
        _add_legends(figure, models, shown, with_uniform=grid_size is not None)
    return figure


def extreme_layers(models: Sequence[ModelHeads]) -> list[int]:
    """The first two and the last two layers of every model; all of them where there are at most four."""
    chosen: set[int] = set()
    for model in models:
        layers = model.layers()
        chosen.update(layers if len(layers) <= 4 else (*layers[:2], *layers[-2:]))
    return sorted(chosen)


def _draw_model(panel: Axes, model: ModelHeads, index: int, shown: Sequence[int]) -> None:
    style = model_style(index)
    mad, spread = model.matrix("mad"), model.matrix("mad_std")
    for row, layer in enumerate(model.layers()):
        if layer not in shown:
            continue
        order = np.argsort(mad[row])[: np.count_nonzero(np.isfinite(mad[row]))]  # NaN sorts last
        if order.size == 0:
            continue
        rank, mean, std = np.arange(1, order.size + 1), mad[row, order], spread[row, order]
        colour = shade(style.colour, depth_of(layer, shown))
        name = f"model{index}-layer{layer}"
        if order.size == 1:  # a band needs two points
            panel.errorbar(rank, mean, yerr=std, color=colour, linewidth=1.2, capsize=3)
        else:
            panel.fill_between(rank, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0, gid=f"band-{name}")
        panel.plot(
            rank, mean, color=colour, linestyle=style.dash, marker=style.marker, linewidth=1.6, markersize=4.5, gid=name
        )


def _add_legends(figure: Figure, models: Sequence[ModelHeads], shown: Sequence[int], *, with_uniform: bool) -> None:
    handles, labels = [], []
    for index, model in enumerate(models):
        style = model_style(index)
        handles.append(Line2D([], [], color=style.colour, linestyle=style.dash, marker=style.marker, markersize=4.5))
        labels.append(label_in_figure(model))
    if with_uniform:
        handles.append(Line2D([], [], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2))))
        labels.append("uniform attention")
    if len(models) <= MODELS_IN_ONE_PANEL or with_uniform:
        panels_have_titles = len(models) > MODELS_IN_ONE_PANEL
        first = len(models) if panels_have_titles else 0
        add_legend(figure, handles[first:], labels[first:], loc="outside upper left", ncols=3)
    # With many layers a few shades say how the rest runs.
    picked = sorted({shown[round(i)] for i in np.linspace(0, len(shown) - 1, min(len(shown), LAYERS_IN_LEGEND))})
    add_legend(
        figure,
        [Line2D([], [], color=shade("#767676", depth_of(layer, shown)), linewidth=3.5) for layer in picked],
        [str(layer + 1) for layer in picked],
        title="layer",
        loc="outside right center",
        handlelength=1.4,
    )
