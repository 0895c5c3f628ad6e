"""The plane of distance and entropy while the heads move through it, without and with CutMix."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nearsight.report.figures.style import ENTROPY_LABEL, INK, MUTED, house_style, light_grid
from nearsight.report.study.animation import Animation
from nearsight.report.study.drawing import distances_from_zero
from nearsight.report.study.emergence.course import LOCAL, Array, Course, conditions_of, courses
from nearsight.report.study.notes import add_footnote, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults

MOST_FRAMES = 60


def heads_in_motion(results: StudyResults) -> Animation:
    """A panel per condition, a point per head, a frame per epoch; early epochs, in which most happens, are kept."""
    found = courses(results)
    labels = conditions_of(found)
    seeds = seeds_in_words(sum(course.condition == label for course in found) for label in labels)
    notes = [f"One point per head; the heads of {seeds}; dark: first layers. Dotted: local.", *scale_notes(results)]
    return Animation(
        frames=_frames(found, labels, notes),
        caption=f"Distance and entropy of every head of {', '.join(labels)} from the first epoch to the last; the "
        f"colour is the layer, the lower left corner is local and focused. The heads of {seeds} are shown.",
    )


def chosen(epochs: Sequence[float], most: int = MOST_FRAMES) -> list[float]:
    """At most so many epochs: the first and the last, and between them more of the early ones than of the late."""
    if len(epochs) <= most:
        return list(epochs)
    places = (len(epochs) - 1) * np.linspace(0, 1, most) ** 1.5
    return [epochs[place] for place in sorted({round(float(place)) for place in places})]


def _frames(found: Sequence[Course], labels: Sequence[str], notes: Sequence[str]) -> Iterator[Figure]:
    """One figure whose points move."""
    epochs = chosen(sorted(set.intersection(*({*course.epochs_E.tolist()} for course in found))))
    with house_style():
        figure = Figure(figsize=(7.2, 3.2), layout=ConstrainedLayoutEngine(wspace=0.07))
        panels = dict(
            zip(labels, figure.subplots(1, len(labels), sharex=True, sharey=True, squeeze=False)[0], strict=True)
        )
        for label, panel in panels.items():
            light_grid(panel)
            panel.axvline(LOCAL, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
            panel.set_title(label, parse_math=False)
            panel.set_xlabel("mean attention distance")
        points = [_points(panels[course.condition], course) for course in found]
        first = panels[labels[0]]
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
