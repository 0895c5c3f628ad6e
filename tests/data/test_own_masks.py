"""Folders of images and masks of one's own: every layout, and every way in which they can be wrong."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearsight.data.segmentation import IGNORED, MaskedFolder, check_pairs
from nearsight.errors import InputError

NUMBERS = np.array([[0, 1, 7], [7, 255, 0]])
CLASSES = [0, 1, 2], [2, IGNORED, 0]
NAMES = {"0": "road", "1": "sky", "7": "tree"}


def write_mask(path: Path, numbers: np.ndarray = NUMBERS, *, kind: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "I;16":
        Image.fromarray(numbers.astype(np.uint16)).save(path)
        return
    picture = Image.fromarray(numbers.astype(np.uint8))
    if kind == "P":
        picture = picture.convert("P")
        picture.putpalette([channel for number in range(256) for channel in (255 - number, number, 3)])
    picture.save(path)


def write_image(path: Path, size: tuple[int, int] = (3, 2)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 10, 30)).save(path)


def write_folder(folder: Path, names: tuple[str, ...] = ("a", "b", "c", "d", "e"), *, kind: str = "L") -> Path:
    for name in names:
        write_image(folder / "images" / f"{name}.jpg")
        write_mask(folder / "masks" / f"{name}.png", kind=kind)
    (folder / "classes.json").write_text(json.dumps(NAMES))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "street")


@pytest.mark.parametrize("kind", ["L", "P", "I;16"])
def test_numbers_become_classes(tmp_path: Path, kind: str) -> None:
    dataset = MaskedFolder(folder=write_folder(tmp_path / "street", kind=kind)).load()
    assert (dataset.name, dataset.class_names) == ("street", ("road", "sky", "tree"))
    assert (len(dataset.train), len(dataset.test)) == (4, 1)
    for part in (dataset.train, dataset.test):
        check_pairs(part)
        image, mask = part[0]
        assert image.shape == (3, 2, 3)
        assert mask.tolist() == list(CLASSES)


def test_numbers_of_sixteen_bits_and_lists_of_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "street", ("a", "b"), kind="I;16")
    wide = np.array([[300, 65_535, 2], [300, 300, 40_000]])
    for mask in (folder / "masks").iterdir():
        write_mask(mask, wide, kind="I;16")
    # Two numbers of one name are one class.
    (folder / "classes.json").write_text(json.dumps({"2": "thing", "300": "floor", "40000": "thing"}))
    dataset = MaskedFolder(folder=folder, ignored=65_535).load()
    assert dataset.class_names == ("thing", "floor")
    assert dataset.test.mask(0).tolist() == [[1, IGNORED, 0], [1, 1, 0]]
    with pytest.raises(InputError, match=r"a.png has labels .*: 65535; .*name it in classes.json, or say with"):
        check_pairs(MaskedFolder(folder=folder).load().train)
    (folder / "classes.json").write_text('["floor", "thing"]')
    for mask in (folder / "masks").iterdir():
        write_mask(mask, np.array([[0, 1, 255], [1, 1, 0]]))
    assert MaskedFolder(folder=folder).load().test.mask(0).tolist() == [[0, 1, IGNORED], [1, 1, 0]]
    # Masks of 0 and 255 alone: nothing is ignored.
    (folder / "classes.json").write_text('{"0": "floor", "1": "thing", "255": "border"}')
    assert MaskedFolder(folder=folder, ignored=-1).load().test.mask(0).tolist() == [[0, 1, 2], [1, 1, 0]]


def test_a_share_is_held_out_by_a_digest_of_names(tmp_path: Path) -> None:
    names = tuple(f"street/{number:02}" for number in range(20))
    folder = write_folder(tmp_path / "own", names)

    def tested(**options: float) -> set[str]:
        dataset = MaskedFolder(folder=folder, **options).load()  # type: ignore[arg-type]
        found = {image.stem for image, _ in dataset.test.pairs}
        assert found | {image.stem for image, _ in dataset.train.pairs} == {name.split("/")[1] for name in names}
        assert len(dataset.train) + len(dataset.test) == len(names)
        return found

    def expected(seed: int, number: int) -> set[str]:
        places = {name: hashlib.sha256(f"{seed}/{name}.jpg".encode()).hexdigest() for name in names}
        return {name.split("/")[1] for name in sorted(names, key=places.__getitem__)[:number]}

    assert tested() == expected(0, 4)
    assert tested(test_share=0.5, split_seed=3) == expected(3, 10)
    assert len(tested(test_share=0.999)) == 19
    before = tested()
    for kind, ending in (("images", "jpg"), ("masks", "png")):
        shutil.copy(folder / kind / "street" / f"00.{ending}", folder / kind / "street" / f"20.{ending}")
    names += ("street/20",)
    assert len(before - tested()) <= 1


def test_parts_and_two_folders(folder: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    for part, name in (("train", "a"), ("train", "b"), ("Val", "c"), ("test", "d")):
        write_image(parts / "frames" / part / f"{name}.png")
        write_mask(parts / "labels" / part.lower() / f"{name}.png")
    (parts / "names.json").write_text('{"0": "road", "1": "sky", "7": "tree"}')
    dataset = MaskedFolder(
        folder=parts / "frames", masks=parts / "labels", classes=parts / "names.json"
    ).load()  # of val and test the former
    assert dataset.name == "parts"
    assert [image.stem for image, _ in dataset.train.pairs] == ["a", "b"]
    assert [image.stem for image, _ in dataset.test.pairs] == ["c"]
    # A folder of masks beside `images`, by its name alone.
    (folder / "masks").rename(folder / "labels")
    assert len(MaskedFolder(folder=folder, masks=Path("labels")).load().train) == 4
    (tmp_path / "street").rename(tmp_path / "camvid")
    assert MaskedFolder(folder=tmp_path / "camvid", masks=Path("labels")).load().name == "own camvid"


def test_the_fingerprint_follows_what_masks_say(folder: Path, tmp_path: Path) -> None:
    before = MaskedFolder(folder=folder).load().fingerprint
    shutil.copytree(folder, tmp_path / "elsewhere" / "street")
    assert MaskedFolder(folder=tmp_path / "elsewhere" / "street").load().fingerprint == before
    found = {before}
    mask = folder / "masks" / "a.png"
    size = mask.stat().st_size
    write_mask(mask, NUMBERS[:, ::-1])
    assert mask.stat().st_size == size  # which alone would show nothing
    found.add(MaskedFolder(folder=folder).load().fingerprint)
    (folder / "classes.json").write_text(json.dumps({**NAMES, "7": "road"}))
    found.add(MaskedFolder(folder=folder).load().fingerprint)
    found.add(MaskedFolder(folder=folder, ignored=254).load().fingerprint)
    found.add(MaskedFolder(folder=folder, split_seed=1).load().fingerprint)
    assert len(found) == 5


def without(kind: str, name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / kind / name).unlink()


def classes(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "classes.json").write_text(text)


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (without("masks", "b.png"), r"1 image\(s\) in .*images have no mask of their name in .*masks: b$"),
    (without("images", "b.jpg"), r"1 mask\(s\) in .*masks have no image of their name in .*images: b$"),
    (lambda folder: shutil.rmtree(folder / "masks"), r"masks is not a folder, .*say where with --masks"),
    (lambda folder: shutil.rmtree(folder / "images"), "has no folder 'images'; .*--data IMAGES --masks MASKS"),
    (lambda folder: write_image(folder / "images" / "a.png"), r"have one name; rename or remove one"),
    (shutil.rmtree, "street is not there, but a folder with images and masks is needed"),
    (
        lambda folder: (folder / "masks" / "b.png").rename(folder / "masks" / "b.jpg"),
        "masks in a format that changes numbers: b.jpg; save them as PNG",
    ),
    (lambda folder: write_image(folder / "images" / "train" / "z.png"), "has a part 'train' but no 'val'"),
    (
        lambda folder: [write_image(folder / "images" / part / "z.png") for part in ("train", "val")],
        "has a.jpg, b.jpg, c.jpg and 2 more beside train and val",
    ),
    (without("", "classes.json"), r'such as \["road", "sky"\] .*\(a.png has the numbers 0, 1, 7, 255\)$'),
    (classes("[1"), "is not JSON"),
    (classes("3"), "holds no names of classes"),
    (classes("{}"), "holds no names of classes"),
    (classes('["road", "road"]'), "lists 'road' twice"),
    (classes('["road", 3]'), "gives 1 the name 3, but a name is text"),
    (classes('{"road": "0"}'), "names 'road', but numbers of masks go from 0 to 65535"),
    (classes('{"99999999999999999999": "road"}'), "but numbers of masks go from 0 to 65535"),
    (classes('{"255": "road"}'), "names 255, which is the number of ignored pixels; give another --ignore-value"),
    (classes(json.dumps([str(number) for number in range(255)] + ["more"])), "names 255, which is the number"),
    (classes(json.dumps({str(number + 256): str(number) for number in range(256)})), "256 classes, but .* 255 at most"),
]


@pytest.mark.parametrize(("spoil", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_wrong_folders_are_one_line(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=said) as found:
        MaskedFolder(folder=folder).load()
    assert "\n" not in str(found.value)


def test_wrong_pairs_are_counted_before_anything_is_computed(folder: Path) -> None:
    def refused(said: str) -> None:
        dataset = MaskedFolder(folder=folder).load()
        everything = replace(dataset.train, pairs=sorted([*dataset.train.pairs, *dataset.test.pairs]))
        with pytest.raises(InputError, match=said):
            check_pairs(everything)

    write_mask(folder / "masks" / "a.png", np.array([[0, 9, 8]] * 2))
    refused("a.png has labels out of range: 8, 9; .*; name it in classes.json, or say with --ignore-value")
    write_mask(folder / "masks" / "a.png", np.zeros((4, 4)))
    refused(r"a.png is 4×4, but its image a.jpg is 3×2")
    write_image(folder / "masks" / "a.png")
    refused(r"a.png is a picture in colours \(RGB\), .*; save it as a palette PNG, or as a grey one of 8 or 16 bits")
    (folder / "masks" / "a.png").write_bytes(b"nothing")
    refused("a.png cannot be read")
    write_mask(folder / "masks" / "a.png")
    (folder / "images" / "b.jpg").write_bytes(b"nothing")
    refused("b.jpg cannot be read: is not a picture of a known format")
    for name in "bcde":
        write_mask(folder / "masks" / f"{name}.png", np.full((2, 3), 77))
    refused(r"more pairs are wrong\)")


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has one image, but one to train on and one to test on are needed"):
        MaskedFolder(folder=write_folder(tmp_path / "one", ("a",))).load()
    with pytest.raises(InputError, match="the share of test images is 0"):
        MaskedFolder(folder=tmp_path, test_share=0)
