"""COCO-Stuff 164k (Caesar et al. 2018): 80 things and 91 kinds of stuff on COCO 2017, whose val is the test set.

coco_stuff164k/ or coco/
  images/{train2017,val2017}/NUMBER.jpg, or without images/
  one of these folders of masks, each with train2017 and val2017:
    annotations/, stuffthingmaps_trainval2017/, stuffthingmaps_trainvaltest2017/, stuffthingmaps/,
    annotations/stuffthingmaps/

Masks are NUMBER.png as published (stuffthingmaps_trainval2017.zip: the numbers of COCO less 1, with gaps, and 255 for
unlabelled) or NUMBER_labelTrainIds.png as converters write them (0 to 170 without gaps, 255).
"""

from pathlib import Path

from nearsight.data.segmentation.classes import COCO_STUFF, COCO_THINGS, COCO_THINGS_LEFT_OUT
from nearsight.data.segmentation.masks import IGNORED, LabelTable
from nearsight.data.segmentation.pairs import folder_pairs, incomplete
from nearsight.data.segmentation.source import SegmentationSource

_FOLDERS = ("coco_stuff164k", "coco")
_MASKS = (
    "annotations",
    "stuffthingmaps_trainval2017",
    "stuffthingmaps_trainvaltest2017",
    "stuffthingmaps",
    "annotations/stuffthingmaps",
)
_PARTS = ("train2017", "val2017")
_CONVERTED = "_labelTrainIds.png"


def _published_labels() -> LabelTable:
    numbers = [number for number in range(182) if number not in COCO_THINGS_LEFT_OUT]
    return LabelTable({number: label for label, number in enumerate(numbers)}, frozenset({IGNORED}))


def find_coco_stuff(data_dir: Path) -> SegmentationSource | None:
    folder = next((data_dir / name for name in _FOLDERS if (data_dir / name).is_dir()), None)
    if folder is None:
        return None
    images = _first_with_parts(folder, ("images", "."))
    masks = _first_with_parts(folder, _MASKS)
    if images is None or masks is None:
        wanted = [name for name, found in (("images", images), ("masks", masks)) if found is None]
        raise incomplete(folder, [f"{name} (folders train2017 and val2017)" for name in wanted])
    class_names = COCO_THINGS + COCO_STUFF
    converted = _is_converted(masks)
    train, test = (folder_pairs(images / part, masks / part, _CONVERTED if converted else ".png") for part in _PARTS)
    return SegmentationSource(
        folder=folder,
        layout="converted masks (labelTrainIds)" if converted else "masks as published",
        class_names=class_names,
        labels=LabelTable.starting_at(0, len(class_names), ignored=(IGNORED,)) if converted else _published_labels(),
        train=train,
        test=test,
    )


def _first_with_parts(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if all((folder / name / part).is_dir() for part in _PARTS)), None)


def _is_converted(masks: Path) -> bool:
    return next((masks / _PARTS[1]).glob(f"*{_CONVERTED}"), None) is not None
