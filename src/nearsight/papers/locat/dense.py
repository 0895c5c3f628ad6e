"""What S2 claims about frozen features: its numbers, and each comparison applied to them and to ours.

One number each, without a spread. Scores are fractions.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.backbones import accuracy_and_segmentation, features_table
from nearsight.papers.locat.inducers import dense_questions, gains_figure, gains_table
from nearsight.papers.locat.numbers import PublishedTable, above
from nearsight.report.claims import Claim
from nearsight.report.probe_tables import difference, difference_over_images, ends_in_words
from nearsight.report.probes import ProbeResults, knn_measure, title_of
from nearsight.report.responses import of_shared_seeds
from nearsight.report.rules import Finding, judge_sign, order_rule
from nearsight.report.studies import PROBES, report_on
from nearsight.report.tables import percent, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval


class _Published(NamedTuple):
    """A score in the paper, on one data set or several."""

    scale: str
    """What its models are and were trained on."""
    tables: tuple[PublishedTable, ...]
    """Scores stand where a table of accuracies has accuracies."""


def _miou(source: str, dataset: str, tiny: Mapping[str, float], base: Mapping[str, float]) -> PublishedTable:
    """From per cent."""
    sizes = {"Tiny": tiny, "Base": base}
    scores = {size: {label: round(value / 100, 4) for label, value in row.items()} for size, row in sizes.items()}
    return PublishedTable(source=source, dataset=dataset, accuracy=scores)


_SUPERVISED = "ViT-T and ViT-B, 6 and 86 M parameters, 224 pixels, trained on ImageNet-1K"
_SELF_SUPERVISED = "ViT-S, 22 M parameters, 224 pixels, 50 epochs of DINO on ImageNet-1K"
_CONDITIONS = (
    *(*s2.CORE, s2.VIT_WITHOUT_POSITIONS, s2.LOCAT_WITHOUT_POSITIONS),
    *(s2.GAP, s2.INVERSE, s2.LAPLACE),
)
_MIOU = {
    "ADE20K": (
        (17.30, 18.98, 21.60, 23.47, 15.13, 22.69, 19.65, 22.18, 21.67),
        (28.40, 30.26, 29.89, 32.64, 24.59, 29.73, 27.99, 28.42, 29.74),
    ),
    "PASCAL Context": (
        (33.71, 34.97, 37.93, 38.57, 31.94, 38.15, 34.94, 38.16, 37.80),
        (43.10, 44.36, 44.03, 45.35, 40.18, 44.69, 41.97, 43.48, 44.10),
    ),
    "COCO-Stuff": (
        (20.29, 21.51, 25.85, 26.15, 19.35, 26.05, 22.86, 25.25, 25.56),
        (30.43, 32.21, 32.16, 33.62, 28.79, 32.17, 29.88, 30.82, 31.95),
    ),
}
"""Data set → mIoU of the conditions in per cent, Tiny and Base (Tables 1, 5 and 8)."""
_SEGMENTATION = _Published(
    _SUPERVISED,
    tuple(
        _miou("Tables 1, 5, 8", dataset, *(dict(zip(_CONDITIONS, values, strict=True)) for values in sizes))
        for dataset, sizes in _MIOU.items()
    ),
)
_RETRIEVAL = _Published(
    _SUPERVISED,
    (
        _miou("Table 4", "PASCAL VOC", {s2.VIT: 39.2, s2.LOCAT: 50.3}, {s2.VIT: 55.8, s2.LOCAT: 58.7}),
        _miou("Table 4", "ADE20K", {s2.VIT: 12.0, s2.LOCAT: 15.2}, {s2.VIT: 19.5, s2.LOCAT: 21.5}),
    ),
)
_OTHERS = tuple(name for name in s2.BACKBONES if name != s2.VIT)
"""Backbones beside ViT, in the order of the numbers below."""


def _of_backbones(source: str, dataset: str, tiny: tuple[float, ...], base: tuple[float, ...]) -> PublishedTable:
    labels = [label for name in _OTHERS for label in s2.BACKBONES[name]]
    return _miou(source, dataset, *(dict(zip(labels, values, strict=True)) for values in (tiny, base)))


_OTHERS_SEGMENTATION = _Published(
    "Tiny and Base, 224 pixels, trained on ImageNet-1K",
    (
        _of_backbones(
            "Table 1",
            "ADE20K",
            (15.98, 24.39, 19.17, 24.48, 25.58, 26.52, 20.33, 21.62),
            (27.93, 32.71, 31.38, 34.94, 31.90, 32.89, 32.20, 35.69),
        ),
        _of_backbones(
            "Table 1",
            "PASCAL Context",
            (33.45, 39.90, 38.16, 40.79, 36.78, 37.65, 36.36, 37.22),
            (41.81, 46.14, 48.83, 49.24, 40.11, 41.44, 47.31, 49.20),
        ),
        _of_backbones(
            "Table 1",
            "COCO-Stuff",
            (19.58, 27.38, 22.75, 27.98, 28.34, 29.09, 22.13, 23.87),
            (28.99, 34.12, 34.35, 36.37, 33.60, 34.20, 34.65, 35.84),
        ),
    ),
)
_OTHERS_RETRIEVAL = _Published(
    "Tiny and Base, 224 pixels, trained on ImageNet-1K",
    (
        _of_backbones(
            "Table 4",
            "PASCAL VOC",
            (39.4, 52.3, 50.7, 54.7, 45.2, 45.3, 40.0, 45.5),
            (55.5, 60.3, 61.0, 61.4, 57.6, 62.8, 58.5, 63.8),
        ),
        _of_backbones(
            "Table 4",
            "ADE20K",
            (12.5, 15.9, 16.0, 17.5, 16.1, 16.3, 13.3, 14.5),
            (19.4, 22.8, 22.4, 23.7, 23.3, 24.6, 21.6, 23.7),
        ),
    ),
)
_DINO_VIT, _DINO_LOCAT = f"DINO {s2.VIT}", f"DINO {s2.LOCAT}"
_DINO = {
    "linear": (0.6552, 0.6765),
    knn_measure(10): (0.6169, 0.6396),
    knn_measure(20): (0.6153, 0.6374),
    knn_measure(100): (0.5930, 0.6119),
    knn_measure(200): (0.5790, 0.5978),
}
"""Measure → accuracy of ViT and LocAt (Table 3)."""


def _dino(vit: float, locat: float) -> _Published:
    scores = {"Small": {_DINO_VIT: vit, _DINO_LOCAT: locat}}
    return _Published(_SELF_SUPERVISED, (PublishedTable(source="Table 3", dataset="ImageNet-1K", accuracy=scores),))


_ORDER = (
    f"{order_rule(s2.LARGER)} What other test images would change stands in brackets and decides nothing: a claim is "
    "about training, of which a single seed says nothing."
)
_WHOLE, _RETRIEVED, _PRETRAINED = "S2 §5.2, Table 1", "S2 §5.2, Table 4", "S2 §5.2, Table 3"
_PARTS, _KERNELS = "S2 §5.4, Table 5", "S2 App. E, Table 8"
_FAMILIES = {
    **dict.fromkeys((_WHOLE, _RETRIEVED), "LocAt's features (Tables 1 and 4)"),
    **{_PARTS: "parts (Table 5)", _KERNELS: "kernels (Table 8)", _PRETRAINED: "DINO (Table 3)"},
}
"""Where the paper makes a claim → the claims it is corrected with."""


def _claim(
    probed: ProbeResults,
    measure: str,
    published: _Published,
    id: str,
    text: str,
    source: str,
    contrast: s2.Contrast,
) -> tuple[str, Claim]:
    """That one condition scores higher than another, or than the best of some."""
    words = "; ".join(f"{table.in_words(contrast)} ({table.dataset})" for table in published.tables)
    return measure, Claim(
        id=id,
        text=text,
        source=source,
        paper=f"{words} points: {published.scale}",
        rule=f"{_ORDER} {s2.EACH}" if contrast.parts else _ORDER,
        needs=contrast.needs,
        family=_FAMILIES[source],
        judge=partial(_judge, probed, measure, contrast),
    )


def _judge(probed: ProbeResults, measure: str, contrast: s2.Contrast, results: StudyResults) -> Finding:
    if measure not in results.runs:
        raise InputError(f"no model has a {title_of(measure)}")
    values = of_shared_seeds(results.runs, measure, contrast.needs, title_of(measure))
    ours, scale = mean_interval(contrast.of(values)), _scale_of(probed, measure, contrast.needs)
    judge = partial(s2.judge_contrast, contrast, values, partial(judge_sign, sign=1, words=""))
    if contrast.parts:
        return judge(words=f"{with_interval(ours, scale=100, digits=2, signed=True)} points: {scale}")
    reference, condition = contrast.needs
    between = difference(probed, condition, reference, measure)
    before, after = (percent(float(values[label].mean())) for label in contrast.needs)
    words = f"{before} to {after} %: {between.in_words()}"
    over_images = difference_over_images(probed, condition, reference, measure)
    if between.n > 1 and over_images.has_interval:
        words += f" {ends_in_words(over_images)}"
    return replace(judge(words=f"{words} points: {scale}"), low=between.low, high=between.high)


def _scale_of(probed: ProbeResults, measure: str, conditions: tuple[str, ...]) -> str:
    """What our models are and where they were probed, in a few words."""
    rows = probed.rows[probed.rows["condition"].isin(conditions) & (probed.rows["measure"] == measure)]
    sizes = "/".join(f"{number / 1e6:.2g}" for number in sorted(set(rows["num_parameters"].round(-5))))
    pixels = "/".join(str(side) for side in sorted(set(rows["image_size"])))
    trained = " and ".join(dict.fromkeys(filter(None, rows["trained_on"])))
    words = zip(rows["data"], rows["num_images"], strict=True)
    sets = " and ".join(dict.fromkeys(f"{number:,} images of {data}" for data, number in words))
    trained_words = f", trained on {trained}" if trained else ""
    return f"{sizes} M parameters, {pixels} pixels{trained_words}; probed on {sets}"


def all_claims(probed: ProbeResults) -> list[tuple[str, Claim]]:
    """The measure of each, and the claim, which is judged by these results."""
    segments = partial(_claim, probed, "segment_miou", _SEGMENTATION)
    retrieves = partial(_claim, probed, "retrieve_miou", _RETRIEVAL)
    without = s2.LOCAT_WITHOUT_POSITIONS
    return [
        segments(
            "locat",
            "LocAt's frozen features segment better than ViT's",
            _WHOLE,
            above(s2.LOCAT, s2.VIT),
        ),
        retrieves(
            "retrieval",
            "LocAt's patches retrieve better than ViT's, without training",
            _RETRIEVED,
            above(s2.LOCAT, s2.VIT),
        ),
        *(
            _claim(
                probed,
                measure,
                published,
                f"{name.lower()}-{id}",
                f"LocAt in {name}: {text}",
                source,
                above(*reversed(s2.BACKBONES[name])),
            )
            for name in _OTHERS
            for measure, published, id, text, source in (
                ("segment_miou", _OTHERS_SEGMENTATION, "segments", "frozen features segment better", _WHOLE),
                ("retrieve_miou", _OTHERS_RETRIEVAL, "retrieves", "patches retrieve better", _RETRIEVED),
            )
        ),
        segments("gaug", "GAug alone makes features segment better", _PARTS, above(s2.GAUG, s2.VIT)),
        segments("prr", "PRR alone makes features segment better", _PARTS, above(s2.PRR, s2.VIT)),
        segments("together", "Together they make them better than the better of the two alone", _PARTS, s2.TOGETHER),
        segments(
            "without-positions",
            "Without positions LocAt segments better than ViT",
            _PARTS,
            above(without, s2.VIT_WITHOUT_POSITIONS),
        ),
        segments(
            "without-positions-beats-vit",
            "LocAt without positions segments better than ViT with them",
            _PARTS,
            above(without, s2.VIT),
        ),
        segments(
            "prr-beats-gap",
            "PRR makes features segment better than average pooling (GAP)",
            _PARTS,
            above(s2.PRR, s2.GAP),
        ),
        segments(
            "every-kernel",
            "With every kernel, Gaussian, Laplace or inverse distance, features segment better than ViT's",
            _KERNELS,
            s2.EVERY_KERNEL,
        ),
        segments("gaussian-strongest", "The Gaussian kernel gives the strongest segmentation", _KERNELS, s2.GAUSSIAN),
        *(
            _claim(
                probed,
                measure,
                _dino(*scores),
                f"dino-{measure}",
                f"Pretrained by DINO, LocAt's features are better than ViT's: {title_of(measure)}",
                _PRETRAINED,
                above(_DINO_LOCAT, _DINO_VIT),
            )
            for measure, scores in _DINO.items()
        ),
    ]


def claims_about(probed: ProbeResults) -> list[Claim]:
    """Those whose conditions are all among the models' or the study's."""
    known, asked = {*probed.planned, *probed.rows["condition"]}, set(probed.measures)
    asked_or_claimed = [*all_claims(probed), *dense_questions(probed)]
    return [claim for measure, claim in asked_or_claimed if set(claim.needs) <= known and measure in asked]


_SCALES = (
    "Each number says what it was measured on: the paper's models are larger, see larger images and were trained on "
    "more of them, and it probes them on larger data sets."
)
_NONE = ProbeResults.of([], name=PROBES)
_ALL = [claim for _, claim in (*all_claims(_NONE), *dense_questions(_NONE))]
report_on(
    PROBES,
    paper=s2.PAPER,
    claims=_ALL,
    claims_about=claims_about,
    intervals=_SCALES,
    tables=(features_table, gains_table),
    figures={"backbones": accuracy_and_segmentation, "cost": gains_figure},
)
