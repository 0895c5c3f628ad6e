"""Numbers of all heads, or of all pairs of layers, at a glance: a cell each (S1, Figure 3); of layers, a line."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from nearsight.lens import HeadTable, LayerSimilarity
from nearsight.report.figures.style import DISTANCE_LABEL, GRID, HATCH, INK, PAPER, colour_bar, house_style
from nearsight.report.inputs import ModelHeads, check_labels, shorten

# In inches. A number of four characters needs the cell below; panels shrink when many models stand side by side.
_CELL = (0.42, 0.28)
_CELL_FOR_NUMBER = (0.32, 0.19)
_PANEL_WIDTH, _PANEL_HEIGHT = (1.5, 4.4), (2.2, 5.6)
_ALL_PANELS_WIDTH = 14.0
_CHARACTER_OF_TITLE = 0.1
_TICK_LABEL = 0.25
# Of pairs of layers: a cell, and the panel, which grows with the layers between these.
_PAIR, _PAIRS = 0.2, (2.4, 5.6)
_MOST_TICKS = 16
_LABEL_LIMIT = 40
LAYER, HEAD = "layer (from 0)", "head (from 0)"

_SCALE_LABELS = {"mad": DISTANCE_LABEL, "entropy": "attention entropy\n(1 = uniform)"}
# Not the theme's colours: the cells under the text are the same on a dark page.
_LIGHT_TEXT, _DARK_TEXT = "#fcfcfd", "#101418"


def heatmaps(models: Sequence[ModelHeads], *, by_rank: bool = False) -> Figure:
    """Mean attention distance (top) and entropy (bottom), layers × heads, one column per model.

    All models share one colour scale per metric. Both begin at 0, so that small differences look small; bright is
    more. Heads that do not exist are hatched. Cells hold their number where it fits. Layers and heads count from 0;
    `by_rank`: a head's number is its rank by distance, which people count from 1.
    """
    check_labels(models)
    layers = sorted({layer for model in models for layer in model.layers()})
    num_heads = max(model.matrix("mad").shape[1] for model in models)
    widest = max(_PANEL_WIDTH[0], min(_PANEL_WIDTH[1], _ALL_PANELS_WIDTH / len(models)))
    width = float(np.clip(_CELL[0] * num_heads, _PANEL_WIDTH[0], widest))
    height = float(np.clip(_CELL[1] * len(layers), *_PANEL_HEIGHT))
    with_numbers = width / num_heads >= _CELL_FOR_NUMBER[0] and height / len(layers) >= _CELL_FOR_NUMBER[1]
    with house_style():
        figure = Figure(figsize=((width + 0.25) * len(models) + 1.4, 2 * (height + 0.5) + 0.4), layout="constrained")
        panels = figure.subplots(2, len(models), sharex=True, sharey=True, squeeze=False)
        for metric, row in zip(("mad", "entropy"), panels, strict=True):
            cells = [_cells(model, metric, layers, num_heads) for model in models]
            largest = 1.0 if metric == "entropy" else largest_cell(cells)
            for index, panel in enumerate(row):
                image = draw_cells(panel, cells[index], largest, with_numbers=with_numbers)
                image.set_gid(f"{metric}-model{index}")
            colour_bar(figure, image, list(row), _SCALE_LABELS[metric], pad=0.015)
            row[0].set_ylabel(LAYER)
        for panel, model in zip(panels[0], models, strict=True):
            panel.set_title(shorten(model.label, int(width / _CHARACTER_OF_TITLE)), parse_math=False)
        for panel in panels[-1]:
            panel.set_xlabel("head, by distance" if by_rank else HEAD)
        number_cells(panels[0, 0], layers, num_heads, width=width, first_column=int(by_rank))
    return figure


def head_heatmaps(table: HeadTable, columns: Sequence[str], *, label: str, layers: Sequence[int]) -> Figure:
    """Further numbers of a model's heads, layers × heads, one panel with a scale of its own per column.

    Layers and heads count from 0; `layers` are the numbers that the table's layers have in the whole model.
    """
    num_layers, num_heads = table.mad.shape
    width, height, with_numbers = panel_size(num_layers, num_heads)
    with house_style():
        figure = Figure(figsize=((width + 0.9) * len(columns) + 0.4, height + 0.9), layout="constrained")
        panels = figure.subplots(1, len(columns), sharex=True, sharey=True, squeeze=False)[0]
        for name, panel in zip(columns, panels, strict=True):
            cells = table.extra[name]
            image = draw_cells(panel, cells, largest_cell([cells]), with_numbers=with_numbers)
            colour_bar(figure, image, [panel], pad=0.02)
            panel.set_title(name.replace("_", " "), parse_math=False)
            panel.set_xlabel(HEAD)
        panels[0].set_ylabel(LAYER)
        figure.suptitle(shorten(label, int(width * len(columns) / _CHARACTER_OF_TITLE)), parse_math=False)
        number_cells(panels[0], layers, num_heads, width=width)
    return figure


def panel_size(num_layers: int, num_heads: int) -> tuple[float, float, bool]:
    """Inches of a panel with a cell per head: width, height, and whether numbers fit into the cells."""
    width = float(np.clip(_CELL[0] * num_heads, *_PANEL_WIDTH))
    height = float(np.clip(_CELL[1] * num_layers, *_PANEL_HEIGHT))
    return width, height, width / num_heads >= _CELL_FOR_NUMBER[0] and height / num_layers >= _CELL_FOR_NUMBER[1]


def layer_lines(table: HeadTable, columns: Sequence[str], *, label: str, layers: Sequence[int]) -> Figure:
    """Numbers of a model's layers, one panel with a scale of its own per column; a gap where a number is not known.

    Layers count from 0; `layers` are the numbers that the table's layers have in the whole model.
    """
    width = float(np.clip(_CELL[1] * len(layers), *_PANEL_WIDTH))
    with house_style():
        figure = Figure(figsize=((width + 0.7) * len(columns) + 0.4, _PANEL_HEIGHT[0] + 0.6), layout="constrained")
        panels = figure.subplots(1, len(columns), sharex=True, squeeze=False)[0]
        for name, panel in zip(columns, panels, strict=True):
            panel.plot(layers, table.extra[name], color=INK, marker="o", markersize=3.5, linewidth=1.2, gid=name)
            panel.set_title(name.replace("_", " "), parse_math=False)
            panel.set_xlabel(LAYER)
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.grid(axis="y")
            panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
        figure.suptitle(shorten(label, int(width * len(columns) / _CHARACTER_OF_TITLE)), parse_math=False)
    return figure


def _cells(model: ModelHeads, metric: str, layers: Sequence[int], num_heads: int) -> NDArray[np.float64]:
    """The model's numbers in the rows and columns that all models share."""
    cells = np.full((len(layers), num_heads), np.nan)
    matrix = model.matrix(metric)
    cells[[layers.index(layer) for layer in model.layers()], : matrix.shape[1]] = matrix
    return cells


