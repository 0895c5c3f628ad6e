"""`measure`: how far and how selectively every head of a ViT looks, over many images."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.lens import inputs
from nearsight.lens.attention import Attention, ExplicitAttention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.geometry import declared_grid
from nearsight.lens.inputs import Batch
from nearsight.lens.maps import NUM_KEPT, kept_maps
from nearsight.lens.measurement import ELSEWHERE, MEASUREMENTS, WHAT, Measurement, load_all, stack_layers
from nearsight.lens.perimage import ImageId, KeptImages, PerImage, as_digests, digests_of_names, digests_of_pixels
from nearsight.lens.running import (
    counting_images,
    never_compiled,
    not_finite,
    other_attentions,
    running,
    surveyed,
    without_gradients,
)
from nearsight.lens.stream import (
    Precision,
    in_full_precision,
    reduce_attention,
    summing_dtype,
    tiles,
    uniform_distance,
)
from nearsight.lens.survey import RowSums, Survey
from nearsight.lens.table import Array, HeadTable, layer_positions
from nearsight.metrics import Moments

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
    masks: Iterable[Tensor] | None = None,
    label: str | None = None,
    keep: Literal["maps"] | None = None,
    progress: bool = False,
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
            neighbours, CLS and registers; "kinds", whether a head is an own-patch, neighbour, row/column, edge, sink or
            global one; "quantiles" of the distance; "offsets", attention by the step from the patch; "features", what
            each layer's tokens are like; "lds", how similar they are near and far; "norms", and which stand out;
            "sinks", what tokens receive; "background", how much of it lies there, which takes `masks`; "gaussians", how
            wide and strong those of a LocAt model are.
        call: how the model is called: the name of the argument that takes the images, or a function of the model and a
            batch; by default with the images as its first argument, or with a dictionary's entries by name.
        grid: (rows, columns) of the patches, where they cannot be found: for attention among exactly so many tokens.
        prefix: how many tokens come before those patches; by default those that are left.
        ids: what each image is called, in their order: a name, a number, a digest. The table's values of single images
            are known by it, so that models which take the same images in different sizes can be compared image by
            image. By default images are known by their pixels, as they are given here.
        masks: of the images, in their order, each [H, W] of bool as large as its image and True on the foreground; or
            all of them as one tensor [N, H, W].
        label: what the model is called in what the table says; by default as timm or Hugging Face call it.
        keep: "maps" keeps the attention maps of the first few images (four at most), for `table.explore()` and
            `table.report(path)`.
        progress: show a bar that counts the images; in a notebook it is a widget.

    Of a video the table's `extra` has the "temporal_distance" of every head: how far it looks in time, in frames of
    tokens, divided by the largest such distance. Heads that look along time alone have no distance on the image (NaN).
    """
    check_at_least("batch_size", batch_size, 1)
    further = chosen(what)
    declared = declared_grid(grid, prefix)
    if keep not in (None, "maps"):
        raise InputError(f"keep is 'maps' or None, not {keep!r}")
    # By image size, because where tokens lie depends on it.
    prepared: dict[tuple[object, ...], tuple[Survey, list[Measurement]]] = {}
    every, names = list[str](), list[str]()
    pictures: list[Batch] = []
    table: HeadTable | None = None
    kept, called = KeptImages(), None if ids is None else iter(ids)
    masking = None if masks is None else iter(masks)
    called_it = label or _name_of(model)
    with running(model, device) as run, counting_images(images, progress, called_it) as counted:
        dtype = summing_dtype(precision, run.device)

        def looks() -> Iterator[Look]:
            for batch in counted(inputs.batches(images, batch_size, model=run.model, call=call)):
                missing = NUM_KEPT - sum(map(len, pictures)) if keep else 0
                if missing and batch.key == (pictures or [batch])[0].key:
                    pictures.append(batch.part(slice(0, missing)))
                with without_gradients():
                    batch = _masked_by(_known_by(batch, called), masking)
                    batch, key = batch.to(run.device, run.dtype), batch.key
                    if key not in prepared:
                        found = surveyed(run.model, batch, declared)
                        if layers is not None:
                            every[:] = found.layers
                            names[:] = [every[at] for at in layer_positions(every, layers)]
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
        if keep:
            if any(site.name != site.layer for found, _ in prepared.values() for site in found.sites.values()):
                raise InputError("maps are not kept of a model that computes one attention in parts; leave out keep=")
            table = replace(table, maps=kept_maps(run.model, pictures, table.layer_names, declared))
    if called is not None and list(islice(called, 1)):
        raise InputError(f"there are more ids than images, which are {table.num_images}; give one for each")
    if masking is not None and list(islice(masking, 1)):
        raise InputError(f"there are more masks than images, which are {table.num_images}; give one for each")
    table = replace(table, per_image=kept.values(), label=called_it)
    if layers is None:
        return table
    numbers = dict(zip(every, range(len(every)), strict=True))
    table = replace(table, numbers=tuple(numbers[name] for name in table.layer_names))
    return table.choose(names)


