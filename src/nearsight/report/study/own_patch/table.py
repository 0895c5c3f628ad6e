"""A row per condition: which runs have heads that look at their own patch, and how near the others look."""

import pandas as pd

from nearsight.metrics import least_share_on_itself, next_patch_distance
from nearsight.report.own_patch import OWN_PATCH
from nearsight.report.study.conditions import ordered_conditions
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.own_patch.heads import (
    HEADS,
    OTHERS,
    grid_of,
    own_patch_bound,
    own_patch_heads,
    with_own_patch,
)
from nearsight.report.study.paper import PUBLISHED
from nearsight.report.study.table import MISSING, Table, layers_in_words, rounded, share, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

SHARE = "max_share_self"


def own_patch_table(results: StudyResults) -> Table:
    runs, heads, grid = with_own_patch(results), own_patch_heads(results), grid_of(results)
    rows, shown = [], []
    for label in ordered_conditions(results):
        here = runs[runs["condition"] == label]
        if here.empty:
            continue
        having = here[here[HEADS] > 0]
        found = heads[heads["run"].isin(having["run"])]
        others, nearest = mean_interval(here[OTHERS]), mean_interval(here["min_mad"])
        measured = having[SHARE].dropna().astype("float64")
        paper = _papers_distance(results, label)
        rows.append(
            {
                **{"condition": label, "runs": len(here), "runs_with_own_patch": len(having), "heads": len(found)},
                **{"min_mad": nearest.mean, "min_mad_of_others": others.mean, "low": others.low, "high": others.high},
                "least_share": least_share_on_itself(float(found["mad"].max()), grid) if len(found) else float("nan"),
                "paper_least_share": float("nan") if paper is None else least_share_on_itself(paper, grid),
                "scale": results.scale,
            }
        )
        shown.append(
            {
                "condition": label,
                "runs with such a head": f"{len(having)} of {len(here)}",
                "heads": str(len(found)),
                "in layer": layers_in_words(found["layer"]),
                "its own patch gets, at least": _shares([least_share_on_itself(mad, grid) for mad in found["mad"]]),
                "measured": _shares(measured.tolist()),
                "min MAD": with_interval(nearest),
                "min MAD of the others": with_interval(others),
                "the paper's head, at least": MISSING if paper is None else share(least_share_on_itself(paper, grid)),
            }
        )
    return Table(
        name="own-patch",
        title=f"{results.name}: heads that look at their own patch",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            f"Such a head has a distance below {share(OWN_PATCH)} of that to the next patch, which is "
            f"{rounded(next_patch_distance(grid))} of the diagonal. What it does not spend on the query's own patch it "
            "spends at that distance or farther, so that its own patch gets at least 1 − distance / distance of the "
            "next patch of its attention on patches.",
            "Measured: the largest share of a run that a head spends on the query's own patch, CLS counted too, where "
            "the run says it. The others: all heads but these. ± is half the 95 % interval over seeds.",
            *missing_notes(results),
        ),
    )


def what_they_look_at(results: StudyResults) -> str:
    """A sentence: how many such heads there are, what they look at, and where the next ones are."""
    runs, heads, grid = with_own_patch(results), own_patch_heads(results), grid_of(results)
    having = runs[runs[HEADS] > 0]
    bound, of_all = rounded(own_patch_bound(results)), f"{len(having)} of {len(runs)} runs"
    if having.empty:
        return f"Below {share(OWN_PATCH)} of the distance to the next patch ({bound}) there is no head."
    layers = layers_in_words(heads["layer"])
    counts = sorted(set(having[HEADS]))
    number = "one head each" if counts == [1] else f"{_ends([str(count) for count in counts])} heads each"
    shares = _shares([least_share_on_itself(mad, grid) for mad in heads["mad"]])
    measured = having[SHARE].dropna().astype("float64").tolist()
    told = f" ({_shares(measured)} measured)" if measured else ""
    next_ones = _ends([rounded(value) for value in sorted(having[OTHERS].dropna())])
    others = "" if next_ones == MISSING else f" The next nearest heads of these runs are at {next_ones}."
    return (
        f"Heads that look at their own patch, those below {share(OWN_PATCH)} of the distance to the next one "
        f"({bound}), are in {of_all}: {number}, in {layers}, with at least {shares} of their attention on it{told}."
        f"{others}"
    )


def _papers_distance(results: StudyResults, label: str) -> float | None:
    published = PUBLISHED.get(results.name)
    return getattr(published.conditions.get(label), "min_mad", None) if published else None


def _shares(values: list[float]) -> str:
    return _ends([share(value) for value in sorted(values)])


def _ends(words: list[str]) -> str:
    if not words:
        return MISSING
    return words[0] if words[0] == words[-1] else f"{words[0].removesuffix(' %')} to {words[-1]}"
