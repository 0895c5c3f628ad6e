"""Names of the classes, in the order of their labels, of the data sets that do not bring them along in a file."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


VOC = _names(
    """background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog, horse,
    motorbike, person, pottedplant, sheep, sofa, train, tvmonitor"""
)

PASCAL_CONTEXT = _names(
    """aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, table, dog, horse, motorbike, person,
    pottedplant, sheep, sofa, train, tvmonitor, bag, bed, bench, book, building, cabinet, ceiling, cloth, computer, cup,
    door, fence, floor, flower, food, grass, ground, keyboard, light, mountain, mouse, curtain, platform, sign, plate,
    road, rock, shelves, sidewalk, sky, snow, bedclothes, track, tree, truck, wall, water, window, wood"""
)

CAMVID = _names("sky, building, pole, road, pavement, tree, sign symbol, fence, car, pedestrian, bicyclist")

COCO_THINGS = _names(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
    parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
    handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
    surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
    broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors,
    teddy bear, hair drier, toothbrush"""
)

COCO_STUFF = _names(
    """banner, blanket, branch, bridge, building-other, bush, cabinet, cage, cardboard, carpet, ceiling-other,
    ceiling-tile, cloth, clothes, clouds, counter, cupboard, curtain, desk-stuff, dirt, door-stuff, fence, floor-marble,
    floor-other, floor-stone, floor-tile, floor-wood, flower, fog, food-other, fruit, furniture-other, grass, gravel,
    ground-other, hill, house, leaves, light, mat, metal, mirror-stuff, moss, mountain, mud, napkin, net, paper,
    pavement, pillow, plant-other, plastic, platform, playingfield, railing, railroad, river, road, rock, roof, rug,
    salad, sand, sea, shelf, sky-other, skyscraper, snow, solid-other, stairs, stone, straw, structural-other, table,
    tent, textile-other, towel, tree, vegetable, wall-brick, wall-concrete, wall-other, wall-panel, wall-stone,
    wall-tile, wall-wood, water-other, waterdrops, window-blind, window-other, wood"""
)

COCO_THINGS_LEFT_OUT = (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90)
"""Numbers of things that COCO planned (street sign, hat, shoe, …) and never labelled."""
