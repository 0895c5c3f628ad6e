"""Images with a class for every pixel: ADE20K, PASCAL VOC and Context, COCO-Stuff, CamVid, in their official layouts.

Nothing is decoded ahead: images have sizes of their own, and are read when they are asked for.
"""

from nearsight.data.segmentation.check import check_segmentation
from nearsight.data.segmentation.loading import SegmentationSet, find_segmentation, load_segmentation
from nearsight.data.segmentation.masks import IGNORED, MaskedImages
from nearsight.data.segmentation.registry import SEGMENTATION_SETS
from nearsight.data.segmentation.source import SegmentationSource, SegmentationSpec

__all__ = [
    "IGNORED",
    "SEGMENTATION_SETS",
    "MaskedImages",
    "SegmentationSet",
    "SegmentationSource",
    "SegmentationSpec",
    "check_segmentation",
    "find_segmentation",
    "load_segmentation",
]
