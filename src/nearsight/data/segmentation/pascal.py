"""The PASCAL sets: VOC 2012 (Everingham et al. 2010), its small copy, and Context (Mottaghi et al. 2014).

Three folders and two lists of names, one a line:

JPEGImages/NAME.jpg
SegmentationClass/NAME.png                   VOC: 0 background, 1 to 20 the objects, 255 void borders
ImageSets/Segmentation/{train,val}.txt

SegmentationClassContext/NAME.png            Context: 0 everything else, which is ignored, 1 to 59 the classes
ImageSets/SegmentationContext/{train,val}.txt

The masks of Context are published as .mat files of 459 classes and as a JSON file of the 59 that papers use; the layout
here is the one into which the public converters write the latter.
"""

from pathlib import Path

from nearsight.data.segmentation.classes import PASCAL_CONTEXT, VOC
from nearsight.data.segmentation.masks import IGNORED, LabelTable
from nearsight.data.segmentation.pairs import incomplete, listed_pairs, missing_parts
from nearsight.data.segmentation.source import SegmentationSource


def find_voc2012(data_dir: Path) -> SegmentationSource | None:
    return _find_voc(data_dir / "VOCdevkit" / "VOC2012", "VOC devkit")


def find_small_voc(data_dir: Path) -> SegmentationSource | None:
    return _find_voc(data_dir / "voc-small", "small copy")


def find_pascal_context(data_dir: Path) -> SegmentationSource | None:
    return _find(
        data_dir / "VOCdevkit" / "VOC2010",
        masks="SegmentationClassContext",
        lists="ImageSets/SegmentationContext",
        layout="VOC devkit with masks of 59 classes",
        class_names=PASCAL_CONTEXT,
        labels=LabelTable.starting_at(1, len(PASCAL_CONTEXT), ignored=(0, IGNORED)),
    )


def _find_voc(folder: Path, layout: str) -> SegmentationSource | None:
    return _find(
        folder,
        masks="SegmentationClass",
        lists="ImageSets/Segmentation",
        layout=layout,
        class_names=VOC,
        labels=LabelTable.starting_at(0, len(VOC), ignored=(IGNORED,)),
    )


def _find(
    folder: Path, *, masks: str, lists: str, layout: str, class_names: tuple[str, ...], labels: LabelTable
) -> SegmentationSource | None:
    if not folder.is_dir():
        return None
    if missing := missing_parts(folder, ("JPEGImages", masks, f"{lists}/train.txt", f"{lists}/val.txt")):
        raise incomplete(folder, missing)
    train, test = (
        listed_pairs(folder / lists / f"{part}.txt", folder / "JPEGImages", folder / masks) for part in ("train", "val")
    )
    return SegmentationSource(
        folder=folder, layout=layout, class_names=class_names, labels=labels, train=train, test=test
    )
