"""Figures of emergence: distance and accuracy over the epochs, for the model, its layers and its heads."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from nearsight.papers.protocol.course import LOCAL, Array, Course, conditions_of, courses
from nearsight.report.conditions import noted, scale_notes
from nearsight.report.figures.looks import PALETTE, depth_of, looks, model_style, shade
from nearsight.report.figures.style import DISTANCE_LABEL, ENTROPY_LABEL, INK, MUTED, house_style, light_grid
from nearsight.report.marks import (
    Animation,
    Drawing,
    add_fitting_legend,
    add_footnote,
    distances_from_zero,
    draw_courses,
)
from nearsight.report.tables import rounded, seeds_in_words
from nearsight.study.results import StudyResults

_LOCAL_LINE = f"Dotted: {rounded(LOCAL)}, below which a head is called local."
MOST_FRAMES = 60
_DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (1, 2)), "zorder": 1}


def over_epochs(results: StudyResults) -> Drawing:
    """The most local head's distance (left) and validation accuracy (right) of every run."""
    found = courses(results)
    styles = looks(conditions_of(found))
    lines = {label: {"color": style.colour, "linestyle": style.dash} for label, style in styles.items()}
    with house_style():
        figure = Figure(figsize=(7.2, 3.4), layout=ConstrainedLayoutEngine(wspace=0.06))
        left, right = figure.subplots(1, 2, sharex=True)
        for course in found:
            look, name = {**lines[course.condition], "linewidth": 1.3}, f"{course.condition}-{course.seed}"
            left.plot(course.epochs_E, course.smallest, **look, gid=f"smallest-{name}")
            right.plot(course.accuracy.index, 100 * course.accuracy, **look, gid=f"accuracy-{name}")
        left.axhline(LOCAL, **_DOTTED, gid="local")
        left.set_ylim(bottom=0.0)
        left.set_ylabel(f"smallest {DISTANCE_LABEL}")
        right.set_ylabel("validation accuracy, %")
        for panel in (left, right):
            light_grid(panel)
            panel.set_xlabel("epoch")
        add_fitting_legend(figure, [Line2D([], [], **look) for look in lines.values()], list(lines))
    words = f"A line is a run; {_seeds(found)} per condition. {_LOCAL_LINE}"
    caption = "The distance of the most local head (left) and the validation accuracy (right) over the epochs."
    return noted(figure, results, caption, words)


def layers_over_epochs(results: StudyResults) -> Drawing:
    """The mean distance of each layer's heads over the epochs, a panel per condition; means over seeds."""
    found = courses(results)
    layers = list(range(found[0].mad_ELH.shape[1]))
    # Solid and dashed by turns: neighbours stay apart where a printer loses the shades.
    looks: list[dict[str, Any]] = [
        {"color": shade(PALETTE[0], depth_of(layer, layers)), "linestyle": model_style(layer % 2).dash}
        for layer in layers
    ]
    with house_style():
        figure = Figure(figsize=(7.2, 3.4), layout=ConstrainedLayoutEngine(wspace=0.09))
        panels = _panels(figure, conditions_of(found), "epoch")
        for label, panel in panels.items():
            epochs, numbers_SEL = _of_seeds(found, label)
            for layer, look in enumerate(looks):
                name, numbers_SE = f"{label}-{layer}", numbers_SEL[:, :, layer]
                draw_courses(panel, epochs, list(numbers_SE), look["color"], f"seeds-{name}")
                panel.plot(epochs, numbers_SE.mean(0), **look, gid=name)
            light_grid(panel)
            panel.axhline(LOCAL, **_DOTTED, gid="local")
        first = next(iter(panels.values()))
        first.set_ylim(bottom=0.0)
        first.set_ylabel(DISTANCE_LABEL)
        add_fitting_legend(figure, [Line2D([], [], **look) for look in looks], [f"L{layer}" for layer in layers])
    thin = "" if _seeds(found) == "1 seed" else "; thin: seeds"
    words = f"Mean over a layer's heads and over {_seeds(found)}{thin}. {_LOCAL_LINE}"
    return noted(figure, results, "The mean attention distance of every layer over the epochs.", words)


