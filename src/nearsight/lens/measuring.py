"""`measure`: how far and how selectively every head of a ViT looks, over many images."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.lens import inputs
from nearsight.lens.attention import Attention, ExplicitAttention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.geometry import Declared
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import ELSEWHERE, MEASUREMENTS, WHAT, Measurement, load_all, stack_layers
from nearsight.lens.perimage import ImageId, KeptImages, PerImage, as_digests, digests_of_names, digests_of_pixels
from nearsight.lens.running import never_compiled, not_finite, other_attentions, running, surveyed, without_gradients
from nearsight.lens.stream import in_full_precision, reduce_attention, tiles
from nearsight.lens.survey import RowSums, Survey
from nearsight.lens.table import Array, HeadTable, layer_positions
from nearsight.metrics import Moments

Precision = Literal["float32", "float64"]

load_all()


@never_compiled
def measure(
    model: nn.Module,
    images: Tensor | Mapping[str, Any] | Iterable[Any],
    *,
    batch_size: int = 64,
    layers: Sequence[int | str] | None = None,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    what: Sequence[str] = (),
    call: inputs.Call | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int | None = None,
    ids: Iterable[ImageId] | None = None,
) -> HeadTable:
    """Mean attention distance and normalised entropy of every attention head, over the images (S1 §3 and §4.5).

    Args:
        model: a ViT, unmodified. It runs in eval mode without gradients; its mode, hooks, device and the state of the
            random generators are afterwards as they were.
        images: normalised images [B, C, H, W] or videos [B, T, C, H, W], or a dictionary of what a model takes by name,
            or an iterable of such batches, or of pairs of such a batch and labels. Where an image is given as its
            patches, with `grid_thw` or `spatial_shapes` beside them, each has its own grid.
        batch_size: images per forward; batches larger than this are split.
        layers: positions (from 0) or names of the layers to keep; all by default.
        device: where to run; by default where the model is.
        precision: of the sums within a query (those over queries and images are float64); on MPS always float32. The
            model computes in its own precision either way.
        what: further measurements, which go to the table's `extra`: "shares" of attention on the patch itself, its
            neighbours, CLS and registers; "quantiles" of the distance; "offsets", attention by the step from the patch;
            "features", what each layer's tokens are like; "gaussians", how wide and strong those of a LocAt model are.
        call: how the model is called: the name of the argument that takes the images, or a function of the model and a
            batch; by default with the images as its first argument, or with a dictionary's entries by name.
        grid: (rows, columns) of the patches, where they cannot be found: for attention among exactly so many tokens.
        prefix: how many tokens come before those patches; by default those that are left.
        ids: what each image is called, in their order: a name, a number, a digest. The table's values of single images
            are known by it, so that models which take the same images in different sizes can be compared image by
            image. By default images are known by their pixels, as they are given here.

    Of a video the table's `extra` has the "temporal_distance" of every head: how far it looks in time, in frames of
    tokens, divided by the largest such distance. Heads that look along time alone have no distance on the image (NaN).
    """
    check_at_least("batch_size", batch_size, 1)
    further = _chosen(what)
    declared = declared_grid(grid, prefix)
    # By image size, because where tokens lie depends on it.
    prepared: dict[tuple[object, ...], tuple[Survey, list[Measurement]]] = {}
    names: list[str] = []
    table: HeadTable | None = None
    kept, called = KeptImages(), None if ids is None else iter(ids)
    with running(model, device) as run:
        dtype = summing_dtype(precision, run.device)

        def looks() -> Iterator[Look]:
            for batch in inputs.batches(images, batch_size, model=run.model, call=call):
                with without_gradients():
                    batch, key = _known_by(batch, called).to(run.device, run.dtype), batch.key
                    if key not in prepared:
                        found = surveyed(run.model, batch, declared)
                        if layers is not None:
                            names[:] = [list(found.layers)[at] for at in layer_positions(list(found.layers), layers)]
                            found = found.only(names)
                        prepared[key] = found, [kind(run.model, found, batch) for kind in further]
                for one in batch.one_by_one() if prepared[key][0].is_alone else [batch]:
                    with without_gradients():
                        look = Look(run.model, one, *prepared[key], dtype)
                    yield look

        for new in finished(looks()):
            if table is not None and ("temporal_distance" in table.extra) != ("temporal_distance" in new.extra):
                raise InputError("pictures and videos cannot be averaged together; measure them separately")
            kept.add(new.per_image)
            new = replace(new, per_image=None)
            table = new if table is None else HeadTable.merge([table, new])
    if table is None:
        raise InputError("there are no images to measure on")
    if called is not None and list(islice(called, 1)):
        raise InputError(f"there are more ids than images, which are {table.num_images}; give one for each")
    table = replace(table, per_image=kept.values())
    return table if layers is None else table.choose(names)


def _known_by(batch: Batch, called: Iterator[ImageId] | None) -> Batch:
    """With what each of its images is known by."""
    if called is not None:
        digests = digests_of_names(islice(called, len(batch)))
        if len(digests) < len(batch):
            raise InputError("there are more images than ids; give one for each")
    else:
        digests = digests_of_pixels(batch.images[None] if batch.is_one else batch.images)
    return replace(batch, digests=digests)


def _chosen(what: Sequence[str]) -> list[type[Measurement]]:
    """The measurements with these names, each once."""
    if isinstance(what, str):
        raise InputError(f"what is a list of names, not {what!r}; give [{what!r}]")
    for name in what:
        if name in ELSEWHERE:
            raise InputError(f"{name!r} is not measured per head; use nearsight.lens.{ELSEWHERE[name][0]}")
        if name not in MEASUREMENTS:
            raise unknown_name("measurement", name, WHAT)
    return [MEASUREMENTS[name] for name in dict.fromkeys(what)]


def declared_grid(grid: tuple[int, int] | None, prefix: int | None) -> Declared | None:
    """The tokens of a model as the caller describes them."""
    if grid is None:
        if prefix is not None:
            raise InputError("prefix goes with grid: give grid=(rows, columns), too")
        return None
    rows, cols = grid
    check_at_least("grid", min(rows, cols), 1)
    check_at_least("prefix", prefix or 0, 0)
    return Declared((int(rows), int(cols)), prefix)


def summing_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What sums within a query are computed in; MPS knows no float64."""
    if precision not in get_args(Precision):
        raise InputError(f"precision is one of {', '.join(get_args(Precision))}, not {precision!r}")
    return torch.float32 if precision == "float32" or device.type == "mps" else torch.float64


