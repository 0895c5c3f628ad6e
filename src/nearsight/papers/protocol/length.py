"""Early stopping decides how long a run trains: do those that train longer have a more local head?

The paper asks nothing of the kind, and reports no numbers of epochs. How long a run trains is not set by the study, so
that a link here is an observation: whatever makes runs go on may also make their heads local.
"""

from functools import partial

import pandas as pd

from nearsight.papers.protocol.links import (
    correlations,
    correlations_in_words,
    groups,
    judge_link,
    link,
    link_rule,
    measured_parts,
    scatter_by_cutmix,
)
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import missing_notes, scale_notes
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.rules import Finding
from nearsight.report.study_tables import NOT_CORRECTED
from nearsight.report.tables import Table, probability, rounded, span
from nearsight.study.results import StudyResults
from nearsight.study.statistics.rank_correlation import METHOD

EPOCHS = "epochs"
ENDS = ("min", "max")
RULE = link_rule("epochs")
NOT_SET = (
    "Early stopping ended each run, not the study: a link is an observation, and what makes a run go on may also make "
    "its heads local."
)


def _judge(level: int, results: StudyResults) -> Finding:
    """Of the runs at a level of the factor that is CutMix: its last, with it, or its first."""
    return judge_link(results, EPOCHS, list(groups(results).values())[level])


LENGTH_CLAIMS = tuple(
    Claim(
        id=id,
        text=f"Do runs that train longer have a more local head: {words}?",
        source=OURS,
        rule=RULE,
        judge=partial(_judge, level),
    )
    for id, level, words in (
        ("longer-with-cutmix", -1, "those with CutMix"),
        ("longer-without-cutmix", 0, "those without"),
    )
)


def length_table(results: StudyResults) -> Table:
    """A row per group of runs: how long they trained, how local their heads are, and whether these go together."""
    rows, shown = [], []
    found_in = correlations(results, EPOCHS)
    for name, part in measured_parts(results, EPOCHS).items():
        found = found_in[name]
        if part.empty:
            continue
        numbers = {column: (float(part[column].min()), float(part[column].max())) for column in (EPOCHS, "min_mad")}
        ends = {f"{column}_{end}": x for column, pair in numbers.items() for end, x in zip(ENDS, pair, strict=True)}
        tested = {"correlation": found.value, "low": found.low, "high": found.high, "p": found.p, "exact": found.exact}
        rows.append({"group": name, "runs": found.n, **ends, **tested, "answer": link(found), "scale": results.scale})
        low, high = (rounded(end, 2, signed=True) for end in (found.low, found.high))
        shown.append(
            {
                "runs": f"{name} ({found.n})",
                "epochs": span(*(f"{end:.0f}" for end in numbers[EPOCHS])),
                "min MAD": span(*(rounded(end) for end in numbers["min_mad"])),
                "rank correlation": rounded(found.value, 2, signed=True),
                "95 % interval": span(low, high),
                "p": probability(found.p) + (" (exact)" if found.exact else ""),
                "longer, more local?": f"**{link(found)}**",
            }
        )
    return Table(
        name="training-length",
        title=f"{results.name}: do runs that train longer have a more local head?",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(NOT_SET, METHOD, RULE, NOT_CORRECTED, *missing_notes(results)),
    )


def length_and_distance(results: StudyResults) -> Drawing:
    """A mark per run, by CutMix."""
    figure, _ = scatter_by_cutmix(results, EPOCHS, "epochs until early stopping")
    order = correlations_in_words(results, EPOCHS)
    add_footnote(figure, [order, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Epochs that each run trained against the mean attention distance of its most local head, with and "
        f"without CutMix. {order} {NOT_SET}",
    )
