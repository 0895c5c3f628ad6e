"""Where a model's attention ends up on pictures: rollout laid over them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from nearsight.errors import InputError
from nearsight.report.figures.style import house_style
from nearsight.report.inputs import shorten

TILE = 1.35
"""Inches of one picture."""
PAIRS_PER_ROW = 4
OPACITY = 0.72
LABEL_LIMIT = 80


def rollout_overlays(pictures: Sequence[ArrayLike], maps: ArrayLike, *, label: str) -> Figure:
    """Each picture, and beside it the same in grey under its map of rollout.

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
    num_columns = min(PAIRS_PER_ROW, len(shown))
    num_rows = -(-len(shown) // num_columns)
    with house_style():
        figure = Figure(figsize=(2 * TILE * num_columns + 0.9, TILE * num_rows + 0.5), layout="constrained")
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
                alpha=OPACITY,
                interpolation="bilinear",
                extent=(-0.5, grey.shape[1] - 0.5, grey.shape[0] - 0.5, -0.5),
            )
            image.set_gid(f"rollout{index}")
        bar = figure.colorbar(image, ax=panels, aspect=18, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("rollout\n(of each picture's largest)", fontsize=8.5)
        figure.suptitle(
            shorten(label, LABEL_LIMIT), parse_math=False, fontsize=9.5, fontweight="bold", x=0.005, ha="left"
        )
    return figure


def _as_floats(picture: Any) -> NDArray[np.float64]:
    array = np.asarray(picture)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise InputError(f"pictures of shape [H, W, 3] are needed, not {list(array.shape)}")
    scaled: NDArray[np.float64] = array / 255.0 if array.dtype == np.uint8 else array.astype(np.float64)
    return scaled.clip(0.0, 1.0)
