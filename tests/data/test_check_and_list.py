"""What `nearsight data check` and `nearsight data list` report."""

import dataclasses
from pathlib import Path

import pytest
from small_files import write_cifar10_binary, write_cifar100_binary, write_tree

from nearsight.data import DATASETS, CheckReport, check_dataset, list_datasets, load_dataset
from nearsight.data.segmentation import SEGMENTATION_SETS
from nearsight.errors import InputError


def finding(report: CheckReport, what: str):
    return next(finding for finding in report.findings if finding.what == what)


def test_the_embedded_set_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {"shapes": dataclasses.replace(DATASETS["shapes"], num_train=200, num_test=100)}
    monkeypatch.setattr("nearsight.data.loading.DATASETS", fewer)
    report = check_dataset("shapes")
    assert report.ok
    assert report.folder is None
    assert finding(report, "training class balance").detail == "20 per class"


def test_small_files_fail_on_checksums_and_counts_but_not_on_balance(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    report = check_dataset("cifar100", data_dir)
    assert not report.ok
    assert not finding(report, "train.bin").ok
    assert "but 6172c7755cfe09b2fe270c85cebc1b15 is published" in finding(report, "train.bin").detail
    assert finding(report, "training images").detail == "200, but 50,000 are published"
    assert finding(report, "training class balance").ok
    assert finding(report, "classes").ok
    assert finding(report, "image cache").ok
    assert report.layout == "binary version"


def test_unequal_classes_are_found(data_dir: Path) -> None:
    write_cifar100_binary(data_dir, num_train=250)
    assert finding(check_dataset("cifar100", data_dir), "training class balance").detail == (
        "2 to 3 per class, but the published set has equal classes"
    )


def test_a_set_of_one_s_own_is_not_compared_with_a_published_one(data_dir: Path) -> None:
    write_tree(data_dir, (), num_classes=5, per_class=2)
    report = check_dataset("image-folder", data_dir)
    assert finding(report, "training class balance").detail == "1 to 2 per class"
    assert finding(report, "test class balance").detail == "0 to 1 per class, but every class needs some; add images"


def test_a_damaged_file_is_one_finding_among_others(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    path = data_dir / "cifar-100-binary" / "test.bin"
    path.write_bytes(path.read_bytes()[:-5])
    report = check_dataset("cifar100", data_dir)
    assert not finding(report, "images").ok
    assert "test.bin is truncated" in finding(report, "images").detail
    assert not finding(report, "train.bin").ok


def test_checking_does_not_let_unpublished_files_through(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    check_dataset("cifar100", data_dir)
    with pytest.raises(InputError, match="is damaged or was changed"):
        load_dataset("cifar100", data_dir=data_dir)


def test_absent_sets_are_an_error(data_dir: Path) -> None:
    with pytest.raises(InputError, match="cifar10 is not in"):
        check_dataset("cifar10", data_dir)


def test_the_list(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    write_cifar10_binary(data_dir)
    (data_dir / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    write_tree(data_dir / "imagenette2-160")
    load_dataset("imagenette", data_dir=data_dir)
    rows = {row.name: row for row in list_datasets(data_dir)}
    assert set(rows) == (set(DATASETS) - {"image-folder"}) | set(SEGMENTATION_SETS)
    assert rows["shapes"].state == "built in"
    assert (rows["cifar100"].state, rows["cifar100"].folder) == ("present", data_dir / "cifar-100-binary")
    assert (rows["cifar10"].state, rows["svhn"].state) == ("damaged", "absent")
    assert "test_batch.bin missing" in rows["cifar10"].detail
    assert rows["svhn"].detail == "nearsight data fetch svhn"
    assert rows["imagenette"].decoded
    assert not rows["cifar100"].decoded


def test_the_list_works_before_anything_is_there() -> None:
    assert {row.state for row in list_datasets()} == {"built in", "absent"}