def layers_by_epoch(results: StudyResults) -> Drawing:
    """Layer × epoch: the mean distance of a layer's heads (top) and its most local head (bottom) as colours."""
    found = courses(results)
    labels = conditions_of(found)
    rows: dict[str, Callable[..., Array]] = {
        "mean over\na layer's heads": np.nanmean,
        "most local head\nof a layer": np.nanmin,
    }
    with house_style():
        figure = Figure(figsize=(7.2, 4.2), layout=ConstrainedLayoutEngine(wspace=0.08, hspace=0.06))
        panels = figure.subplots(len(rows), len(labels), sharex=True, sharey=True, squeeze=False)
        largest = max(float(np.nanmax(np.nanmean(course.mad_ELH, axis=2))) for course in found)
        for (title, reduce), row in zip(rows.items(), panels, strict=True):
            for panel, label in zip(row, labels, strict=True):
                epochs, numbers_SEL = _of_seeds(found, label, reduce)
                image = panel.pcolormesh(
                    _edges(epochs),
                    np.arange(numbers_SEL.shape[2] + 1) - 0.5,
                    numbers_SEL.mean(0).T,
                    cmap="viridis",
                    vmin=0.0,
                    vmax=largest,
                    rasterized=True,
                )
                panel.tick_params(length=0)
                panel.spines[:].set_visible(False)
            row[0].set_ylabel(f"layer, from 0\n({title})")
        for panel, label in zip(panels[0], labels, strict=True):
            panel.set_title(label, parse_math=False)
        for panel in panels[-1]:
            panel.set_xlabel("epoch")
        panels[0, 0].set_yticks(range(found[0].mad_ELH.shape[1]))
        panels[0, 0].invert_yaxis()
        bar = figure.colorbar(image, ax=panels.ravel().tolist(), aspect=28, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label(DISTANCE_LABEL, fontsize=8.5)
    caption = (
        "The mean attention distance of every layer (top: mean over its heads; bottom: its most local head) over the "
        "epochs."
    )
    return noted(figure, results, caption, f"Mean over {_seeds(found)}.")


def _of_seeds(found: Sequence[Course], label: str, reduce: Callable[..., Array] = np.nanmean) -> tuple[Array, Array]:
    """Epochs [E] and a number per seed, epoch and layer [S, E, L], of the epochs that all seeds have."""
    here = [course for course in found if course.condition == label]
    shared = np.array(sorted(set.intersection(*({*course.epochs_E} for course in here))))
    numbers = [reduce(course.mad_ELH[np.isin(course.epochs_E, shared)], axis=2) for course in here]
    return shared, np.stack(numbers)


def _edges(epochs: Array) -> Array:
    """Where the cells of a map begin and end, with the epochs in their middles."""
    if len(epochs) == 1:
        return np.array([epochs[0] - 0.5, epochs[0] + 0.5])
    middles = (epochs[:-1] + epochs[1:]) / 2
    return np.concatenate([[1.5 * epochs[0] - 0.5 * epochs[1]], middles, [1.5 * epochs[-1] - 0.5 * epochs[-2]]])


def _panels(figure: Figure, labels: Sequence[str], axis: str) -> dict[str, Axes]:
    """One per condition, side by side on the same scales."""
    panels = figure.subplots(1, len(labels), sharex=True, sharey=True, squeeze=False)[0]
    for panel, label in zip(panels, labels, strict=True):
        panel.set_title(label, parse_math=False)
        panel.set_xlabel(axis)
    return dict(zip(labels, panels, strict=True))


def _seeds(found: Sequence[Course]) -> str:
    return seeds_in_words(Counter(course.condition for course in found).values())


def heads_in_motion(results: StudyResults) -> Animation:
    """The plane of distance and entropy while the heads move through it: a panel per condition, a point per head, a
    frame per epoch; early epochs, in which most happens, are kept."""
    found = courses(results)
    seeds = _seeds(found)
    notes = [f"One point per head; the heads of {seeds}; dark: first layers. Dotted: local.", *scale_notes(results)]
    return Animation(
        frames=_frames(found, notes),
        caption=f"Distance and entropy of every head of {', '.join(conditions_of(found))} from the first epoch to the "
        f"last; the colour is the layer, the lower left corner is local and focused. The heads of {seeds} are shown.",
    )


def chosen(epochs: Sequence[float], most: int = MOST_FRAMES) -> list[float]:
    """At most so many epochs: the first and the last, and between them more of the early ones than of the late."""
    if len(epochs) <= most:
        return list(epochs)
    places = (len(epochs) - 1) * np.linspace(0, 1, most) ** 1.5
    return [epochs[place] for place in sorted({round(float(place)) for place in places})]


def _frames(found: Sequence[Course], notes: Sequence[str]) -> Iterator[Figure]:
    """One figure whose points move."""
    epochs = chosen(sorted(set.intersection(*({*course.epochs_E.tolist()} for course in found))))
    with house_style():
        figure = Figure(figsize=(7.2, 3.2), layout=ConstrainedLayoutEngine(wspace=0.07))
        panels = _panels(figure, conditions_of(found), "mean attention distance")
        for panel in panels.values():
            light_grid(panel)
            panel.axvline(LOCAL, **_DOTTED)
        points = [_points(panels[course.condition], course) for course in found]
        first = next(iter(panels.values()))
        distances_from_zero(first, max(float(np.nanmax(course.mad_ELH)) for course in found))
        first.set_ylim(-0.03, 1.05)
        first.set_ylabel(ENTROPY_LABEL)
        title = figure.suptitle("epoch", x=0.99, ha="right", fontsize=10, color=INK)
        add_footnote(figure, notes)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # nothing but the points moves, and frames take less time
    for epoch in epochs:
        title.set_text(f"epoch {epoch:.0f}")
        for course, drawn in zip(found, points, strict=True):
            place = int(np.flatnonzero(course.epochs_E == epoch)[0])
            drawn.set_offsets(_in_plane(course, place))
        yield figure


def _points(panel: Axes, course: Course) -> PathCollection:
    """The heads of a run, those of the first layers on top."""
    _, num_layers, num_heads = course.mad_ELH.shape
    layer = np.repeat(np.arange(num_layers)[::-1], num_heads)
    distance, entropy = _in_plane(course, 0).T
    return panel.scatter(
        distance,
        entropy,
        s=16,
        c=layer,
        cmap="viridis",
        vmin=0,
        vmax=max(num_layers - 1, 1),
        edgecolors=INK,
        linewidths=0.3,
        zorder=3,
    )


def _in_plane(course: Course, place: int) -> Array:
    """Distance and entropy of every head [L·H, 2], from the last layer to the first."""
    both = [numbers_ELH[place, ::-1].ravel() for numbers_ELH in (course.mad_ELH, course.entropy_ELH)]
    return np.column_stack(both)
