"""Association of learned positions against the distance of the most local head, run by run."""

from nearsight.report.figures.style import MUTED
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes
from nearsight.report.study.positions.association import associated_runs, chance_association
from nearsight.report.study.positions.positional import ASSOCIATION, WHAT_ASSOCIATION_IS
from nearsight.report.study.scatter_by_cutmix import correlations_in_words, scatter_by_cutmix
from nearsight.report.study.table import rounded
from nearsight.study.results import StudyResults


def association_and_distance(results: StudyResults) -> Drawing:
    """A mark per run, by CutMix; a line at what chance gives, or a word where that is far away."""
    associated_runs(results)  # which says what is missing
    figure, panel = scatter_by_cutmix(
        results, ASSOCIATION, "association of learned positions (share of neighbours found)"
    )
    chance = chance_association(results.settings)
    if chance is not None:
        low, high = panel.get_xlim()
        panel.axvline(chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, gid="chance")
        panel.set_xlim(low, high)
        panel.annotate(
            "chance" if chance > low else f"← chance, {rounded(chance)}",
            (max(chance, low), 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=MUTED,
        )
    order = correlations_in_words(results, ASSOCIATION)
    add_footnote(figure, [order, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Association of a model's learned positions against the mean attention distance of its most local "
        f"head, with and without CutMix. {order} {WHAT_ASSOCIATION_IS}"
        + ("" if chance is None else f" By chance it would be {rounded(chance)}."),
    )
