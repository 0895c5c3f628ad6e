"""Layer by layer: how far heads look, and what the tokens are like (S2, Figure 5)."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.report.figures.style import ModelStyle, add_legend, house_style, light_grid, model_style
from nearsight.report.study.conditions import num_seeds, ordered_conditions
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.locat.measures import layer_measures
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults

PANELS = {
    "mean_mad": "mean MAD of the heads",
    "min_mad": "MAD of the most local head",
    "locality_score": "locality score",
    "patch_cls_similarity": "patch–CLS similarity",
}


def layer_profiles(conditions: Mapping[str, str]) -> Callable[[StudyResults], Drawing]:
    """A figure of these conditions: label → its name in the legend."""
    styles = {label: model_style(place) for place, label in enumerate(conditions)}

    def draw(results: StudyResults) -> Drawing:
        present = [label for label in conditions if label in ordered_conditions(results)]
        if not present:
            raise InputError(f"it shows {', '.join(conditions)}, and none of them has a run yet")
        layers = layer_measures(results)
        with house_style():
            figure = Figure(figsize=(7.2, 5.4), layout="constrained")
            panels = figure.subplots(2, 2, sharex=True)
            for panel, (column, title) in zip(panels.flat, PANELS.items(), strict=True):
                for label in present:
                    _draw_line(panel, layers[layers["condition"] == label], column, styles[label], label)
                panel.set_title(title)
                panel.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
                light_grid(panel)
            for panel in panels[-1]:
                panel.set_xlabel("layer")
            handles = [Line2D([], [], **_line(styles[label])) for label in present]
            names = [conditions[label] for label in present]
            add_legend(figure, handles, names, loc="outside upper left", ncols=len(present))
        counts = [num_seeds(results, label) for label in present]
        lines = "Lines: 1 seed."
        if max(counts) > 1:
            lines = f"Lines: mean over {seeds_in_words(counts)}; bands: their range."
        add_footnote(figure, [lines, *missing_notes(results), *scale_notes(results)])
        return Drawing(
            figure=figure,
            caption="Layer by layer: mean attention distance of the layer's heads and of its most local one, in "
            "fractions of the grid's diagonal (top); mean cosine similarity of the patch tokens with their neighbours "
            f"and with CLS, as the layer's block gives them (bottom; S2 Figure 5). {lines} Without PRR the classifier "
            "reads CLS alone, so what the patches of the last layer attend to does not reach the loss.",
        )

    return draw


def _line(style: ModelStyle) -> dict[str, Any]:
    return {
        **{"color": style.colour, "linestyle": style.dash, "linewidth": 1.5},
        **{"marker": style.marker, "markersize": 5},
    }


def _draw_line(panel: Axes, layers: pd.DataFrame, column: str, style: ModelStyle, label: str) -> None:
    numbers = layers.groupby("layer")[column].agg(["mean", "min", "max"]).dropna()
    place = numbers.index + 1
    panel.fill_between(place, numbers["min"], numbers["max"], color=style.colour, alpha=0.18, linewidth=0)
    panel.plot(place, numbers["mean"], **_line(style), gid=f"{column}-{label}")