def _name_of(model: nn.Module) -> str:
    """As timm or Hugging Face call it, or its class."""
    model = getattr(model, "_orig_mod", model)  # of a compiled one, what it was compiled from
    timms, transformers = getattr(model, "pretrained_cfg", None), getattr(model, "config", None)
    architecture = timms.get("architecture") if isinstance(timms, Mapping) else getattr(timms, "architecture", None)
    return str(architecture or getattr(transformers, "_name_or_path", None) or type(model).__name__)


def _known_by(batch: Batch, called: Iterator[ImageId] | None) -> Batch:
    """With what each of its images is known by."""
    if called is not None:
        digests = digests_of_names(islice(called, len(batch)))
        if len(digests) < len(batch):
            raise InputError("there are more images than ids; give one for each")
    else:
        digests = digests_of_pixels(batch.images[None] if batch.is_one else batch.images)
    return replace(batch, digests=digests)


def _masked_by(batch: Batch, masking: Iterator[Tensor] | None) -> Batch:
    """With the mask of each of its images."""
    if masking is None:
        return batch
    masks = list(islice(masking, len(batch)))
    if len(masks) < len(batch):
        raise InputError("there are more images than masks; give one for each")
    frames, *size = batch.size
    for mask in masks:
        if frames > 1 or mask.dtype != torch.bool or list(mask.shape) != size:
            raise InputError(
                f"a mask is {mask.dtype} of shape {list(mask.shape)}, but torch.bool of the image's shape {size} is "
                "needed" + ("; videos have no masks" if frames > 1 else "")
            )
    return replace(batch, masks=torch.stack(masks).cpu())


