"""What a segmentation sees on pictures, beside what is there."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, add_legend, house_style
from nearsight.report.inputs import shorten

TILE = 1.6
"""Inches of one picture."""
TRIPLES_PER_ROW = 2
LABEL_LIMIT = 80
LEGEND_COLUMN_INCHES = 1.5
IGNORED_COLOUR = (255, 255, 255)
_HEADINGS = ("image", "truth", "prediction")


def class_colours(num_classes: int) -> NDArray[np.uint8]:
    """PASCAL VOC's colours, [classes, 3]: the bits of a class, spread over the channels from the highest bit down.

    Any number of classes has different ones, and neighbours differ in lightness as well as in hue.
    """
    colours = np.zeros((num_classes, 3), dtype=np.uint8)
    for label in range(num_classes):
        for bit in range(8):
            for channel in range(3):
                colours[label, channel] |= ((label >> (3 * bit + channel)) & 1) << (7 - bit)
    return colours


def segmentation_pictures(
    pictures: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike]],
    class_names: Sequence[str],
    *,
    ignore_index: int,
    label: str,
) -> Figure:
    """Each image, its mask and the prediction side by side, with the colours of the classes that occur.

    Args:
        pictures: (image [H, W, 3] uint8, truth [H, W], prediction [H, W]) each.
        class_names: in the order of the labels.
        ignore_index: pixels of the truth without a class, which are white.
        label: the model's name, and what else belongs above.
    """
    if not pictures:
        raise InputError("there are no pictures to draw")
    colours = class_colours(len(class_names))
    num_columns = min(TRIPLES_PER_ROW, len(pictures))
    num_rows = -(-len(pictures) // num_columns)
    shown = [tuple(np.asarray(part) for part in picture) for picture in pictures]
    occurring = np.unique(np.concatenate([labels.ravel() for _, *masks in shown for labels in masks]))
    occurring = occurring[occurring != ignore_index]
    width = 3 * TILE * num_columns
    legend_columns = max(1, int(width / LEGEND_COLUMN_INCHES))
    legend_height = 0.2 * -(-(len(occurring) + 1) // legend_columns) + 0.15
    with house_style():
        figure = Figure(figsize=(width, TILE * num_rows + 0.55 + legend_height), layout="constrained")
        panels = figure.subplots(num_rows, 3 * num_columns, squeeze=False)
        for panel in panels.flat:
            panel.set_axis_off()
            panel.set_anchor("N")  # so that headings of pictures of many shapes are in line
        for number, (image, truth, prediction) in enumerate(shown):
            row, column = divmod(number, num_columns)
            drawn = (image, _coloured(truth, colours, ignore_index), _coloured(prediction, colours, ignore_index))
            for panel, part, heading in zip(panels[row, 3 * column : 3 * column + 3], drawn, _HEADINGS, strict=True):
                panel.imshow(part, interpolation="nearest").set_gid(f"{heading}{number}")
                if row == 0:
                    panel.set_title(heading, loc="center", fontweight="normal")
        swatches = [(f"#{bytes(colours[each]).hex()}", class_names[each]) for each in occurring]
        handles = [_swatch(colour) for colour, _ in [*swatches, ("#ffffff", "")]]
        names = [*(name for _, name in swatches), "no class (ignored)"]
        add_legend(figure, handles, names, loc="outside lower left", ncols=legend_columns, handlelength=1.2)
        figure.suptitle(
            shorten(label, LABEL_LIMIT), parse_math=False, fontsize=9.5, fontweight="bold", x=0.005, ha="left"
        )
    return figure


def _coloured(labels: NDArray[np.integer], colours: NDArray[np.uint8], ignore_index: int) -> NDArray[np.uint8]:
    pixels = np.empty((*labels.shape, 3), dtype=np.uint8)
    known = labels != ignore_index
    pixels[known], pixels[~known] = colours[labels[known]], IGNORED_COLOUR
    return pixels


def _swatch(colour: str) -> Line2D:
    return Line2D(
        [], [], linestyle="none", marker="s", markersize=8, color=colour, markeredgecolor=MUTED, markeredgewidth=0.6
    )
