"""Images with a class for every pixel: ADE20K, PASCAL VOC and Context, COCO-Stuff, CamVid, in their official layouts.

Nothing is decoded ahead: images have sizes of their own, and are read when they are needed. A new data set is one
file here, or anywhere else, that calls `register_segmentation`; a folder of one's own is a `MaskedFolder`.
"""

import importlib
import pkgutil

from nearsight.data.segmentation.folders import MaskedFolder, check_pairs
from nearsight.data.segmentation.masks import (
    IGNORED,
    SEGMENTATION_SETS,
    MaskedImages,
    SegmentationSet,
    SegmentationSource,
    SegmentationSpec,
    find_segmentation,
    load_segmentation,
    read_numbers,
    register_segmentation,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"nearsight.data.segmentation.{_module.name}")  # which registers what it finds

__all__ = [
    "IGNORED",
    "SEGMENTATION_SETS",
    "MaskedFolder",
    "MaskedImages",
    "SegmentationSet",
    "SegmentationSource",
    "SegmentationSpec",
    "check_pairs",
    "find_segmentation",
    "load_segmentation",
    "read_numbers",
    "register_segmentation",
]
