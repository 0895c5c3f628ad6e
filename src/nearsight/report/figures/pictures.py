"""On pictures: where a model's attention ends up, and a segmentation next to the truth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, add_legend, add_title, colour_bar, house_style
from nearsight.report.inputs import shorten

_LABEL_LIMIT = 80
_ROLLOUT, _SEGMENTED = 1.35, 1.6
"""Inches of one picture."""
_PAIRS_PER_ROW, _TRIPLES_PER_ROW = 4, 2
_OPACITY = 0.72
_LEGEND_COLUMN = 1.5
"""Inches."""
_IGNORED_COLOUR = (255, 255, 255)
_HEADINGS = ("image", "truth", "prediction")


def rollout_overlays(pictures: Sequence[ArrayLike], maps: ArrayLike, *, label: str) -> Figure:
    """Each picture, and next to it the same in grey under its map of rollout.

    Args:
        pictures: [H, W, 3], uint8 or from 0 to 1: what the model saw, before normalisation.
        maps: [pictures, rows, columns], as `nearsight.lens.attention_rollout` gives them.
        label: the model's name.

    Each map has its own scale, from 0 to its largest value: what counts is where attention is, and how high it rises
    depends on the number of patches.
    """
    shown = [_as_floats(picture) for picture in pictures]
    values = np.asarray(maps, dtype=np.float64)
    if not shown or values.ndim != 3 or len(values) != len(shown):
        raise InputError(f"a map [rows, columns] for each picture is needed, not {list(values.shape)} for {len(shown)}")
    num_columns = min(_PAIRS_PER_ROW, len(shown))
    num_rows = -(-len(shown) // num_columns)
    with house_style():
        figure = Figure(figsize=(2 * _ROLLOUT * num_columns + 0.9, _ROLLOUT * num_rows + 0.5), layout="constrained")
        panels = figure.subplots(num_rows, 2 * num_columns, squeeze=False)
        for panel in panels.flat:
            panel.set_axis_off()
        for index, (picture, heat) in enumerate(zip(shown, values, strict=True)):
            row, column = divmod(index, num_columns)
            plain, covered = panels[row, 2 * column : 2 * column + 2]
            plain.imshow(picture).set_gid(f"picture{index}")
            grey = picture @ np.array([0.299, 0.587, 0.114])
            covered.imshow(grey, cmap="gray", vmin=0.0, vmax=1.0)
            image = covered.imshow(
                heat / (heat.max() or 1.0),
                cmap="viridis",
                vmin=0.0,
                vmax=1.0,
                alpha=_OPACITY,
                interpolation="bilinear",
                extent=(-0.5, grey.shape[1] - 0.5, grey.shape[0] - 0.5, -0.5),
            )
            image.set_gid(f"rollout{index}")
        colour_bar(figure, image, list(panels.flat), "rollout\n(of each picture's largest)", pad=0.02)
        add_title(figure, shorten(label, _LABEL_LIMIT))
    return figure


def _as_floats(picture: Any) -> NDArray[np.float64]:
    array = np.asarray(picture)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise InputError(f"pictures of shape [H, W, 3] are needed, not {list(array.shape)}")
    scaled: NDArray[np.float64] = array / 255.0 if array.dtype == np.uint8 else array.astype(np.float64)
    return scaled.clip(0.0, 1.0)


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
    num_columns = min(_TRIPLES_PER_ROW, len(pictures))
    num_rows = -(-len(pictures) // num_columns)
    shown = [tuple(np.asarray(part) for part in picture) for picture in pictures]
    occurring = np.unique(np.concatenate([labels.ravel() for _, *masks in shown for labels in masks]))
    occurring = occurring[occurring != ignore_index]
    width = 3 * _SEGMENTED * num_columns
    legend_columns = max(1, int(width / _LEGEND_COLUMN))
    legend_height = 0.2 * -(-(len(occurring) + 1) // legend_columns) + 0.15
    with house_style():
        figure = Figure(figsize=(width, _SEGMENTED * num_rows + 0.55 + legend_height), layout="constrained")
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
        add_title(figure, shorten(label, _LABEL_LIMIT))
    return figure


def _coloured(labels: NDArray[np.integer], colours: NDArray[np.uint8], ignore_index: int) -> NDArray[np.uint8]:
    pixels = np.empty((*labels.shape, 3), dtype=np.uint8)
    known = labels != ignore_index
    pixels[known], pixels[~known] = colours[labels[known]], _IGNORED_COLOUR
    return pixels


def _swatch(colour: str) -> Line2D:
    return Line2D(
        [], [], linestyle="none", marker="s", markersize=8, color=colour, markeredgecolor=MUTED, markeredgewidth=0.6
    )