class Look:
    """One batch through a surveyed model, which is in eval mode, without gradients."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        found: Survey,
        further: Sequence[Measurement] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._found, self._dtype, self._device = found, dtype, batch.images.device
        self._digests = batch.digests
        self._further = [measurement for measurement in further if measurement.needs_tiles]
        self._reduced: dict[Call, Tensor] = {}
        self._rows: dict[str, RowSums] = {}
        with ExitStack() as looking:
            looking.enter_context(AttentionTap(model, self._reduce, found.calling))
            for measurement in further:
                looking.enter_context(measurement.watching())
            batch.run(model)
        if missing := found.sites.keys() - self._reduced.keys():
            raise other_attentions(model, next(iter(missing)).layer_name)
        self._extra = [measurement.results() for measurement in further]

    def _reduce(self, call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if (site := self._found.sites.get(call)) is None:
            return
        attention = candidates[site.operand]()
        if site.changed and isinstance(attention, ExplicitAttention):
            self._rows[site.name] = RowSums(attention, site)
        with in_full_precision(self._device):
            self._reduced[call] = reduce_attention(attention, site, dtype=self._dtype)
            for tile in tiles(attention, site, dtype=self._dtype, whole=True) if self._further else ():
                for measurement in self._further:
                    measurement.add(site, tile)

    def table(self) -> HeadTable:
        """What was seen; waits for the device."""
        for name, rows in self._rows.items():
            if (fault := rows.fault()) is not None:
                raise InputError(f"{name}: {fault}, for some of the images; leave it out with layers=…")
        return table_of(self._found, self._reduced, self._extra, self._digests)


def table_of(
    found: Survey,
    reduced: Mapping[Call, Tensor],
    extra: Sequence[Mapping[str, Array]] = (),
    digests: Tensor | None = None,
) -> HeadTable:
    """The table of one batch, from what `reduce_attention` made of each attention in it; waits for the device.

    With the `digests` of its images, their values are kept.
    """
    parts = [reduced[call] for call in found.sites]
    values = torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts])
    # Means over queries; several parts of one layer are weighted by their queries.
    sums: dict[str, tuple[Array, int]] = {}
    for site, value, part in zip(found.sites.values(), values, parts, strict=True):
        numbers, count = value.view(part.shape).numpy(), site.geometry.num_queries
        if np.isnan(numbers[1]).any():
            raise not_finite(f"the attention of {site.name}")
        before, count_before = sums.get(site.layer, (0.0, 0))
        sums[site.layer] = before + numbers * count, count_before + count
    layers = [total / count for total, count in sums.values()]
    mad_BLH, entropy_BLH = (stack_layers([layer[part] for layer in layers]).swapaxes(0, 1) for part in (0, 1))
    further = {name: values for part in (_geometry_arrays(found), *extra) for name, values in part.items()}
    if any(len(layer) > 2 for layer in layers):
        times = [layer[2].mean(0) if len(layer) > 2 else np.full(layer.shape[-1], np.nan) for layer in layers]
        further["temporal_distance"] = stack_layers(times)
    return HeadTable(
        tuple(sums),
        Moments.of(mad_BLH),
        Moments.of(entropy_BLH),
        found.skipped,
        further,
        None if digests is None else PerImage.of(as_digests(digests), mad_BLH, entropy_BLH),
    )


def finished(looks: Iterable[Look]) -> Iterator[HeadTable]:
    """The tables of looks, each read after the next one began, so that the device has work while the host waits."""
    waiting: Look | None = None
    for look in looks:
        if waiting is not None:
            yield waiting.table()
        waiting = look
    if waiting is not None:
        yield waiting.table()


def _geometry_arrays(found: Survey) -> dict[str, Array]:
    """What it takes to say distances in patches or pixels instead of diagonals: [layers, 2]."""
    geometries = [site.geometry for site in found.layers.values()]
    return {
        "grid_size": np.array([geometry.grid_size for geometry in geometries], dtype=np.float64),
        "cell_size": np.array([geometry.cell_size for geometry in geometries], dtype=np.float64),
    }
