"""The face of a `HeadTable`: what its methods for people show in a notebook, draw, say and write.

The table is of the room `lens`, which comes before this one, and asks for this file when such a method is called.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearsight.data.parquet import require
from nearsight.errors import InputError, unknown_name
from nearsight.files import check_output_folder
from nearsight.lens import HeadTable
from nearsight.report import reading
from nearsight.report.inputs import ModelHeads, shorten, with_images
from nearsight.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nearsight.report.explorer import Explorer

_LABEL_LIMIT = 60
_IN_A_NOTEBOOK = """
.nsx { --nsx-ink: currentColor; --nsx-paper: var(--jp-layout-color0, Canvas); --nsx-accent: #3b8eea; }
"""
"""The explorer's colours where the page is not ours, and light or dark."""
_COLOURS = "viridis"
# Of the heat map in a notebook, in pixels: a cell that holds its number, one of many, and the widest map there is.
_CELL, _SMALL_CELL, _WIDEST = (30, 18), (7, 8), 640
_MARGIN_LEFT, _MARGIN_TOP, _SCALE_WIDTH = 56, 16, 220


def as_model(table: HeadTable, label: str | None = None) -> ModelHeads:
    """A table's heads for figures and words, with the numbers its layers have in the whole model."""
    numbers = table.numbers or tuple(range(len(table.layer_names)))
    frame = table.to_frame()
    frame = frame.assign(layer=[numbers[place] for place in frame["layer"]], epoch=0)
    grids = {
        number: (int(rows), int(cols))
        for number, (rows, cols) in zip(numbers, table.extra.get("grid_size", np.empty((0, 2))), strict=False)
        if math.isfinite(rows)  # images of several sizes have no one grid
    }
    uniform = None if table.uniform is None else dict(zip(numbers, table.uniform.tolist(), strict=True))
    model = ModelHeads(label=label or _label(table), heads=frame, grids=grids or None, uniform=uniform)
    return with_images(model, table)


def _label(table: HeadTable) -> str:
    return table.label or "model"


def compare(one: HeadTable, other: HeadTable) -> reading.Reading:
    """`nearsight.report.compare` of two tables; of the same name, the first and the second are told apart."""
    labels = [_label(one), _label(other)]
    if labels[0] == labels[1]:
        labels = [f"{label} ({which})" for label, which in zip(labels, ("this", "the other"), strict=True)]
    return reading.compare(*(as_model(table, label) for table, label in zip((one, other), labels, strict=True)))


def html(table: HeadTable) -> str:
    """For a notebook, light or dark: a heat map of the heads' distances with its scale, and the sentences."""
    layers, heads = table.mad.shape
    images = "1 image" if table.num_images == 1 else f"{table.num_images:,} images"
    title = (
        f"<strong>{escape(shorten(_label(table), _LABEL_LIMIT))}</strong>: {layers} layers × {heads} heads, {images}"
    )
    skipped = f", {len(table.skipped)} layers skipped" if table.skipped else ""
    if not np.isfinite(table.mad).any():
        return f"<p>{title}{skipped}; no head has a distance on the image</p>"
    return (
        f'<div style="max-width:48em"><p>{title}{skipped}</p>{_heat_svg(table)}'
        f"{reading.sentences_html(reading.describe(as_model(table)))}</div>"
    )


def _heat_svg(table: HeadTable) -> str:
    """All distances as one drawing without scripts. Its letters have the colour of the text around it."""
    import matplotlib as mpl  # here, because words need no drawing

    num_layers, num_heads = table.mad.shape
    numbers = table.numbers or range(num_layers)
    is_large = num_heads * _CELL[0] <= _WIDEST and num_layers * _CELL[1] <= _WIDEST
    width, height = _CELL if is_large else (max(_SMALL_CELL[0], min(16, _WIDEST // num_heads)), _SMALL_CELL[1])
    uniform = np.full(num_layers, math.nan) if table.uniform is None else table.uniform
    top = float(np.nanmax([np.nanmax(table.mad), *uniform[np.isfinite(uniform)]])) or 1.0
    colours = mpl.colormaps[_COLOURS]

    def colour(value: float) -> str:
        return mpl.colors.to_hex(colours(value / top))

    parts = [
        f'<text x="{_MARGIN_LEFT + (head + 0.5) * width:g}" y="{_MARGIN_TOP - 5}" text-anchor="middle">'
        f"{'' if head else 'head '}{head}</text>"
        for head in range(num_heads)
        if is_large or head == 0
    ]
    for layer in range(num_layers):
        y = _MARGIN_TOP + layer * height
        if is_large or layer % 4 == 0:
            place = f'x="{_MARGIN_LEFT - 5}" y="{y + height / 2 + 3.5:g}" text-anchor="end"'
            parts.append(f"<text {place}>layer {numbers[layer]}</text>")
        for head in np.flatnonzero(np.isfinite(table.mad[layer])):
            value, x = float(table.mad[layer, head]), _MARGIN_LEFT + int(head) * width
            beside = "" if math.isnan(uniform[layer]) else f", uniform {uniform[layer]:.3f}"
            said = (
                f"layer {numbers[layer]} ({table.layer_names[layer]}), head {head}: distance {value:.3f}{beside}, "
                f"entropy {table.entropy[layer, head]:.3f}"
            )
            number = ""
            if is_large:
                ink = "#101418" if value / top > 0.55 else "#fcfcfd"  # viridis is light from there on
                number = (
                    f'<text x="{x + width / 2:g}" y="{y + height / 2 + 3:g}" text-anchor="middle" font-size="9" '
                    f'style="fill:{ink}">{value:.2f}</text>'
                )
            parts.append(
                f'<g><title>{escape(said)}</title><rect x="{x}" y="{y}" width="{width - 1}" height="{height - 1}" '
                f'fill="{colour(value)}"/>{number}</g>'
            )
    end = _MARGIN_TOP + num_layers * height + 8
    parts.append(_scale_svg(uniform, top, [colour(top * share / 8) for share in range(9)], end))
    whole = _MARGIN_LEFT + max(num_heads * width, _SCALE_WIDTH + 60), end + 52
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="mean attention distance of every head" '
        f'width="{whole[0]}" height="{whole[1]}" viewBox="0 0 {whole[0]} {whole[1]}" '
        'style="max-width:100%;height:auto;color:inherit" font-family="sans-serif" font-size="10">'
        f'<g style="fill:currentColor">{"".join(parts)}</g></svg>'
    )


def _scale_svg(uniform: NDArray[np.float64], top: float, stops: Sequence[str], y: int) -> str:
    """The colours from 0 on, with a mark where uniform attention is: of layers that differ, the least and the most."""
    cells = "".join(
        f'<rect x="{_MARGIN_LEFT + place * _SCALE_WIDTH / len(stops):.1f}" y="{y}" '
        f'width="{_SCALE_WIDTH / len(stops) + 0.5:.1f}" height="8" fill="{stop}"/>'
        for place, stop in enumerate(stops)
    )
    known = np.unique(uniform[np.isfinite(uniform)].round(3))
    ends = [] if not len(known) else [known[0], known[-1]] if len(known) > 1 else [known[0]]
    marks = "".join(
        f'<path d="M{_MARGIN_LEFT + _SCALE_WIDTH * min(1.0, value / top):.1f} {y - 3}v14" stroke="currentColor" '
        'stroke-width="1.5"/>'
        for value in ends
    )
    values = " to ".join(f"{value:.3f}" for value in ends)
    said = f'<text x="{_MARGIN_LEFT}" y="{y + 47}">│ uniform attention: {values}</text>' if ends else ""
    return (
        f'{cells}{marks}<text x="{_MARGIN_LEFT}" y="{y + 21}">0</text>'
        f'<text x="{_MARGIN_LEFT + _SCALE_WIDTH}" y="{y + 21}" text-anchor="end">{top:.3f}</text>'
        f'<text x="{_MARGIN_LEFT}" y="{y + 34}">mean attention distance (1: the grid’s diagonal)</text>{said}'
    )


def plot(table: HeadTable, what: str | Sequence[str] | None, ax: "Axes | None") -> "Figure | Axes":
    """See `HeadTable.plot`."""
    from matplotlib.figure import Figure

    from nearsight.report.figures.style import house_style

    class FigureOfTable(Figure):
        """Shown by notebooks, whether pyplot was ever imported or not, and once: it is none of pyplot's own."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=144)
            return file.getvalue()

    if what is None:
        what = ("mad", "entropy") if ax is None else ("mad",)
    names = (what,) if isinstance(what, str) else tuple(what)
    arrays = _by_head(table)
    for name in names:
        if name not in arrays:
            raise unknown_name("array of layers × heads", name, arrays)
    if len(names) != 1 and (ax is not None or not names):
        raise InputError(f"ax takes one heat map, but {len(names)} are asked for; name one with what=…")
    if ax is not None:
        _draw(table, names[0], arrays[names[0]], ax)
        return ax
    num_layers, num_heads = table.mad.shape
    size = (max(2.6, min(0.34 * num_heads, 6.0)) + 1.5) * len(names), max(2.0, min(0.24 * num_layers, 7.0)) + 0.9
    with house_style():
        figure = FigureOfTable(figsize=size, layout="constrained")
        for name, panel in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
            _draw(table, name, arrays[name], panel)
        figure.suptitle(shorten(_label(table), _LABEL_LIMIT), parse_math=False)
    return figure


def _by_head(table: HeadTable) -> dict[str, NDArray[np.float64]]:
    shape = table.mad.shape
    pairs = ("grid_size", "cell_size")
    further = {name: values for name, values in table.extra.items() if values.shape == shape and name not in pairs}
    return {"mad": table.mad, "entropy": table.entropy, **further}


def _draw(table: HeadTable, name: str, values: NDArray[np.float64], ax: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    from nearsight.report.figures.style import DISTANCE_LABEL, ENTROPY_LABEL, colour_bar

    known = np.empty(0) if table.uniform is None else table.uniform[np.isfinite(table.uniform)]
    top = {"mad": max([np.nanmax(values, initial=0.0), *known]), "entropy": 1.0}.get(
        name, np.nanmax(values, initial=0.0)
    )
    image = ax.imshow(values, cmap=_COLOURS, vmin=0.0, vmax=float(top) or 1.0, aspect="auto", interpolation="none")
    numbers = table.numbers or tuple(range(len(values)))
    rows = range(0, len(values), -(-len(values) // 16))
    ax.set_yticks(rows, [str(numbers[row]) for row in rows])
    ax.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    labels = {"mad": DISTANCE_LABEL, "entropy": ENTROPY_LABEL}
    figure = ax.get_figure(root=True)
    assert figure is not None
    bar = colour_bar(figure, image, ax, labels.get(name, name.replace("_", " ")))
    marks = {"mad": np.unique(known.round(6)).tolist(), "entropy": [1.0]}
    for value in marks.get(name, []):
        bar.ax.axhline(value, color="black", linewidth=3, gid="uniform")
        bar.ax.axhline(value, color="white", linewidth=1)  # stands out from every colour
    if name == "mad" and len(known):
        bar.ax.set_title("═ uniform", fontsize=8, loc="left", fontweight="normal")


def write(table: HeadTable, path: Path) -> Path:
    """See `HeadTable.report`."""
    from nearsight.report.page.models import common_grid, write_page

    path = path / "report.html" if path.is_dir() else path
    check_output_folder(path.parent)
    model = as_model(table)
    explorer = None if table.maps is None else _explorer(table, model)
    write_page(path, title=model.label, models=[model], grid_size=common_grid([model]), explorer=explorer)
    return path


def _explorer(table: HeadTable, model: ModelHeads) -> "Explorer":
    from nearsight.report.explorer import KeptMaps, explore

    assert table.maps is not None
    return explore([KeptMaps(heads=model, layers=table.maps.layers, pictures_BHWC=table.maps.pictures_BHWC)])


def widget(table: HeadTable) -> Any:
    """See `HeadTable.explore`."""
    if table.maps is None:
        raise InputError("there are no maps to explore; measure with keep='maps' (a saved table does not hold them)")
    anywidget, traitlets = (
        require("anywidget", "for the explorer in a notebook", extra="notebook"),
        require("traitlets", "for the explorer in a notebook", extra="notebook"),
    )
    from nearsight.report.explorer import explorer_module, explorer_style

    kind = type(
        "AttentionExplorer",
        (anywidget.AnyWidget,),
        {
            "__doc__": "The attention explorer: click a patch, and every head shows where it looks.",
            "_esm": explorer_module(),
            "_css": explorer_style() + _IN_A_NOTEBOOK,
            "data": traitlets.Dict().tag(sync=True),
        },
    )
    return kind(data=dict(_explorer(table, as_model(table)).data))


def dataset(table: HeadTable) -> Any:
    """See `HeadTable.to_xarray`."""
    xarray = require("xarray", "for to_xarray", extra="xarray")
    num_layers, num_heads = table.mad.shape
    by_head: Mapping[str, NDArray[np.float64]] = {
        **_by_head(table),
        "mad_std": table.mad_std,
        "entropy_std": table.entropy_std,
    }
    variables: dict[str, Any] = {name: (("layer", "head"), values) for name, values in by_head.items()}
    variables |= {name: ("layer", values) for name, values in table.extra.items() if values.ndim == 1}
    if "grid_size" in table.extra:
        variables |= dict(
            zip(("grid_rows", "grid_cols"), (("layer", side) for side in table.extra["grid_size"].T), strict=True)
        )
    if table.uniform is not None:
        variables["uniform_mad"] = "layer", table.uniform
    coordinates: dict[str, Any] = {
        "layer": list(table.numbers or range(num_layers)),
        "head": np.arange(num_heads),
        "layer_name": ("layer", list(table.layer_names)),
    }
    if table.per_image is not None:
        coordinates["image"] = table.per_image.digests
        kept = {"mad": table.per_image.mad, "entropy": table.per_image.entropy, **table.per_image.further}
        variables |= {f"{name}_per_image": (("image", "layer", "head"), values) for name, values in kept.items()}
    attributes = {
        "label": _label(table),
        "num_images": table.num_images,
        "skipped": json.dumps(dict(table.skipped)),
        "nearsight": __version__,
    }
    return xarray.Dataset(variables, coords=coordinates, attrs=attributes)
