"""The contrasts of `mixing-*` as a figure."""

from collections.abc import Sequence

from nearsight.errors import InputError
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.forest import Row, forest
from nearsight.report.study.mixing.contrasts import ALL, WHOLE, Contrast, fit_of
from nearsight.report.study.notes import add_footnote, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults

_ADD_UP = ": the cut, the other image and its label add up to CutMix itself (first row)"


def contrasts(results: StudyResults, asked: Sequence[Contrast] = ALL, about: str = _ADD_UP) -> Drawing:
    """What each part of CutMix does to the most local head, under what CutMix does in all."""
    fit = fit_of(results)
    rows = []
    for contrast in asked:
        try:
            estimate = fit.estimate(contrast.weights)
        except InputError:
            continue
        rows.append(Row(label=contrast.name, estimate=estimate, is_reference=contrast.name == WHOLE.name))
    if not rows:
        raise InputError("no two conditions that it compares have a run yet")
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    told = f"{seeds[0].upper()}{seeds[1:]} per condition; bars: 95 % intervals, one noise for all conditions."
    add_footnote(figure, [told, *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"What each part of CutMix changes in the distance of the most local head{about}. {told}",
    )
