"""What S2 claims about accuracy: each comparison is one function, applied to its tables and to our runs alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from nearsight.report.study.claim import Claim
from nearsight.report.study.locat import paper as s2
from nearsight.report.study.locat.measures import by_seed
from nearsight.report.study.locat.paper import PublishedTable
from nearsight.report.study.locat.rules import (
    COMPARABLE,
    NOT_WORSE,
    ORDER,
    judge_comparable,
    judge_not_worse,
    judge_order,
)
from nearsight.report.study.rules import Finding
from nearsight.report.study.table import percent, rounded, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

Contrast = Callable[[pd.DataFrame], "pd.Series[float]"]
"""From a column per condition to the number that is judged, row by row: a row is a seed, or a size of the paper's."""
Rule = Literal["higher", "lower", "comparable", "not worse"]
_RULES = {"higher": ORDER, "lower": ORDER, "comparable": COMPARABLE, "not worse": NOT_WORSE}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    id: str
    text: str
    source: str
    needs: tuple[str, ...]
    contrast: Contrast
    rule: Rule
    published: tuple[PublishedTable, ...]

    def claim(self) -> Claim:
        return Claim(
            id=self.id,
            text=self.text,
            source=self.source,
            paper="; ".join(self._in(table) for table in self.published),
            rule=_RULES[self.rule],
            needs=self.needs,
            judge=self._judge,
        )

    def _in(self, table: PublishedTable) -> str:
        told = self.contrast(table.frame())
        words = ", ".join(f"{size} {rounded(100 * value, 2, signed=True)}" for size, value in told.items())
        return f"{words} points ({table.dataset}, {table.source})"

    def _judge(self, results: StudyResults) -> Finding:
        values = by_seed(results.runs, "test_acc", self.needs)
        differences = self.contrast(values)
        ours = mean_interval(differences)
        words = f"{with_interval(ours, scale=100, digits=2, signed=True)} points"
        if len(self.needs) == 2:
            before, after = (percent(float(values[label].mean())) for label in self.needs)
            words = f"{before} to {after} %: {words}"
        if self.rule == "comparable":
            return judge_comparable(ours, words=words)
        if self.rule == "not worse":
            return judge_not_worse(ours, words=words)
        return judge_order(differences.tolist(), ours, sign=1 if self.rule == "higher" else -1, words=words)


def _gain(
    id: str, text: str, source: str, condition: str, reference: str, *published: PublishedTable, rule: Rule = "higher"
) -> Comparison:
    """`condition` minus `reference`."""
    return Comparison(
        id=id,
        text=text,
        source=source,
        needs=(reference, condition),
        contrast=lambda accuracy: accuracy[condition] - accuracy[reference],
        rule=rule,
        published=published,
    )


