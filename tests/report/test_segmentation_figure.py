"""Pictures of segmentations: the colours of PASCAL VOC, and what is where."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.report.figures.pictures import class_colours, segmentation_pictures


def drawn(figure: Figure, gid: str) -> np.ndarray:
    (image,) = [image for panel in figure.axes for image in panel.images if image.get_gid() == gid]
    return np.asarray(image.get_array())


def test_colours_are_those_of_voc_and_all_differ() -> None:
    colours = class_colours(171)
    published = {0: (0, 0, 0), 1: (128, 0, 0), 8: (64, 0, 0), 15: (192, 128, 128), 20: (0, 64, 128)}
    assert {label: tuple(colours[label].tolist()) for label in published} == published
    assert len({tuple(colour) for colour in colours.tolist()}) == 171


def test_image_truth_and_prediction_stand_side_by_side() -> None:
    generator = np.random.default_rng(0)
    names = [f"$name_{label}$" for label in range(6)]
    pictures = []
    for rows, columns in ((4, 6), (7, 5), (3, 3)):
        truth = generator.choice([0, 2, 255], (rows, columns))
        prediction = generator.choice([0, 5], (rows, columns))
        pictures.append((generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8), truth, prediction))
    figure = segmentation_pictures(pictures, names, ignore_index=255, label="a $model")
    table = np.concatenate([class_colours(6), np.zeros((249, 3), np.uint8), np.full((1, 3), 255, np.uint8)])
    for number, (image, truth, prediction) in enumerate(pictures):
        assert (drawn(figure, f"image{number}") == image).all()
        assert (drawn(figure, f"truth{number}") == table[truth]).all()
        assert (drawn(figure, f"prediction{number}") == table[prediction]).all()
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["$name_0$", "$name_2$", "$name_5$", "no class (ignored)"]
    headings = [panel.get_title(loc="center") for panel in figure.axes[:6]]
    assert headings == ["image", "truth", "prediction"] * 2


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(InputError, match="no pictures"):
        segmentation_pictures([], ["a"], ignore_index=255, label="")