def chosen(what: Sequence[str]) -> list[type[Measurement]]:
    """The measurements with these names, each once."""
    if isinstance(what, str):
        raise InputError(f"what is a list of names, not {what!r}; give [{what!r}]")
    for name in what:
        if name in ELSEWHERE:
            raise InputError(f"{name!r} is not measured per head; use nearsight.lens.{ELSEWHERE[name][0]}")
        if name not in MEASUREMENTS:
            raise unknown_name("measurement", name, WHAT)
    return [MEASUREMENTS[name] for name in dict.fromkeys(what)]


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
        self._of_images = [name for measurement in further for name in measurement.of_images]
        self._of_tiles = [measurement for measurement in further if measurement.needs_tiles]
        self._of_attention = [measurement for measurement in further if measurement.needs_attention]
        self._reduced: dict[Call, Tensor] = {}
        self._uniform: dict[Call, float] = {}
        self._rows: dict[str, RowSums] = {}
        with ExitStack() as looking:
            looking.enter_context(AttentionTap(model, self._reduce, found.calling))
            for measurement in further:
                measurement.starting(batch)
                looking.enter_context(measurement.watching())
            batch.run(model)
        if missing := found.sites.keys() - self._reduced.keys():
            raise other_attentions(model, next(iter(missing)).layer_name)
        results = [measurement.results() for measurement in further]
        self._arriving = _Arriving([*self._reduced.values(), *_tensors_of(results)])
        brought = iter(self._arriving.tensors)
        self._reduced = {call: next(brought) for call in self._reduced}
        self._extra = [
            {name: next(brought) if isinstance(values, Tensor) else values for name, values in one.items()}
            for one in results
        ]

    def _reduce(self, call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if (site := self._found.sites.get(call)) is None:
            return
        attention = candidates[site.operand]()
        if site.changed and isinstance(attention, ExplicitAttention):
            self._rows[site.name] = RowSums(attention, site)
        with in_full_precision(self._device):
            self._reduced[call] = reduce_attention(attention, site, dtype=self._dtype)
            self._uniform[call] = uniform_distance(attention, site)
            for measurement in self._of_attention:
                measurement.look(site, attention, self._reduced[call], self._dtype)
            left = [one for one in self._of_tiles if not one.add_whole(site, attention, self._dtype)]
            for tile in tiles(attention, site, dtype=self._dtype, whole=True) if left else ():
                for measurement in left:
                    measurement.add(site, tile)

    def table(self) -> HeadTable:
        """What was seen; waits for the device."""
        self._arriving.wait()
        for name, rows in self._rows.items():
            if (fault := rows.fault()) is not None:
                raise InputError(f"{name}: {fault}, for some of the images; leave it out with layers=…")
        return table_of(self._found, self._reduced, self._extra, self._digests, self._uniform, self._of_images)


def table_of(
    found: Survey,
    reduced: Mapping[Call, Tensor],
    extra: Sequence[Mapping[str, Array | Tensor]] = (),
    digests: Tensor | None = None,
    uniform: Mapping[Call, float] | None = None,
    of_images: Sequence[str] = (),
) -> HeadTable:
    """The table of one batch, from what `reduce_attention` made of each attention in it; waits for the device.

    With the `digests` of its images, their values are kept; `uniform` is the distance of uniform attention in each;
    `of_images` names those of `extra` that are of each image.
    """
    parts = [reduced[call] for call in found.sites]
    named = {name: values for part in (_geometry_arrays(found), *extra) for name, values in part.items()}
    arriving = _Arriving([*parts, *_tensors_of([named])])
    arriving.wait()
    values, brought = arriving.tensors[: len(parts)], iter(arriving.tensors[len(parts) :])
    # Means over queries; several parts of one layer are weighted by their queries.
    sums: dict[str, tuple[Array, int]] = {}
    for site, value in zip(found.sites.values(), values, strict=True):
        numbers, count = value.numpy(), site.geometry.num_queries
        if np.isnan(numbers[1]).any():
            raise not_finite(f"the attention of {site.name}")
        before, count_before = sums.get(site.layer, (0.0, 0))
        sums[site.layer] = before + numbers * count, count_before + count
    layers = [total / count for total, count in sums.values()]
    mad_BLH, entropy_BLH = (stack_layers([layer[part] for layer in layers]).swapaxes(0, 1) for part in (0, 1))
    further = {
        name: next(brought).double().numpy() if isinstance(values, Tensor) else values for name, values in named.items()
    }
    by_image = {name: further[name] for name in of_images}
    further |= {name: values_BLH.mean(0) for name, values_BLH in by_image.items()}
    if any(len(layer) > 2 for layer in layers):
        times = [layer[2].mean(0) if len(layer) > 2 else np.full(layer.shape[-1], np.nan) for layer in layers]
        further["temporal_distance"] = stack_layers(times)
    return HeadTable(
        tuple(sums),
        Moments.of(mad_BLH),
        Moments.of(entropy_BLH),
        found.skipped,
        further,
        None if digests is None else PerImage.of(as_digests(digests), mad_BLH, entropy_BLH, by_image),
        None if uniform is None else _over_parts(found, uniform),
    )


class _Arriving:
    """Tensors on their way to the host, by one copy for all of one kind. They are right once they have been waited for:
    not for what the device was given later, such as the next batch."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copied: list[torch.cuda.Event] = []
        flat: dict[tuple[torch.device, torch.dtype], Iterator[Tensor]] = {}
        for device, dtype in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
            alike = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == (device, dtype)]
            if device.type == "cpu":
                flat[device, dtype] = iter(alike)
                continue
            together = torch.cat([tensor.flatten() for tensor in alike]).to("cpu", non_blocking=device.type == "cuda")
            if device.type == "cuda":
                self._copied.append(torch.cuda.current_stream(device).record_event())
            flat[device, dtype] = iter(together.split([tensor.numel() for tensor in alike]))
        self.tensors = [next(flat[tensor.device, tensor.dtype]).view(tensor.shape) for tensor in tensors]

    def wait(self) -> None:
        for copied in self._copied:
            copied.synchronize()


def _tensors_of(mappings: Iterable[Mapping[str, Array | Tensor]]) -> list[Tensor]:
    return [values for mapping in mappings for values in mapping.values() if isinstance(values, Tensor)]


def _over_parts(found: Survey, values: Mapping[Call, float]) -> Array:
    """Of each layer; several parts of one layer are weighted by their queries."""
    sums: dict[str, tuple[float, int]] = {}
    for call, site in found.sites.items():
        (total, count), num_queries = sums.get(site.layer, (0.0, 0)), site.geometry.num_queries
        sums[site.layer] = total + values[call] * num_queries, count + num_queries
    return np.array([total / count for total, count in sums.values()])


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
