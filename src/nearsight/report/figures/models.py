"""Measured models side by side: what is compared, sorted profiles, the plane of distance and entropy, and how they
trained."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nearsight.errors import InputError
from nearsight.metrics import uniform_attention_distance
from nearsight.report.differences import Quantity, first_layer_mean, first_layer_name, most_local_head
from nearsight.report.figures.heat import heatmaps
from nearsight.report.figures.looks import ModelStyle, depth_of, looks, shade
from nearsight.report.figures.style import (
    DISTANCE_LABEL,
    DISTANCE_LABEL_ONE_LINE,
    ENTROPY_LABEL,
    FIGURE_LABEL_LIMIT,
    INK,
    MUTED,
    NARROW,
    UNIFORM,
    add_legend,
    colour_bar,
    draw_uniform_line,
    house_style,
    light_grid,
    save_figure,
)
from nearsight.report.inputs import ModelHeads, check_labels, shorten

# More lines than two models times four layers in one panel cannot be followed by eye.
_MODELS_IN_ONE_PANEL = 2
_LAYERS_IN_LEGEND = 8
_PANELS_PER_ROW, _PLANES_PER_ROW = 4, 3
_CROWDED = 150
"""Heads in one plane, from which on they hide one another."""
_LAYERS_WITH_OWN_TICK = 12
_MARGIN = 0.03
"""Of the range of distances, beyond the outermost ones: room for a whole mark."""
MOST_OUTLINES = 4096
"""Points of one kind that are shapes of their own in an SVG; more of them are one picture there."""
_COURSES = {"train_loss": "training loss", "val_loss": "validation loss", "val_acc": "validation accuracy"}


def locality_spreads(
    models: Sequence[ModelHeads], *, grid_size: tuple[int, int] | None = None, is_narrow: bool = False
) -> Figure:
    """Each model's most local head and its first layer's mean, and how the images spread: about 95 % of them.

    `is_narrow`: one below the other, for a phone.
    """
    check_labels(models)
    first_layer, styles = first_layer_name(map(first_layer_mean, models)), _looks(models)
    with house_style():
        height = 0.42 * len(models)
        size = (NARROW, 2.0 + 2 * height) if is_narrow else (7.4, 1.25 + height)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(*((2, 1) if is_narrow else (1, 2)), sharex=True, sharey=True)
        quantities: tuple[tuple[str, str, Callable[[ModelHeads], Quantity]], ...] = (
            ("head", "most local head", most_local_head),
            ("layer", f"{first_layer}, mean of its heads", first_layer_mean),
        )
        for panel, (name, title, quantity_of) in zip(panels, quantities, strict=True):
            for index, model in enumerate(models):
                style, quantity = styles[model.label], quantity_of(model)
                if quantity.has_spread:
                    panel.plot(
                        [quantity.low, quantity.high],
                        [index, index],
                        color=style.colour,
                        linewidth=5,
                        alpha=0.35,
                        solid_capstyle="butt",
                        clip_on=False,
                        gid=f"{name}-spread-model{index}",
                    )
                mark = style.look_with(linestyle="none", markersize=8)
                panel.plot(quantity.mean, index, **mark, clip_on=False, gid=f"{name}-mean-model{index}")
                panel.annotate(
                    f"{quantity.mean:.3f}",
                    (quantity.mean, index),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    fontweight="bold",
                    color=INK,
                )
            if grid_size is not None:
                uniform = uniform_attention_distance(grid_size)
                draw_uniform_line(panel, uniform, horizontal=False, gid=f"{name}-uniform")
            panel.set_title(title)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
            light_grid(panel, "x")
            panel.tick_params(axis="y", length=0, pad=12)
            panel.spines["left"].set_visible(False)
        if grid_size is not None:
            panels[1].annotate(
                "uniform attention",
                (uniform, 1.0),
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
        panels[0].set_yticks(range(len(models)), [_label(model) for model in models], parse_math=False)
        figure.supxlabel(DISTANCE_LABEL if is_narrow else DISTANCE_LABEL_ONE_LINE, fontsize=9.0)
    return figure


def mad_profiles(
    models: Sequence[ModelHeads], layers: Sequence[int] | None = None, *, grid_size: tuple[int, int] | None = None
) -> Figure:
    """Each layer's heads from the most local to the least, with bands of ± one standard deviation over images.

    `layers` count from 0; without them the first two and the last two are drawn, or all where there are at most four.
    One or two models share a panel; more get one panel each, on the same scale.
    """
    check_labels(models)
    shown = _extreme_layers(models) if layers is None else sorted(set(layers))
    known = {layer for model in models for layer in model.layers()}
    unknown = [layer for layer in shown if layer not in known]
    if unknown or not shown:
        raise InputError(f"no measured layer has the number {', '.join(map(str, unknown)) or 'asked for'} (from 0)")
    with house_style():
        num_panels = 1 if len(models) <= _MODELS_IN_ONE_PANEL else len(models)
        num_columns = min(num_panels, _PANELS_PER_ROW)
        num_rows = -(-num_panels // num_columns)
        size = (7.2, 4.1) if num_panels == 1 else (2.3 * num_columns + 1.6, 2.5 * num_rows + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).ravel()
        for index, model in enumerate(models):
            panel = panels[index if num_panels > 1 else 0]
            _draw_model(panel, model, index, shown, _looks(models)[model.label])
            if num_panels > 1:
                panel.set_title(_label(model), parse_math=False)
        for place, panel in enumerate(panels[:num_panels]):
            light_grid(panel)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            if grid_size is not None:
                uniform = uniform_attention_distance(grid_size)
                draw_uniform_line(panel, uniform, horizontal=True, gid=f"uniform-{place}")
        for panel in panels[num_panels:]:
            panel.remove()
        panels[0].set_ylim(bottom=0.0)
        figure.supxlabel("heads of a layer, from the most local to the least", fontsize=9.0)
        figure.supylabel(DISTANCE_LABEL, fontsize=9.0)
        _add_legends(figure, models, shown, with_uniform=grid_size is not None)
    return figure


def _extreme_layers(models: Sequence[ModelHeads]) -> list[int]:
    """The first two and the last two layers of every model; all of them where there are at most four."""
    chosen: set[int] = set()
    for model in models:
        layers = model.layers()
        chosen.update(layers if len(layers) <= 4 else (*layers[:2], *layers[-2:]))
    return sorted(chosen)


def _draw_model(panel: Axes, model: ModelHeads, index: int, shown: Sequence[int], style: ModelStyle) -> None:
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
        panel.plot(rank, mean, **style.look_with(color=colour, linewidth=1.6, markersize=4.5), gid=name)


def _add_legends(figure: Figure, models: Sequence[ModelHeads], shown: Sequence[int], *, with_uniform: bool) -> None:
    handles = [style.handle(markersize=4.5) for style in _looks(models).values()]
    labels = [_label(model) for model in models]
    if with_uniform:
        handles.append(Line2D([], [], **UNIFORM))
        labels.append("uniform attention")
    if len(models) <= _MODELS_IN_ONE_PANEL or with_uniform:
        panels_have_titles = len(models) > _MODELS_IN_ONE_PANEL
        first = len(models) if panels_have_titles else 0
        add_legend(figure, handles[first:], labels[first:], loc="outside upper left", ncols=3)
    # With many layers a few shades say how the rest runs.
    picked = sorted({shown[round(i)] for i in np.linspace(0, len(shown) - 1, min(len(shown), _LAYERS_IN_LEGEND))})
    add_legend(
        figure,
        [Line2D([], [], color=shade("#767676", depth_of(layer, shown)), linewidth=3.5) for layer in picked],
        [str(layer) for layer in picked],
        title="layer\n(from 0)",
        loc="outside right center",
        handlelength=1.4,
    )


def mad_entropy_plane(models: Sequence[ModelHeads], *, grid_size: tuple[int, int] | None = None) -> Figure:
    """One point per head: colour by layer, marker by model; the lower left corner is local and focused.

    Many heads would hide one another: then each model has a panel of its own, and the marks are small and let others
    show through. With `grid_size` a faint cross marks uniform attention, where a head that ignores the image would lie.
    """
    check_labels(models)
    num_layers = max(max(model.layers()) for model in models) + 1
    is_crowded = sum(model.matrix("mad").size for model in models) > _CROWDED
    num_panels = len(models) if is_crowded else 1
    num_columns = min(num_panels, _PLANES_PER_ROW)
    num_rows = -(-num_panels // num_columns)
    with house_style():
        size = (6.6, 4.8) if num_panels == 1 else (3.7 * num_columns + 1.2, 3.5 * num_rows + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).ravel()
        colours = mpl.colormaps["viridis"].resampled(num_layers)
        norm = BoundaryNorm(np.arange(-0.5, num_layers), num_layers)
        look: dict[str, Any] = {"s": 46, "edgecolors": INK, "linewidths": 0.5, "alpha": 0.92}
        if is_crowded:
            look = {"s": 15, "edgecolors": "none", "alpha": 0.65}
        handles, distances = [], []
        for index, (model, style) in enumerate(zip(models, _looks(models).values(), strict=True)):
            panel = panels[index % num_panels]
            # The first layers, whose heads differ most, on top.
            rows = (
                model.measured().dropna(subset=["mad", "entropy"]).sort_values("layer", ascending=False, kind="stable")
            )
            distances += rows["mad"].tolist()
            panel.scatter(
                rows["mad"],
                rows["entropy"],
                c=rows["layer"],
                cmap=colours,
                norm=norm,
                marker=style.marker,
                zorder=3,
                rasterized=len(rows) > MOST_OUTLINES,
                gid=f"model{index}",
                **look,
            )
            if num_panels > 1:
                panel.set_title(_label(model), parse_math=False)
            handles.append(
                Line2D([], [], linestyle="none", marker=style.marker, markerfacecolor="none", markeredgecolor=INK)
            )
        if grid_size is not None:
            distances.append(uniform_attention_distance(grid_size))
        # Not matplotlib's own margins: they are of the data's range, which is narrow next to one that begins at 0.
        largest = max(distances, default=0.0) or 1.0
        left = min(0.0, min(distances, default=0.0) - _MARGIN * largest)
        panels[0].set_xlim(left, largest + _MARGIN * (largest - left))
        panels[0].set_ylim(-0.03, 1.05)
        for place, panel in enumerate(panels[:num_panels]):
            light_grid(panel)
            if grid_size is not None:
                _mark_uniform(panel, grid_size, gid=f"uniform-{place}" if place else "uniform")
        for panel in panels[num_panels:]:
            panel.remove()
        if num_panels == 1:
            panels[0].set_xlabel(DISTANCE_LABEL_ONE_LINE)
            panels[0].set_ylabel(ENTROPY_LABEL)
            labels = [_label(model) for model in models]
            add_legend(figure, handles, labels, loc="outside upper left", ncols=3, handlelength=1)
        else:
            figure.supxlabel(DISTANCE_LABEL_ONE_LINE, fontsize=9.0)
            figure.supylabel(ENTROPY_LABEL, fontsize=9.0)
        step = 1 if num_layers <= _LAYERS_WITH_OWN_TICK else -(-num_layers // _LAYERS_WITH_OWN_TICK)
        scale, ticks = ScalarMappable(norm, colours), np.arange(0, num_layers, step)
        bar = colour_bar(figure, scale, list(panels[:num_panels]), ticks=ticks, aspect=32, pad=0.02)
        bar.set_label("layer (from 0)")
    return figure


def _mark_uniform(panel: Axes, grid_size: tuple[int, int], *, gid: str) -> None:
    anchor = (uniform_attention_distance(grid_size), 1.0)
    panel.plot(*anchor, marker="+", markersize=11, color=MUTED, linestyle="none", zorder=2, gid=gid)
    panel.annotate(
        "uniform attention",
        anchor,
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color=MUTED,
        fontsize=8,
        annotation_clip=False,
    )


def training_curves(models: Sequence[ModelHeads]) -> Figure:
    """Training loss, validation loss and validation accuracy over epochs, for the models that have a history."""
    check_labels(models)
    if all(model.history is None for model in models):
        raise InputError("no model has a training history, so there are no curves to draw")
    return _courses(models, {title: partial(_of_history, column) for column, title in _COURSES.items()})[0]


def locality_courses(models: Sequence[ModelHeads]) -> Figure:
    """The smallest distance of any head and the validation accuracy over epochs, of models measured all through
    training."""
    check_labels(models)
    accuracy = {_COURSES["val_acc"]: partial(_of_history, "val_acc")}
    figure, panels = _courses(models, {"MAD of the most local head": _most_local, **accuracy})
    grids = {grid for model in models for grid in (model.grids or {}).values()}
    if len(grids) == 1:
        draw_uniform_line(panels[0], uniform_attention_distance(grids.pop()), horizontal=True, gid="uniform")
    return figure


def _of_history(column: str, model: ModelHeads) -> "pd.Series[float] | None":
    return None if model.history is None else model.history.set_index("epoch")[column].sort_index()


def _most_local(model: ModelHeads) -> "pd.Series[float]":
    return model.heads.groupby("epoch")["mad"].min()


def _courses(
    models: Sequence[ModelHeads], quantities: "Mapping[str, Callable[[ModelHeads], pd.Series[float] | None]]"
) -> tuple[Figure, list[Axes]]:
    """A panel for each quantity (title → its values by epoch), a line in it for each model that has it."""
    with house_style():
        figure = Figure(figsize=(2.8 * len(quantities), 2.9), layout="constrained")
        panels = list(figure.subplots(1, len(quantities), sharex=True))
        handles = {}
        for panel, (title, values_of) in zip(panels, quantities.items(), strict=True):
            for index, model in enumerate(models):
                if (values := values_of(model)) is None:
                    continue
                style = _looks(models)[model.label]
                panel.plot(
                    values.index,
                    values,
                    **style.look_with(),
                    linewidth=1.5,
                    markersize=4,
                    markevery=max(1, len(values) // 7),
                    gid=f"{values.name}-model{index}",
                )
                handles[_label(model)] = style.handle(markersize=4)
            panel.set_title(title)
            panel.set_xlabel("epoch")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
            light_grid(panel)
            if title == _COURSES["val_acc"]:
                panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        add_legend(figure, list(handles.values()), list(handles), loc="outside upper left", ncols=4)
    return figure, panels


def _looks(models: Sequence[ModelHeads]) -> dict[str, ModelStyle]:
    return looks([model.label for model in models])


def _label(model: ModelHeads) -> str:
    return shorten(model.label, FIGURE_LABEL_LIMIT)


FIGURES = ("mad-profiles", "mad-entropy-plane", "heatmaps")
"""What `write_figures` calls them."""


def write_figures(
    models: Sequence[ModelHeads], folder: Path, *, grid_size: tuple[int, int] | None = None
) -> tuple[Path, ...]:
    """S1's three figures of these models, as PNG and SVG; the files written."""
    figures = (
        mad_profiles(models, grid_size=grid_size),
        mad_entropy_plane(models, grid_size=grid_size),
        heatmaps(models),
    )
    return tuple(
        path for name, figure in zip(FIGURES, figures, strict=True) for path in save_figure(figure, folder, name)
    )
