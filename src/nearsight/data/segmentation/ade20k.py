"""ADE20K (Zhou et al. 2017), the 150 classes of the scene parsing challenge. Its validation set is the test set.

ADEChallengeData2016/
  images/{training,validation}/NAME.jpg
  annotations/{training,validation}/NAME.png     0 other objects, which are ignored, 1 to 150 the classes
  objectInfo150.txt                              names of the classes, in the last column; they are numbered without it
"""

from pathlib import Path

from nearsight.data.segmentation.masks import LabelTable
from nearsight.data.segmentation.pairs import folder_pairs, incomplete, missing_parts
from nearsight.data.segmentation.source import SegmentationSource
from nearsight.errors import InputError

NUM_CLASSES = 150


def _class_names(table: Path) -> tuple[str, ...]:
    if not table.is_file():
        return tuple(f"class {number}" for number in range(1, NUM_CLASSES + 1))
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8", errors="replace").splitlines()[1:]]
    names = tuple(row[-1].split(",")[0].strip() for row in rows if len(row) > 1)
    if len(names) != NUM_CLASSES:
        raise InputError(f"{table} names {len(names)} classes, but ADE20K has {NUM_CLASSES}; get it again")
    return names


def find_ade20k(data_dir: Path) -> SegmentationSource | None:
    folder = data_dir / "ADEChallengeData2016"
    if not folder.is_dir():
        return None
    parts = ("training", "validation")
    if missing := missing_parts(folder, [f"{kind}/{part}" for kind in ("images", "annotations") for part in parts]):
        raise incomplete(folder, missing)
    train, test = (folder_pairs(folder / "images" / part, folder / "annotations" / part) for part in parts)
    return SegmentationSource(
        folder=folder,
        layout="scene parsing challenge",
        class_names=_class_names(folder / "objectInfo150.txt"),
        labels=LabelTable.starting_at(1, NUM_CLASSES, ignored=(0,)),
        train=train,
        test=test,
    )
