"""The result of measuring a model: every head's distance and entropy, with their spread over images."""

import math
import operator
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.files import check_file, replacing
from nearsight.lens.mapsfile import PictureMaps
from nearsight.lens.perimage import KeptImages, PerImage
from nearsight.metrics.attention import next_patch_distance, uniform_attention_distance
from nearsight.metrics.kinds import KindShares, edge_attention_distance, head_kinds
from nearsight.metrics.moments import Moments, merged_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nearsight.report import Reading

Array = NDArray[np.float64]
Unit = Literal["diagonal", "patches", "pixels"]
KIND_COLUMNS = {name: f"kind_{name}" for name in KindShares._fields}
"""What says how much of each kind a head is → its array in `extra`, of a table measured with `what=["kinds"]`."""
_REFERENCES = ("uniform", "next_patch", "edge", "nearest_edge")
"""Heads that everyone can imagine: `HeadTable.reach` has a column for each."""
_FORMAT = 1
MOST_BYTES = 2**29
"""Of the arrays in a file, which may be compressed."""
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_OF_GRIDS = {"grid_size": ("grid_rows", "grid_cols"), "cell_size": ("cell_height", "cell_width")}
"""Pairs per layer, and the columns they are in a frame."""
_OF_ONE_SIZE = (*_OF_GRIDS, "sigma_most")
"""Arrays that belong to images of one size: they have no mean over sizes."""
_ON_THE_GRID = {"offset_attention": "attention by steps", "outlier_map": "places of outliers"}
"""Arrays with axes of a layer's rows and columns, and what they are."""
_OF_IMAGES = {"digests": np.uint64, "mad": np.float32, "entropy": np.float32}
"""The arrays of `PerImage`, which a file may do without: those of earlier versions do."""
_FURTHER = "per_image/further/"
"""Before the names of `PerImage.further`."""


