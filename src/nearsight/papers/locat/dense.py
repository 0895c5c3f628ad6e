"""What S2 claims about frozen features: each comparison is one function, applied to its tables and to ours alike."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from nearsight.errors import InputError
from nearsight.papers.locat import dense_numbers as dense
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.rules import judge_order
from nearsight.report.claims import Claim
from nearsight.report.probe_tables import difference, difference_over_images
from nearsight.report.probes import ProbeResults, title_of
from nearsight.report.rules import Finding, Verdict
from nearsight.report.studies import PROBES, report_on
from nearsight.report.tables import percent, rounded, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

Contrast = Callable[[pd.DataFrame], "pd.Series[float]"]
"""From a column per condition to what should be above 0, row by row: a row is a seed, or a size of the paper's."""


ORDER = (
    "*Order.* The paper's models are larger and see larger images, so the direction of a difference is compared, not "
    "its size. Reproduced: it has the paper's sign, and its 95 % interval over seeds excludes 0. In direction: it has "
    "that sign in every seed, and other test images would not turn it round: the 95 % interval over them excludes 0 "
    "(where more than two conditions are compared, the sign decides). Not reproduced: otherwise."
)


@dataclass(frozen=True, kw_only=True)
class DenseClaim:
    """That one condition scores higher than another, or than the best of some."""

    id: str
    text: str
    source: str
    measure: str
    needs: tuple[str, ...]
    contrast: Contrast
    published: dense.Published

    def claim(self, probed: ProbeResults) -> Claim:
        return Claim(
            id=self.id,
            text=self.text,
            source=self.source,
            paper=self._in_paper(),
            rule=ORDER,
            needs=self.needs,
            judge=lambda results: self._judge(results, probed),
        )

    def _in_paper(self) -> str:
        told = []
        for table in self.published.tables:
            values = self.contrast(table.frame())
            words = ", ".join(f"{size} {rounded(100 * value, 2, signed=True)}" for size, value in values.items())
            told.append(f"{words} ({table.dataset})")
        return f"{'; '.join(told)} points: {self.published.scale}"

    def _judge(self, results: StudyResults, probed: ProbeResults) -> Finding:
        if self.measure not in results.runs:
            raise InputError(f"no model has a {title_of(self.measure)}")
        values = results.runs.pivot_table(index="seed", columns="condition", values=self.measure)
        values = values.reindex(columns=list(self.needs)).dropna()
        if values.empty:
            raise InputError(f"no seed of which all have a {title_of(self.measure)}: {', '.join(self.needs)}")
        found = self.contrast(values)
        ours = mean_interval(found)
        words, scale = f"{with_interval(ours, scale=100, digits=2, signed=True)} points", scale_of(probed, self)
        if len(self.needs) > 2:
            return judge_order(found.tolist(), ours, sign=1, words=f"{words}: {scale}")
        reference, condition = self.needs
        between = difference(probed, condition, reference, self.measure)
        before, after = (percent(float(values[label].mean())) for label in self.needs)
        words = f"{before} to {after} %: {between.in_words()} points: {scale}"
        finding = judge_order(found.tolist(), ours, sign=1, words=words)
        over_images = difference_over_images(probed, condition, reference, self.measure)
        if finding.verdict == Verdict.IN_DIRECTION and over_images.has_interval and not over_images.is_sure(1):
            finding = replace(finding, verdict=Verdict.NOT_REPRODUCED)
        return replace(finding, low=between.low, high=between.high)


def _higher(
    id: str, text: str, source: str, measure: str, condition: str, reference: str, published: dense.Published
) -> DenseClaim:
    return DenseClaim(
        id=id,
        text=text,
        source=source,
        measure=measure,
        needs=(reference, condition),
        contrast=lambda scores: scores[condition] - scores[reference],
        published=published,
    )


def _segments(id: str, text: str, source: str, condition: str, reference: str) -> DenseClaim:
    return _higher(id, text, source, "segment_miou", condition, reference, dense.SEGMENTATION)


def _best_of_kernels(id: str, text: str, contrast: Contrast, *needs: str) -> DenseClaim:
    return DenseClaim(
        id=id,
        text=text,
        source="S2 App. E, Table 8",
        measure="segment_miou",
        needs=needs,
        contrast=contrast,
        published=dense.SEGMENTATION,
    )


