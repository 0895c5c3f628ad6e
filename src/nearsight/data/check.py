"""Behind `nearsight data list` and `check`: which data sets are on this machine, and whether they are as published."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nearsight.data.cache import cache_file, open_cached, verify_cache
from nearsight.data.dataset import ImageSet
from nearsight.data.loading import dataset_spec, find_source, load_dataset, published_checksums
from nearsight.data.locations import data_folder
from nearsight.data.registry import DATASETS, DatasetSpec, Source
from nearsight.data.segmentation.masks import (
    IGNORED,
    SEGMENTATION_SETS,
    MaskedImages,
    SegmentationSet,
    find_segmentation,
    load_segmentation,
)
from nearsight.errors import InputError
from nearsight.files import reading
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 5
_LABELS = IGNORED + 1


@dataclass(frozen=True, kw_only=True)
class ListedDataset:
    """A line of the list."""

    name: str
    """What to call it."""
    about: str
    """What it is."""
    state: str
    """"present", "absent", "damaged" or, for a set that nearsight draws, "built in"."""
    folder: Path | None = None
    """Where it is."""
    detail: str
    """Its layout, or what is wrong with it, or how to get it."""
    decoded: bool = False
    """Whether it is in the image cache, so that opening it takes no time."""


def _listed(name: str, folder: Path) -> ListedDataset:
    spec = DATASETS[name]
    if spec.find is None:
        return ListedDataset(name=name, about=spec.about, state="built in", detail="always there")
    try:
        with reading(folder):
            source = spec.find(folder, spec.image_size)
    except InputError as error:
        return ListedDataset(name=name, about=spec.about, state="damaged", folder=folder, detail=str(error))
    if source is None:
        way = f"nearsight data fetch {name}" if spec.downloads else f"put it into {folder}"
        return ListedDataset(name=name, about=spec.about, state="absent", detail=way)
    return ListedDataset(
        name=name,
        about=spec.about,
        state="present",
        folder=source.folder,
        detail=source.layout,
        decoded=_is_decoded(name, source, spec.image_size),
    )


def _is_decoded(name: str, source: Source, image_size: int) -> bool:
    try:
        return cache_file(name, source, image_size).is_file()
    except (InputError, OSError):  # a cache that cannot be read counts as none; the data are there anyway
        return False


def _listed_masks(name: str, folder: Path) -> ListedDataset:
    about = SEGMENTATION_SETS[name].about
    try:
        with reading(folder):
            source = SEGMENTATION_SETS[name].find(folder)
    except InputError as error:
        return ListedDataset(name=name, about=about, state="damaged", folder=folder, detail=str(error))
    if source is None:
        return ListedDataset(name=name, about=about, state="absent", detail=f"put it into {folder}")
    detail = f"masks, {source.layout}"
    return ListedDataset(name=name, about=about, state="present", folder=source.folder, detail=detail)


def list_datasets(data_dir: Path | None = None) -> tuple[ListedDataset, ...]:
    """Every data set: those with a class for each image, then those with masks, in the order of their registries."""
    folder = data_folder(data_dir)
    # `image-folder` is whatever the caller says the data folder is, so it cannot be present or absent.
    labelled = (_listed(name, folder) for name in DATASETS if name != "image-folder")
    return (*labelled, *(_listed_masks(name, folder) for name in SEGMENTATION_SETS))


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    """The thing."""
    ok: bool
    """Whether it is as it should be."""
    detail: str
    """What was found, and what was expected if that differs."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything that was checked about a data set."""

    name: str
    """The data set."""
    folder: Path | None
    """Where it is; None when it needs no files."""
    layout: str
    """Which layout was found there."""
    findings: tuple[Finding, ...]
    """In the order of the checks."""

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


def _count(what: str, found: int, expected: int | None) -> Finding:
    """A number of things, and how many are published if that is known."""
    ok = expected in (None, found)
    return Finding(what, ok, f"{found:,}" if ok else f"{found:,}, but {expected:,} are published")


def _balance(part: str, images: ImageSet, num_classes: int, spec: DatasetSpec) -> Finding:
    counts = torch.bincount(images.labels_N, minlength=num_classes)
    least, most = int(counts.min()), int(counts.max())
    spread = f"{least:,} per class" if least == most else f"{least:,} to {most:,} per class"
    # Where balance is not promised, a class without a single image is still wrong.
    ok = least == most if spec.balanced else least > 0
    expected = "the published set has equal classes" if spec.balanced else "every class needs some; add images"
    return Finding(f"{part} class balance", ok, spread if ok else f"{spread}, but {expected}")


def check_dataset(name: str, data_dir: Path | None = None) -> CheckReport:
    """Compare counts, class balance and checksums with what is published, and the cache with its own checksum.

    All findings are collected: a report that stops at the first damaged file would have to be made many times.
    """
    if name in SEGMENTATION_SETS:
        return check_segmentation(name, data_dir)
    spec = dataset_spec(name)
    if spec.find is None:
        dataset = load_dataset(name)
        classes, parts = dataset.classes, (dataset.train, dataset.test)
        folder, layout, findings = None, "drawn by nearsight", []
    else:
        source = find_source(name, spec, data_folder(data_dir), spec.image_size)
        folder, layout = source.folder, source.layout
        findings = [
            Finding(
                checksum.path.name,
                checksum.ok,
                f"md5 {checksum.found}"
                if checksum.ok
                else f"md5 {checksum.found}, but {checksum.expected} is published",
            )
            for checksum in published_checksums(source, spec.md5)
        ]
        # Separate from what load_dataset opens, which must have passed these very checks.
        checked = name if all(finding.ok for finding in findings) else f"{name}-unverified"
        try:
            decoded = open_cached(checked, source, spec.image_size)
        except InputError as error:
            findings.append(Finding("images", False, str(error)))
            return CheckReport(name=name, folder=folder, layout=layout, findings=tuple(findings))
        classes, parts = decoded.classes, (decoded.train, decoded.test)
        intact = verify_cache(checked, source, spec.image_size)
        findings.append(Finding("image cache", intact, "sha256 is right" if intact else "sha256 is wrong; remove it"))
    train, test = parts
    findings += [
        _count("classes", len(classes), spec.num_classes),
        _count("training images", len(train), spec.num_train),
        _count("test images", len(test), spec.num_test),
        _balance("training", train, len(classes), spec),
        _balance("test", test, len(classes), spec),
    ]
    return CheckReport(name=name, folder=folder, layout=layout, findings=tuple(findings))


def check_segmentation(name: str, data_dir: Path | None = None) -> CheckReport:
    """Counts, sizes and labels; every image and mask is read. All findings are collected, as in `check_dataset`."""
    source = find_segmentation(name, data_dir)
    spec, dataset = SEGMENTATION_SETS[name], load_segmentation(name, data_dir)
    findings = [
        _count("classes", dataset.num_classes, spec.num_classes),
        _count("training images", len(dataset.train), spec.num_train),
        _count("test images", len(dataset.test), spec.num_test),
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
