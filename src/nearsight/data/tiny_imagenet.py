"""Tiny-ImageNet-200 (Stanford CS231n), the published folder. Its labelled validation set is the test set.

wnids.txt                       200 class identifiers, in the order of the labels
words.txt                       identifier, tab, names
train/<wnid>/images/*.JPEG      500 per class
val/images/*.JPEG               10,000, classes in val/val_annotations.txt
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nearsight.data.decoding import decode, is_image_name
from nearsight.data.locations import incomplete, read_published
from nearsight.data.registry import Chunk, DatasetSpec, Download, Source, register_dataset
from nearsight.errors import InputError

SIZE = 64


def _class_names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first name of each class; two classes with one name ("crane") keep their identifiers to differ."""
    lines = (line.split("\t", maxsplit=1) for line in read_published(words).splitlines() if "\t" in line)
    known = {wnid: names.split(",")[0].strip() for wnid, names in lines}
    names = [known.get(wnid, wnid) for wnid in wnids]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def _read_train(folder: Path, wnids: list[str]) -> Iterator[Chunk]:
    images: list[Path] = []
    labels: list[int] = []
    for label, wnid in enumerate(wnids):
        of_class = sorted(path for path in (folder / "train" / wnid / "images").iterdir() if is_image_name(path.name))
        images += of_class
        labels += [label] * len(of_class)
    return decode(folder, images, labels, SIZE, fit=False)


def _read_val(folder: Path, wnids: list[str]) -> Iterator[Chunk]:
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = folder / "val" / "val_annotations.txt"
    images: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(read_published(annotations).splitlines(), start=1):
        name, wnid, *_ = [*line.split("\t"), ""]
        # A name with a path in it could point anywhere.
        if wnid not in label_of or Path(name).name != name:
            raise InputError(
                f"{annotations} line {number} is not an image and one of {len(wnids)} classes; get it again"
            )
        images.append(folder / "val" / "images" / name)
        labels.append(label_of[wnid])
    return decode(folder, images, labels, SIZE, fit=False)


def find_tiny_imagenet(data_dir: Path, _image_size: int) -> Source | None:
    folder = data_dir / "tiny-imagenet-200"
    if not folder.is_dir():
        return None
    texts = (folder / "wnids.txt", folder / "words.txt", folder / "val" / "val_annotations.txt")
    missing = [str(path.relative_to(folder)) for path in texts if not path.is_file()]
    wnids = [] if missing else read_published(texts[0]).split()
    folders = (*(folder / "train" / wnid / "images" for wnid in wnids), folder / "val" / "images")
    missing += [str(path.relative_to(folder)) for path in folders if not path.is_dir()]
    if missing:
        raise incomplete(folder, missing)
    return Source(
        folder=folder,
        layout="official folder",
        files=(*texts[:2], folder / "train", folder / "val"),
        classes=_class_names(texts[1], wnids),
        train=lambda: _read_train(folder, wnids),
        test=lambda: _read_val(folder, wnids),
    )


register_dataset(
    "tiny-imagenet",
    DatasetSpec(
        about="Tiny-ImageNet-200 (Stanford CS231n); the labelled validation set is the test set",
        find=find_tiny_imagenet,
        num_classes=200,
        num_train=100_000,
        num_test=10_000,
        image_size=64,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        md5={
            "wnids.txt": "6c81990e2d7ae3bd3c88dceb97b46342",
            "val/val_annotations.txt": "e9a8a28f9975223592f4c6da9fd2369b",
        },
        downloads=(
            Download(
                url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                md5="90528d7ca1a48142e341f4ef8d21d0de",
                folder="tiny-imagenet-200",
            ),
        ),
    ),
)