def _beyond_both(scores: pd.DataFrame) -> "pd.Series[float]":
    return scores[s2.LOCAT] - scores[[s2.GAUG, s2.PRR]].max(axis=1)


_KERNELS = (s2.INVERSE, s2.LAPLACE)
_PARTS, _RETRIEVAL, _DINO = "S2 §5.4, Table 5", "S2 §5.2, Table 4", "S2 §5.2, Table 3"
CLAIMS: tuple[DenseClaim, ...] = (
    _segments("locat", "LocAt's frozen features segment better than ViT's", "S2 §5.2, Table 1", s2.LOCAT, s2.VIT),
    _higher(
        "retrieval",
        "LocAt's patches retrieve better than ViT's, without training",
        _RETRIEVAL,
        "retrieve_miou",
        s2.LOCAT,
        s2.VIT,
        dense.RETRIEVAL,
    ),
    _segments("gaug", "GAug alone makes features segment better", _PARTS, s2.GAUG, s2.VIT),
    _segments("prr", "PRR alone makes features segment better", _PARTS, s2.PRR, s2.VIT),
    DenseClaim(
        id="together",
        text="Together they make them better than the better of the two alone",
        source=_PARTS,
        measure="segment_miou",
        needs=(s2.GAUG, s2.PRR, s2.LOCAT),
        contrast=_beyond_both,
        published=dense.SEGMENTATION,
    ),
    _segments(
        "without-positions",
        "Without positions LocAt segments better than ViT",
        _PARTS,
        s2.LOCAT_WITHOUT_POSITIONS,
        s2.VIT_WITHOUT_POSITIONS,
    ),
    _segments(
        "without-positions-beats-vit",
        "LocAt without positions segments better than ViT with them",
        _PARTS,
        s2.LOCAT_WITHOUT_POSITIONS,
        s2.VIT,
    ),
    _segments("prr-beats-gap", "PRR makes features segment better than average pooling (GAP)", _PARTS, s2.PRR, s2.GAP),
    _best_of_kernels(
        "every-kernel",
        "With every kernel, Gaussian, Laplace or inverse distance, features segment better than ViT's",
        lambda scores: scores[[s2.LOCAT, *_KERNELS]].min(axis=1) - scores[s2.VIT],
        s2.VIT,
        s2.LOCAT,
        *_KERNELS,
    ),
    _best_of_kernels(
        "gaussian-strongest",
        "The Gaussian kernel gives the strongest segmentation",
        lambda scores: scores[s2.LOCAT] - scores[list(_KERNELS)].max(axis=1),
        s2.LOCAT,
        *_KERNELS,
    ),
    *(
        _higher(
            f"dino-{measure}",
            f"Pretrained by DINO, LocAt's features are better than ViT's: {title_of(measure)}",
            _DINO,
            measure,
            dense.DINO_LOCAT,
            dense.DINO_VIT,
            published,
        )
        for measure, published in dense.DINO.items()
    ),
)


def claims_about(results: ProbeResults) -> tuple[Claim, ...]:
    """Those whose conditions are all among the models' or the study's."""
    known = {*results.planned, *results.rows["condition"]}
    asked = set(results.measures)
    return tuple(claim.claim(results) for claim in CLAIMS if set(claim.needs) <= known and claim.measure in asked)


def scale_of(results: ProbeResults, claim: DenseClaim) -> str:
    """What our models are and where they were probed, in a few words."""
    rows = results.rows[results.rows["condition"].isin(claim.needs) & (results.rows["measure"] == claim.measure)]
    sizes = "/".join(f"{number / 1e6:.2g}" for number in sorted(set(rows["num_parameters"].round(-5))))
    pixels = "/".join(str(side) for side in sorted(set(rows["image_size"])))
    trained = " and ".join(dict.fromkeys(filter(None, rows["trained_on"])))
    told = zip(rows["data"], rows["num_images"], strict=True)
    sets = " and ".join(dict.fromkeys(f"{number:,} images of {data}" for data, number in told))
    trained_words = f", trained on {trained}" if trained else ""
    return f"{sizes} M parameters, {pixels} pixels{trained_words}; probed on {sets}"


SCALES = (
    "Beside each number stands what it is of: the paper's models are larger, see larger images and were trained on "
    "more of them, and it probes them on larger data sets."
)
report_on(PROBES, paper=s2.PAPER, claims=claims_about, intervals=SCALES)