def _beyond_both(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[s2.LOCAT] - accuracy[[s2.GAUG, s2.PRR]].max(axis=1)


def _loses_less(accuracy: pd.DataFrame) -> "pd.Series[float]":
    with_locat = accuracy[s2.LOCAT_WITHOUT_POSITIONS] - accuracy[s2.LOCAT]
    return with_locat - (accuracy[s2.VIT_WITHOUT_POSITIONS] - accuracy[s2.VIT])


def _worst_kernel(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[[s2.LOCAT, *s2.KERNELS]].min(axis=1) - accuracy[s2.VIT]


def _gaussian_beside_others(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[s2.LOCAT] - accuracy[[*s2.KERNELS]].max(axis=1)


def _best_fixed_width(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[[*s2.FIXED]].max(axis=1) - accuracy[s2.LOCAT]


def core_claims(small_set: PublishedTable) -> tuple[Claim, ...]:
    """Of ViT, GAug, PRR and LocAt; `small_set`: the part of Table 3 that is nearest to our data."""
    parts = "S2 §5.4, Table 5"
    comparisons = (
        _gain(
            "locat",
            "LocAt raises accuracy, also on a small data set",
            "S2 §5.2, Tables 3 and 5",
            s2.LOCAT,
            s2.VIT,
            small_set,
            s2.TABLE_5,
        ),
        _gain("gaug", "GAug alone raises accuracy", parts, s2.GAUG, s2.VIT, s2.TABLE_5),
        _gain("prr", "PRR alone raises accuracy", parts, s2.PRR, s2.VIT, s2.TABLE_5),
        Comparison(
            id="together",
            text="Together they raise it further than the better of the two alone",
            source=parts,
            needs=s2.CORE[1:],
            contrast=_beyond_both,
            rule="higher",
            published=(s2.TABLE_5,),
        ),
    )
    return tuple(comparison.claim() for comparison in comparisons)


def variant_claims() -> tuple[Claim, ...]:
    """Of positions, pooling, kernels, widths and scales."""
    positions, pooling, widths = "S2 §5.4, Table 5", "S2 §5.4, Table 5", "S2 App. D, Table 7"
    without, kernels = (s2.VIT_WITHOUT_POSITIONS, s2.LOCAT_WITHOUT_POSITIONS), "S2 App. E, Table 8"
    comparisons = (
        _gain(
            "without-positions",
            "Without positions LocAt is better than ViT",
            positions,
            without[1],
            without[0],
            s2.TABLE_5,
        ),
        _gain(
            "without-positions-beats-vit",
            "LocAt without positions is better than ViT with them",
            positions,
            without[1],
            s2.VIT,
            s2.TABLE_5,
        ),
        Comparison(
            id="loses-less-without-positions",
            text="LocAt loses less without positions than ViT does",
            source=positions,
            needs=(s2.VIT, s2.LOCAT, *without),
            contrast=_loses_less,
            rule="higher",
            published=(s2.TABLE_5,),
        ),
        _gain("gap", "Average pooling (GAP) raises ViT's accuracy", pooling, s2.GAP, s2.VIT, s2.TABLE_5),
        _gain("prr-beats-gap", "PRR raises it more than GAP", pooling, s2.PRR, s2.GAP, s2.TABLE_5),
        Comparison(
            id="every-kernel",
            text="With every kernel, Gaussian, Laplace or inverse distance, LocAt is better than ViT",
            source=kernels,
            needs=(s2.VIT, s2.LOCAT, *s2.KERNELS),
            contrast=_worst_kernel,
            rule="higher",
            published=(s2.TABLE_8,),
        ),
        Comparison(
            id="gaussian-competitive",
            text="The Gaussian kernel stays competitive with the other two in accuracy",
            source=kernels,
            needs=(s2.LOCAT, *s2.KERNELS),
            contrast=_gaussian_beside_others,
            rule="not worse",
            published=(s2.TABLE_8,),
        ),
        _gain(
            "width-from-input",
            "A width from the input is better than one from the query",
            widths,
            s2.FROM_INPUT,
            s2.LOCAT,
            s2.TABLE_7,
        ),
        _gain(
            "isotropic",
            "One width for both axes performs comparably",
            widths,
            s2.ISOTROPIC,
            s2.LOCAT,
            s2.TABLE_7,
            rule="comparable",
        ),
        Comparison(
            id="fixed-width",
            text="A fixed width, even the best of three, is worse than one from the query",
            source=widths,
            needs=(s2.LOCAT, *s2.FIXED),
            contrast=_best_fixed_width,
            rule="lower",
            published=(s2.TABLE_7,),
        ),
        _gain("no-scale", "Without a scale LocAt is worse", widths, s2.NO_SCALE, s2.LOCAT, s2.TABLE_7, rule="lower"),
        _gain(
            "auto-scale",
            "The automatic scale performs close to the learned one",
            widths,
            s2.AUTO_SCALE,
            s2.LOCAT,
            s2.TABLE_7,
            rule="comparable",
        ),
    )
    return tuple(comparison.claim() for comparison in comparisons)
