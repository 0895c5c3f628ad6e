"""The data sets of masks by name. A new one is a file that finds it and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

from nearsight.data.segmentation.ade20k import find_ade20k
from nearsight.data.segmentation.camvid import find_camvid
from nearsight.data.segmentation.coco_stuff import find_coco_stuff
from nearsight.data.segmentation.pascal import find_pascal_context, find_small_voc, find_voc2012
from nearsight.data.segmentation.source import SegmentationSpec

SEGMENTATION_SETS: Mapping[str, SegmentationSpec] = MappingProxyType(
    {
        "ade20k": SegmentationSpec(
            about="ADE20K, scene parsing: 150 classes (Zhou et al. 2017)",
            find=find_ade20k,
            num_classes=150,
            num_train=20_210,
            num_test=2_000,
        ),
        "pascal-context": SegmentationSpec(
            about="PASCAL Context: 59 classes on VOC 2010 (Mottaghi et al. 2014)",
            find=find_pascal_context,
            num_classes=59,
            num_train=4_996,
            num_test=5_104,
        ),
        "coco-stuff": SegmentationSpec(
            about="COCO-Stuff 164k: 80 things and 91 kinds of stuff (Caesar et al. 2018)",
            find=find_coco_stuff,
            num_classes=171,
            num_train=118_287,
            num_test=5_000,
        ),
        "voc2012": SegmentationSpec(
            about="PASCAL VOC 2012: 20 objects and background (Everingham et al. 2010)",
            find=find_voc2012,
            num_classes=21,
            num_train=1_464,
            num_test=1_449,
        ),
        "camvid": SegmentationSpec(
            about="CamVid: 11 classes of street scenes (Brostow et al. 2009), as SegNet's tutorial has it",
            find=find_camvid,
            num_classes=11,
            num_train=367,
            num_test=233,
        ),
        "voc-small": SegmentationSpec(
            about="the images of VOC 2012 whose names begin with 2007, at most 256 pixels long; no published numbers",
            find=find_small_voc,
            num_classes=21,
            num_train=311,
            num_test=321,
        ),
    }
)
