"""What S2 published of frozen features, as data, to stand beside ours.

S2 is "Locality-Attending Vision Transformer" (ICLR 2026, arXiv 2603.04892). Its numbers of other backbones than ViT are
left out, since what is probed here is a ViT. One number each, without a spread. Scores are fractions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nearsight.papers.locat.numbers import (
    GAP,
    GAUG,
    INVERSE,
    LAPLACE,
    LOCAT,
    LOCAT_WITHOUT_POSITIONS,
    PRR,
    VIT,
    VIT_WITHOUT_POSITIONS,
    PublishedTable,
)
from nearsight.report.probes import knn_measure

SUPERVISED = "ViT-T and ViT-B, 6 and 86 M parameters, 224 pixels, trained on ImageNet-1K"
SELF_SUPERVISED = "ViT-S, 22 M parameters, 224 pixels, 50 epochs of DINO on ImageNet-1K"
DINO_VIT, DINO_LOCAT = f"DINO {VIT}", f"DINO {LOCAT}"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A score in the paper, on one data set or several."""

    scale: str
    """What its models are and were trained on."""
    tables: tuple[PublishedTable, ...]
    """Scores stand where a table of accuracies has accuracies."""


def _miou(source: str, dataset: str, tiny: Mapping[str, float], base: Mapping[str, float]) -> PublishedTable:
    return PublishedTable(
        source=source,
        dataset=dataset,
        accuracy={
            size: {label: round(value / 100, 4) for label, value in row.items()}
            for size, row in (("Tiny", tiny), ("Base", base))
        },
    )


_CONDITIONS = (VIT, GAUG, PRR, LOCAT, VIT_WITHOUT_POSITIONS, LOCAT_WITHOUT_POSITIONS, GAP, INVERSE, LAPLACE)
_SEGMENTATION = {
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

SEGMENTATION = Published(
    scale=SUPERVISED,
    tables=tuple(
        _miou(
            "Tables 1, 5, 8",
            dataset,
            *(dict(zip(_CONDITIONS, values, strict=True)) for values in sizes),
        )
        for dataset, sizes in _SEGMENTATION.items()
    ),
)
RETRIEVAL = Published(
    scale=SUPERVISED,
    tables=(
        _miou("Table 4", "PASCAL VOC", {VIT: 39.2, LOCAT: 50.3}, {VIT: 55.8, LOCAT: 58.7}),
        _miou("Table 4", "ADE20K", {VIT: 12.0, LOCAT: 15.2}, {VIT: 19.5, LOCAT: 21.5}),
    ),
)
_DINO = {
    "linear": (0.6552, 0.6765),
    knn_measure(10): (0.6169, 0.6396),
    knn_measure(20): (0.6153, 0.6374),
    knn_measure(100): (0.5930, 0.6119),
    knn_measure(200): (0.5790, 0.5978),
}
"""Measure → accuracy of ViT and LocAt (Table 3)."""

DINO = {
    measure: Published(
        scale=SELF_SUPERVISED,
        tables=(
            PublishedTable(
                source="Table 3", dataset="ImageNet-1K", accuracy={"Small": {DINO_VIT: vit, DINO_LOCAT: locat}}
            ),
        ),
    )
    for measure, (vit, locat) in _DINO.items()
}
