"""Association of learned positions against the distance of the most local head, run by run."""

from math import isnan
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, add_legend, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes
from nearsight.report.study.positions.association import (
    associated_runs,
    chance_association,
    correlations,
    grouping,
    groups,
)
from nearsight.report.study.positions.positional import ASSOCIATION, WHAT_ASSOCIATION_IS
from nearsight.report.study.positions.rank_correlation import RankCorrelation
from nearsight.report.study.table import probability, rounded
from nearsight.study.results import StudyResults


def association_and_distance(results: StudyResults) -> Drawing:
    """A mark per run, by CutMix; a line at what chance gives."""
    runs, factor, words = associated_runs(results).dropna(subset=["min_mad"]), grouping(results), groups(results)
    if runs.empty:
        raise InputError("no run has both learned positions and measured heads")
    chance = chance_association(results.settings)
    here = {level: told for level, told in words.items() if level in set(runs[factor])}
    with house_style():
        figure = Figure(figsize=(6.2, 4.0), layout="constrained")
        panel = figure.subplots()
        for level in here:
            group = runs[runs[factor] == level]
            panel.plot(group[ASSOCIATION], group["min_mad"], **_look(results, level), gid=f"runs-{level}")
        panel.set_xlim(0, 1.02)
        panel.set_ylim(0, 1.1 * float(runs["min_mad"].max()))
        if chance is not None:
            panel.axvline(chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, gid="chance")
            panel.annotate(
                "chance",
                (chance, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=MUTED,
            )
        panel.set_xlabel("association of learned positions (share of neighbours found)")
        panel.set_ylabel("MAD of the most local head")
        light_grid(panel)
        handles = [Line2D([], [], **_look(results, level)) for level in here]
        add_legend(figure, handles, list(here.values()), loc="outside upper left", ncols=2, handlelength=1.2)
    told = "; ".join(f"{name} {_in_words(found)}" for name, found in correlations(results).items())
    order = f"One mark per run. Rank correlation: {told}."
    add_footnote(figure, [order, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Association of a model's learned positions against the mean attention distance of its most local "
        f"head, with and without CutMix. {order} {WHAT_ASSOCIATION_IS}"
        + ("" if chance is None else f" Dotted: chance, {rounded(chance)}."),
    )


def _in_words(found: RankCorrelation) -> str:
    if isnan(found.value):
        return f"none (n = {found.n})"
    return f"{rounded(found.value, 2, signed=True)} (n = {found.n}, p = {probability(found.p)})"


def _look(results: StudyResults, level: str) -> dict[str, Any]:
    """Without CutMix it is the second everywhere."""
    place = results.factors[grouping(results)].index(level)
    style = model_style({0: 1, 1: 0}.get(place, place))
    return {
        **{"color": style.colour, "marker": style.marker, "markersize": 7, "linestyle": "none"},
        # Runs that lie on one another show through.
        **{"markeredgecolor": "white", "markeredgewidth": 0.6, "alpha": 0.75},
    }