def largest_cell(cells: Sequence[NDArray[np.float64]]) -> float:
    """The upper end of the scale of all these cells."""
    values = np.concatenate([matrix.ravel() for matrix in cells])
    # A scale from 0 to 0 cannot be drawn; with nothing above 0 any scale shows the same.
    return float(np.nanmax(values, initial=0.0)) or 1.0


def draw_cells(
    panel: Axes, cells: NDArray[np.float64], largest: float, *, with_numbers: bool, digits: int = 2
) -> AxesImage:
    """A cell per number, from 0 to the largest; hatched where there is none."""
    # Missing cells are transparent and let the hatched background through: they cannot be taken for a zero.
    panel.patch.set(facecolor=GRID, hatch="////", edgecolor=HATCH, linewidth=0)
    image = panel.imshow(
        np.ma.masked_invalid(cells), cmap="viridis", vmin=0.0, vmax=largest, aspect="auto", interpolation="none"
    )
    panel.spines[:].set_visible(False)
    panel.set_xticks(np.arange(0.5, cells.shape[1] - 1), minor=True)
    panel.set_yticks(np.arange(0.5, cells.shape[0] - 1), minor=True)
    panel.grid(which="minor", color=PAPER, linewidth=0.8 if cells.size <= 400 else 0.3)
    panel.set_axisbelow(False)
    panel.tick_params(which="both", length=0)
    if with_numbers:
        for (row, head), value in np.ndenumerate(cells):
            if np.isfinite(value):
                colour = _readable_on(image.cmap(value / largest))
                panel.text(head, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=7, color=colour)
    return image


def _readable_on(background: tuple[float, float, float, float]) -> str:
    """Black or white text, whichever stands out more (the contrast ratio of WCAG)."""
    channels = np.asarray(to_rgb(background))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return _DARK_TEXT if (luminance + 0.05) ** 2 > 0.05 * 1.05 else _LIGHT_TEXT


def number_cells(panel: Axes, layers: Sequence[int], num_heads: int, *, width: float, first_column: int = 0) -> None:
    """The panels share their axes, so numbering one numbers all; `width`: of each, in inches."""
    rows = range(0, len(layers), -(-len(layers) // 16))
    columns = range(0, num_heads, -(-num_heads // int(width / _TICK_LABEL)))
    panel.set_yticks(rows, [str(layers[row]) for row in rows])
    panel.set_xticks(columns, [str(first_column + column) for column in columns])


def similarity_heatmap(similarity: LayerSimilarity, *, label: str, other_label: str | None = None) -> Figure:
    """CKA between the layers of a model (rows, the first at the bottom) and of the other one, or the same (columns).

    The scale goes from 0 to 1, so that figures can be compared. What the unbiased estimate puts below 0 is drawn as 0;
    pairs it cannot say anything about (tokens that are the same for all images) are hatched (after Raghu et al. 2021,
    Figures 1 and 2).
    """
    num_rows, num_cols = similarity.matrix.shape
    height, width = (float(np.clip(_PAIR * num, *_PAIRS)) for num in (num_rows, num_cols))
    with house_style():
        figure = Figure(figsize=(width + 1.7, height + 0.9), layout="constrained")
        panel = figure.subplots()
        panel.patch.set(facecolor=PAPER, hatch="////", edgecolor=HATCH, linewidth=0)
        cells = np.ma.masked_invalid(similarity.matrix)
        look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "none", "gid": "cka"}
        image = panel.imshow(cells, cmap="viridis", vmin=0.0, vmax=1.0, **look)
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
        for set_ticks, num in ((panel.set_yticks, num_rows), (panel.set_xticks, num_cols)):
            ticks = range(0, num, -(-num // _MOST_TICKS))
            set_ticks(ticks, [str(tick) for tick in ticks])
        if other_label is None:
            panel.set_title(shorten(label, _LABEL_LIMIT), parse_math=False)
            panel.set_xlabel(LAYER)
            panel.set_ylabel(LAYER)
        else:
            panel.set_xlabel(f"{LAYER} of {shorten(other_label, _LABEL_LIMIT)}", parse_math=False)
            panel.set_ylabel(f"{LAYER} of {shorten(label, _LABEL_LIMIT)}", parse_math=False)
        colour_bar(figure, image, panel, "linear CKA (1 = equal up to rotation)", pad=0.02)
    return figure
