"""Whether a data set of masks is what its makers published: every image and mask is read."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from nearsight.data.findings import CheckReport, Finding, count_finding
from nearsight.data.segmentation.loading import SegmentationSet, find_segmentation, load_segmentation
from nearsight.data.segmentation.masks import IGNORED, MaskedImages
from nearsight.data.segmentation.registry import SEGMENTATION_SETS
from nearsight.errors import InputError

_SHOWN = 5
_LABELS = IGNORED + 1


def check_segmentation(name: str, data_dir: Path | None = None) -> CheckReport:
    """Counts, sizes and labels. All findings are collected, as in `check_dataset`."""
    source = find_segmentation(name, data_dir)
    spec, dataset = SEGMENTATION_SETS[name], load_segmentation(name, data_dir)
    findings = [
        count_finding("classes", dataset.num_classes, spec.num_classes),
        count_finding("training images", len(dataset.train), spec.num_train),
        count_finding("test images", len(dataset.test), spec.num_test),
    ]
    for part, images in (("training", dataset.train), ("test", dataset.test)):
        pixels, problems = _count_pixels(images)
        findings += [_readable(part, problems), _labelled(part, pixels), _seen(part, pixels, dataset)]
    return CheckReport(name=name, folder=source.folder, layout=source.layout, findings=tuple(findings))


def _count_pixels(images: MaskedImages) -> tuple[Tensor, list[str]]:
    """(pixels of each label, what is wrong with files)."""

    def count(index: int) -> Tensor | str:
        try:
            return torch.bincount(images[index][1].flatten(), minlength=_LABELS)
        except InputError as error:
            return str(error)

    pixels, problems = torch.zeros(_LABELS, dtype=torch.int64), []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for counted in threads.map(count, range(len(images))):
            if isinstance(counted, str):
                problems.append(counted)
            else:
                pixels += counted
    return pixels, problems


def _readable(part: str, problems: Sequence[str]) -> Finding:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    detail = "; ".join(problems[:_SHOWN]) + more if problems else "all can be read and have their masks' size"
    return Finding(f"{part} images and masks", not problems, detail)


def _labelled(part: str, pixels: Tensor) -> Finding:
    share = float(1 - pixels[IGNORED] / pixels.sum().clamp(min=1))
    ok = bool(pixels[:IGNORED].any())
    return Finding(f"{part} pixels with a class", ok, f"{share:.1%}" if ok else "none: all are ignored")


def _seen(part: str, pixels: Tensor, dataset: SegmentationSet) -> Finding:
    unseen = [name for name, count in zip(dataset.class_names, pixels, strict=False) if not count]
    names = ", ".join(unseen[:_SHOWN]) + (f" and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else "")
    detail = f"no mask has {names}" if unseen else f"all {dataset.num_classes}"
    return Finding(f"{part} classes seen", not unseen, detail)