@dataclass(frozen=True, eq=False, repr=False)  # arrays are not equal or unequal as a whole
class HeadTable:
    """Per layer and head: mean attention distance and normalised entropy, mean and deviation over images.

    Arrays are layers × heads, float64; a layer with fewer heads than the widest is padded with NaN.
    """

    layer_names: tuple[str, ...]
    """Dotted name of each layer's attention module; a second attention in one module is marked "#2"."""
    mad_moments: Moments
    """Mean attention distance over images."""
    entropy_moments: Moments
    """Normalised entropy over images."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Layers that are not spatial attention, with the reason."""
    extra: Mapping[str, Array] = field(default_factory=dict)
    """Further arrays, by name: the layers first; means over the images where they depend on these."""
    per_image: PerImage | None = None
    """The same numbers of single images: of all of them or, where these are very many, of a sample; None: not kept."""
    uniform: Array | None = None
    """[layers]: the distance of a head that attends alike to every patch it may attend to (its entropy is 1), exactly:
    in windows, on pooled keys and behind masks, too. NaN where it is not one number, as with masks that differ from
    image to image; None: not known, as in files of earlier versions."""
    numbers: tuple[int, ...] | None = None
    """The place of each layer among all those of the model, from 0, where `layers=` chose some; None: these are all."""
    label: str | None = None
    """What the model is called."""
    maps: PictureMaps | None = None
    """Where every head looks on a few of the images, if measured with `keep="maps"`; not saved with the table."""

    def __repr__(self) -> str:
        """What was measured, the most local head, and where to look: the numbers themselves would fill a screen."""
        layers, heads = self.mad.shape
        label = "" if self.label is None else f"{self.label}: "
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        local = ""
        if np.isfinite(self.mad).any():
            layer, head = np.unravel_index(np.nanargmin(self.mad), self.mad.shape)
            uniform = math.nan if self.uniform is None else self.uniform[layer]
            beside = "" if math.isnan(uniform) else f" (uniform {uniform:.3f})"
            local = f"; most local [{layer}, {head}]: MAD {self.mad[layer, head]:.3f}{beside}"
        more = "".join(f", .extra[{name!r}]" for name in self.extra if name not in _OF_GRIDS)
        if self.per_image is not None:
            more += ", .per_image" + (f" of {len(self.per_image)}" if len(self.per_image) < self.num_images else "")
        return (
            f"HeadTable({label}{layers} layers × {heads} heads, {self.num_images} images{skipped}{local}; "
            f".mad, .entropy, .to_frame(), .plot(), .compare(other), .report(path){more})"
        )

    # What people look at is made by the room `report`, which comes after this one: it is asked for when it is used.

    def _repr_html_(self) -> str:
        """In a notebook: the heads as a heat map, uniform attention in its legend, and what the numbers say."""
        from nearsight.report import face

        return face.html(self)

    def plot(self, what: str | Sequence[str] | None = None, *, ax: "Axes | None" = None) -> "Figure | Axes":
        """Heat maps of the heads, layers × heads, counted from 0; a line in the scale marks uniform attention.

        `what`: "mad", "entropy", or an array of `extra` that is layers × heads, or several of them; by default distance
        and entropy. Returns a matplotlib figure with a panel for each. With `ax`, one of them, by default the distance,
        is drawn there, and the axes are returned.
        """
        from nearsight.report import face

        return face.plot(self, what, ax)

    def compare(self, other: "HeadTable") -> "Reading":
        """Which of two models attends more locally, if either clearly does; image by image, if both saw the same.

        What is returned prints as sentences; its fields are `clear`, `more_local`, and differences with intervals.
        """
        from nearsight.report import face

        return face.compare(self, other)

    def report(self, path: str | Path) -> Path:
        """Write the page that `nearsight measure` writes: one file that opens anywhere, with the attention explorer if
        maps were kept. `path`: the file or, for report.html in it, a folder that is there. Returns the file."""
        from nearsight.report import face

        return face.write(self, Path(path))

    def explore(self) -> Any:
        """The attention explorer as a widget of notebooks: click a patch, and every head shows where it looks.

        For a table measured with `keep="maps"`; it needs anywidget (the extra notebook).
        """
        from nearsight.report import face

        return face.widget(self)

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` with the dimensions layer and head (and image, for the numbers of single images)."""
        from nearsight.report import face

        return face.dataset(self)

    @property
    def mad(self) -> Array:
        return self.mad_moments.mean

    @property
    def mad_std(self) -> Array:
        """Over the images; NaN for a single one, which has no spread."""
        return _spread(self.mad_moments)

    @property
    def entropy(self) -> Array:
        return self.entropy_moments.mean

    @property
    def entropy_std(self) -> Array:
        return _spread(self.entropy_moments)

    @property
    def num_images(self) -> int:
        return self.mad_moments.count

    def to_frame(self) -> pd.DataFrame:
        """One row per head, layers and heads counted from 0: the columns of heads.csv without the epoch."""
        layer, head = np.nonzero(~np.isnan(self.mad) | ~np.isnan(self.entropy))
        names = np.array(self.layer_names, dtype=object)
        return pd.DataFrame(
            {
                "layer": layer,
                "layer_name": names[layer],
                "head": head,
                "mad": self.mad[layer, head],
                "mad_std": self.mad_std[layer, head],
                "entropy": self.entropy[layer, head],
                "entropy_std": self.entropy_std[layer, head],
                "num_images": self.num_images,
            }
        )

    def extra_frame(self, per: Literal["head", "layer"] = "head") -> pd.DataFrame:
        """The further measurements as columns: one row per head, or per layer; both counted from 0.

        Per head, with its distance and entropy left out: the shares, the quantiles of its distance as distance_q10, …,
        distance_q90, and its kind. Per layer: its grid, and what its tokens are like.
        """
        if per == "head":
            frame = self.to_frame()[["layer", "layer_name", "head"]]
            place: tuple[Any, ...] = (frame["layer"].to_numpy(), frame["head"].to_numpy())
            known = (*_OF_GRIDS, "distance_values")
            columns: dict[str, NDArray[Any]] = {
                name: values for name, values in self.extra.items() if values.ndim == 2 and name not in known
            }
            if "distance_mass" in self.extra:
                names = [f"distance_q{round(100 * level):02}" for level in _QUANTILES]
                columns.update(zip(names, np.moveaxis(self.distance_quantiles(_QUANTILES), -1, 0), strict=True))
            if KIND_COLUMNS["own"] in self.extra:
                columns["kind"] = self.kinds()
        else:
            frame = pd.DataFrame({"layer": range(len(self.layer_names)), "layer_name": list(self.layer_names)})
            place = (slice(None),)
            pairs = {name: self.extra[name].T for name in _OF_GRIDS if name in self.extra}
            columns = {
                column: row for name, rows in pairs.items() for column, row in zip(_OF_GRIDS[name], rows, strict=True)
            }
            columns.update({name: values for name, values in self.extra.items() if values.ndim == 1})
        return frame.assign(**{name: values[place] for name, values in columns.items()}, num_images=self.num_images)

    def distance_quantiles(self, levels: Sequence[float] = _QUANTILES) -> Array:
        """The distances within which these shares of attention are paid: [layers, heads, levels], in diagonals.

        Of the attention of all patches in all images together, renormalised over the patches. A quantile is the
        smallest distance that occurs by which the share is reached, so it is one of the grid's own distances. It needs
        a table measured with `what=["quantiles"]`.
        """
        if "distance_mass" not in self.extra:
            raise InputError("the distribution of distances was not measured; measure with what=['quantiles']")
        if not all(0 <= level <= 1 for level in levels):
            raise InputError(f"quantiles are levels in [0, 1], not {list(levels)}")
        mass, values = self.extra["distance_mass"], self.extra["distance_values"]
        reached = np.nan_to_num(mass).cumsum(-1)
        total = reached[..., -1:]
        quantiles = np.full((*mass.shape[:2], len(levels)), np.nan)
        for position, level in enumerate(levels):
            # Sums of many small masses are rounded: a share that is almost reached counts as reached.
            first = ((reached >= level * total * (1 - 1e-9)) & (reached > 0)).argmax(-1)
            quantiles[..., position] = np.take_along_axis(values, first, axis=-1)
        quantiles[np.isnan(mass).all(-1)] = np.nan  # heads that do not exist
        return quantiles

    def offset_maps(self, layer: int) -> Array:
        """How much attention the heads of a layer (by position) pay to a patch at each step from the one that looks,
        which is the middle: [heads, 2·rows − 1, 2·columns − 1] of the layer's grid; NaN where no patch is so far away.
        It needs a table measured with `what=["offsets"]`.
        """
        if "offset_attention" not in self.extra:
            raise InputError("attention by steps was not measured; measure with what=['offsets']")
        rows, cols = self.extra["grid_size"][layer].astype(int)
        maps: Array = self.extra["offset_attention"][layer, :, : 2 * rows - 1, : 2 * cols - 1]
        return maps

    def kinds(self) -> NDArray[np.str_]:
        """What kind of head each one is, [layers, heads]: "own patch", "neighbour", "row/column", "edge", "sink",
        "global" or "other"; "" for one that does not exist. It needs a table measured with `what=["kinds"]`."""
        if KIND_COLUMNS["own"] not in self.extra:
            raise InputError("the kinds of heads were not measured; measure with what=['kinds']")
        return head_kinds({name: self.extra[column] for name, column in KIND_COLUMNS.items()})

    @classmethod
    def merge(cls, tables: Iterable[Self]) -> Self:
        """The table of all images, from tables of the same model over disjoint images, in any order: the same bits.

        If the images are of several sizes, the layers' grids, where they differ, are NaN. Values of single images are
        kept where all tables have them.
        """
        kept, parts = KeptImages(), list[Self]()
        for table in tables:
            kept.add(table.per_image)
            parts.append(replace(table, per_image=None))  # given one by one, tables need not all be in memory
        if not parts:
            raise InputError("no tables to merge")
        first, *others = parts
        for table in others:
            if table.layer_names != first.layer_names or table.mad.shape != first.mad.shape:
                raise InputError("tables of different models cannot be merged: their layers or heads differ")
            if first.extra.keys() != table.extra.keys():
                raise InputError("tables cannot be merged: different things were measured")
            one, other = (part.extra.get("distance_values", np.empty(0)) for part in (first, table))
            if not np.array_equal(one, other, equal_nan=True):
                raise InputError("distributions of distances can be merged for images of one size only")
            one, other = (part.extra.get("grid_size", np.empty(0)) for part in (first, table))
            for name, said in _ON_THE_GRID.items():
                if name in first.extra and not np.array_equal(one, other):
                    raise InputError(f"{said} can be merged for images of one size only")
        counts = [table.num_images for table in parts]
        extra = {name: np.stack([table.extra[name] for table in parts]) for name in first.extra}
        return cls(
            first.layer_names,
            first.mad_moments.merge(*(table.mad_moments for table in others)),
            first.entropy_moments.merge(*(table.entropy_moments for table in others)),
            {name: reason for table in reversed(parts) for name, reason in table.skipped.items()},
            {
                name: _agreed(values) if name in _OF_ONE_SIZE else merged_means(values, counts)
                for name, values in extra.items()
            },
            kept.values(),
            None
            if any(table.uniform is None for table in parts)
            else merged_means(np.stack([table.uniform for table in parts if table.uniform is not None]), counts),
            first.numbers,
            first.label,
            next((table.maps for table in parts if table.maps is not None), None),
        )

    def choose(self, layers: Sequence[int | str]) -> Self:
        """The table of these layers alone, by position (from 0, or from the end) or name."""
        chosen = layer_positions(self.layer_names, layers)

        def pick(moments: Moments) -> Moments:
            return Moments(moments.count, moments.mean[chosen], moments.squared_deviations[chosen])

        return type(self)(
            tuple(self.layer_names[position] for position in chosen),
            pick(self.mad_moments),
            pick(self.entropy_moments),
            self.skipped,
            {name: values[chosen] for name, values in self.extra.items()},
            None if self.per_image is None else self.per_image.choose(chosen),
            None if self.uniform is None else self.uniform[chosen],
            tuple(chosen if self.numbers is None else (self.numbers[place] for place in chosen)),
            self.label,
            None if self.maps is None else self.maps.choose([self.layer_names[place] for place in chosen]),
        )

    def mad_in(self, unit: Unit) -> Array:
        """Mean attention distance in diagonals of each layer's own grid of tokens (`mad` itself), in its cells, or in
        pixels of the image.

        A table of images of several sizes has no distances in cells and pixels: measure those of each size separately.
        """
        distance: Array = self.mad * self._diagonals_in(unit)[:, None]
        return distance

    def reach(self, unit: Unit = "diagonal") -> pd.DataFrame:
        """Every head's distance beside those of heads that everyone can imagine, in this unit: a row per head.

        Beside `mad`: `uniform`, that of uniform attention; `next_patch`, of the next patch; `edge`, of attention to all
        patches at the image's edge, and `nearest_edge`, to the nearest of these. The last two are known where a query
        may attend to the whole grid; in windows and on pooled keys they are NaN, and so is the whole column `uniform`
        in tables of earlier versions. For random weights, measure `nearsight.models.with_fresh_weights(model)`.
        """
        scale, grids = self._diagonals_in(unit), self._of_one_size("grid_size", unit)
        known = np.full(len(scale), np.nan) if self.uniform is None else self.uniform
        references = np.array([_references((int(rows), int(cols))) for rows, cols in grids])
        # Where uniform attention is not that of the whole grid, heads cannot reach all of it.
        references[~np.isclose(known, references[:, 0]), 2:] = np.nan
        references[:, 0] = known
        frame = self.to_frame()[["layer", "layer_name", "head", "mad"]]
        layer = frame["layer"].to_numpy()
        columns = dict(zip(_REFERENCES, (references * scale[:, None])[layer].T, strict=True))
        return frame.assign(mad=frame["mad"] * scale[layer], **columns)

    def _diagonals_in(self, unit: Unit) -> Array:
        """[layers]: how long the diagonal of each layer's grid is."""
        if unit not in get_args(Unit):
            raise InputError(f"distances are in {', '.join(get_args(Unit))}, not in {unit!r}")
        if unit == "diagonal":
            return np.ones(len(self.layer_names))
        rows, cols = self._of_one_size("grid_size", unit).T - 1
        cells: Array = np.hypot(rows, cols)
        if unit == "patches":
            return cells
        height, width = self._of_one_size("cell_size", unit).T
        if not np.allclose(height, width):
            raise InputError("distances in pixels are known for square patches only")
        pixels: Array = cells * height
        return pixels

    def _of_one_size(self, name: str, unit: Unit) -> Array:
        if np.isnan(self.extra[name]).any():
            raise InputError(f"distances in {unit} are known for images of one size only; measure each size separately")
        return self.extra[name]

    def save(self, path: str | Path) -> None:
        """Write as .npz, without pickled objects."""
        arrays = {
            "format": np.array(_FORMAT),
            "layer_names": np.array(self.layer_names, dtype=np.str_),
            "num_images": np.array(self.num_images),
            "mad": self.mad,
            "mad_squared_deviations": self.mad_moments.squared_deviations,
            "entropy": self.entropy,
            "entropy_squared_deviations": self.entropy_moments.squared_deviations,
            "skipped_names": np.array(list(self.skipped), dtype=np.str_),
            "skipped_reasons": np.array(list(self.skipped.values()), dtype=np.str_),
        }
        if self.label is not None:
            arrays["label"] = np.array(self.label)
        if self.numbers is not None:
            arrays["layer_numbers"] = np.array(self.numbers, dtype=np.int64)
        if self.uniform is not None:
            arrays["uniform"] = self.uniform
        if self.per_image is not None:
            arrays |= {f"per_image/{name}": getattr(self.per_image, name) for name in _OF_IMAGES}
            arrays |= {f"{_FURTHER}{name}": values for name, values in self.per_image.further.items()}
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(
                file, allow_pickle=False, **arrays, **{f"extra/{name}": value for name, value in self.extra.items()}
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            stored = read_arrays(Path(path))
            if int(stored["format"]) > _FORMAT:
                raise InputError(f"{path} was written by a newer nearsight (format {int(stored['format'])}); update it")
            count = int(stored["num_images"])
            shape = (len(stored["layer_names"]), stored["mad"].shape[1])
            expected: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(
                ("mad", "mad_squared_deviations", "entropy", "entropy_squared_deviations"), (shape, "float64")
            )
            optional = {"uniform": (shape[:1], "float64"), "layer_numbers": (shape[:1], "int64")}
            expected |= {name: array for name, array in optional.items() if name in stored}
            for name, (wanted, kind) in expected.items():
                if stored[name].shape != wanted or stored[name].dtype != kind:
                    raise InputError(f"{path} is damaged: {name} is not an array of {kind} {list(wanted)}")
            return cls(
                tuple(str(name) for name in stored["layer_names"]),
                Moments(count, stored["mad"], stored["mad_squared_deviations"]),
                Moments(count, stored["entropy"], stored["entropy_squared_deviations"]),
                dict(zip(map(str, stored["skipped_names"]), map(str, stored["skipped_reasons"]), strict=True)),
                {name.removeprefix("extra/"): value for name, value in stored.items() if name.startswith("extra/")},
                _stored_images(stored, count, shape),
                stored.get("uniform"),
                tuple(stored["layer_numbers"].tolist()) if "layer_numbers" in stored else None,
                str(stored["label"]) if "label" in stored else None,
            )
        except InputError:
            raise
        except Exception as error:  # whatever an array that is missing or another leads to
            raise InputError(f"{path} is damaged or is not a table of heads ({error})") from error


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an npz by name, none larger than a table of heads may be; an `InputError` if it is damaged."""
    check_file(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            _check_sizes(archive.zip)
            return dict(archive)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged archive
        raise InputError(f"{path} is damaged or is not a table of heads ({error})") from error


@cache
def _references(grid_size: tuple[int, int]) -> tuple[float, ...]:
    """The distances of `_REFERENCES` on the whole grid."""
    edges = (edge_attention_distance(grid_size, nearest=nearest) for nearest in (False, True))
    return uniform_attention_distance(grid_size), next_patch_distance(grid_size), *edges


def _stored_images(stored: Mapping[str, Any], num_images: int, shape: tuple[int, int]) -> PerImage | None:
    arrays = {name: stored[f"per_image/{name}"] for name in _OF_IMAGES if f"per_image/{name}" in stored}
    if not arrays:
        return None
    further = {name.removeprefix(_FURTHER): array for name, array in stored.items() if name.startswith(_FURTHER)}
    values = PerImage(**arrays, further=further)
    num = len(values)
    for name, array in (*arrays.items(), *further.items()):
        expected = (num,) if name == "digests" else (num, *shape)
        if array.shape != expected or array.dtype != _OF_IMAGES.get(name, np.float32) or num > num_images:
            raise ValueError(f"its values of single images are not of at most {num_images} images × {list(shape)}")
    return values


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Refuse arrays that are too large to be those of a table, or larger than what there is of them, before numpy
    makes room for them."""
    members = archive.infolist()
    if sum(member.file_size for member in members) > MOST_BYTES:
        raise ValueError(f"its arrays have more than {MOST_BYTES} bytes")
    for member in members:
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        if math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} is cut short")


def layer_positions(layer_names: Sequence[str], layers: Sequence[int | str]) -> list[int]:
    """The positions, from 0, of layers that are given by position (from 0, or from the end) or name."""
    given: Any = layers
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"layers is a list of positions and names, not {given!r}; give [{given!r}]")
    positions = []
    for layer in given:
        try:
            position = layer_names.index(layer) if isinstance(layer, str) else operator.index(layer)
            positions.append(range(len(layer_names))[position])
        except (IndexError, TypeError, ValueError) as error:
            known = ", ".join(layer_names[:12])
            raise InputError(f"layer {layer!r} is not one of the {len(layer_names)} layers: {known}") from error
    return positions


def _spread(moments: Moments) -> Array:
    return moments.std if moments.count > 1 else np.full_like(moments.mean, np.nan)


def _agreed(values_S: Array) -> Array:
    """What all S parts say of each layer, which is the first axis of a part; NaN for a layer where they differ."""
    differs = (values_S != values_S[0]).any(0)
    common: Array = values_S[0].copy()
    common[differs.any(tuple(range(1, differs.ndim)))] = np.nan
    return common
