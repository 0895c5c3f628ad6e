"""Behind `nearsight data check`: whether a data set on disk is what its makers published."""

from pathlib import Path

import torch

from nearsight.data.cache import open_cached, verify_cache
from nearsight.data.checksums import published_checksums
from nearsight.data.dataset import ImageSet
from nearsight.data.findings import CheckReport, Finding, count_finding
from nearsight.data.loading import dataset_spec, find_source, load_dataset
from nearsight.data.locations import data_folder
from nearsight.data.segmentation import SEGMENTATION_SETS, check_segmentation
from nearsight.data.source import DatasetSpec
from nearsight.errors import InputError


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

    All findings are collected: a report that stops at the first damaged file would have to be asked for many times.
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
        # Kept apart from what load_dataset opens, which must have passed these very checks.
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
        count_finding("classes", len(classes), spec.num_classes),
        count_finding("training images", len(train), spec.num_train),
        count_finding("test images", len(test), spec.num_test),
        _balance("training", train, len(classes), spec),
        _balance("test", test, len(classes), spec),
    ]
    return CheckReport(name=name, folder=folder, layout=layout, findings=tuple(findings))
