"""`measure`: how far and how selectively every head of a ViT looks, over many images."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens.attention import Attention, ExplicitAttention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.measurement import Measurement, stack_layers
from nearsight.lens.registry import chosen
from nearsight.lens.running import batches, never_compiled, not_finite, running, surveyed, without_gradients
from nearsight.lens.stream import in_full_precision, reduce_attention, tiles
from nearsight.lens.survey import RowSums, Survey
from nearsight.lens.table import Array, HeadTable
from nearsight.metrics import Moments

Precision = Literal["float32", "float64"]


@never_compiled
def measure(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    batch_size: int = 64,
    layers: Sequence[int | str] | None = None,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    what: Sequence[str] = (),
) -> HeadTable:
    """Mean attention distance and normalised entropy of every attention head, over the images (S1 §3 and §4.5).

    Args:
        model: a ViT, unmodified. It runs in eval mode without gradients; its mode, hooks, device and the state of the
            random generators are afterwards as they were.
        images: normalised images [B, 3, H, W], or an iterable of such batches, or of pairs of such a batch and labels.
        batch_size: images per forward; batches larger than this are split.
        layers: positions (from 0) or names of the layers to keep; all by default.
        device: where to run; by default where the model is.
        precision: of the sums within a query (those over queries and images are float64); on MPS always float32. The
            model computes in its own precision either way.
        what: further measurements, which go to the table's `extra`: "shares" of attention on the patch itself, its
            neighbours, CLS and registers; "quantiles" of the distance; "offsets", attention by the step from the patch;
            "features", what each layer's tokens are like; "gaussians", how wide and strong those of a LocAt model are.
    """
    check_at_least("batch_size", batch_size, 1)
    further = chosen(what)
    # By image size, because where tokens lie depends on it.
    prepared: dict[torch.Size, tuple[Survey, list[Measurement]]] = {}
    table: HeadTable | None = None
    with running(model, device) as run:
        dtype = summing_dtype(precision, run.device)

        def looks() -> Iterator[Look]:
            for batch in batches(images, batch_size):
                with without_gradients():
                    batch = run.brought(batch)
                    if batch.shape[1:] not in prepared:
                        found = surveyed(run.model, batch[0])
                        prepared[batch.shape[1:]] = found, [kind(run.model, found, batch[0]) for kind in further]
                    look = Look(run.model, batch, *prepared[batch.shape[1:]], dtype)
                yield look

        for new in finished(looks()):
            table = new if table is None else HeadTable.merge([table, new])
    if table is None:
        raise InputError("there are no images to measure on")
    return table if layers is None else table.choose(layers)


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
        images: Tensor,
        found: Survey,
        further: Sequence[Measurement] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._found, self._dtype, self._device = found, dtype, images.device
        self._further = [measurement for measurement in further if measurement.needs_tiles]
        self._reduced: dict[Call, Tensor] = {}
        self._rows: dict[str, RowSums] = {}
        with ExitStack() as looking:
            looking.enter_context(AttentionTap(model, self._reduce, found.calling))
            for measurement in further:
                looking.enter_context(measurement.watching())
            model(images)
        if missing := found.sites.keys() - self._reduced.keys():
            raise InputError(
                f"{type(model).__name__} computes other attentions for these images than for the first "
                f"({next(iter(missing)).layer_name} is missing): its layers depend on what it sees"
            )
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
        return table_of(self._found, self._reduced, self._extra)


def table_of(found: Survey, reduced: Mapping[Call, Tensor], extra: Sequence[Mapping[str, Array]] = ()) -> HeadTable:
    """The table of one batch, from what `reduce_attention` made of each attention in it; waits for the device."""
    sites = found.sites
    parts = [reduced[call] for call in sites]
    values = torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts])
    by_layer = [value.view(part.shape).numpy() for value, part in zip(values, parts, strict=True)]
    for site, (mad, _) in zip(sites.values(), by_layer, strict=True):
        if np.isnan(mad).any():
            raise not_finite(f"the attention of {site.name}")
    mads, entropies = ([layer[part] for layer in by_layer] for part in (0, 1))
    return HeadTable(
        tuple(site.name for site in sites.values()),
        Moments.of(stack_layers(mads).swapaxes(0, 1)),
        Moments.of(stack_layers(entropies).swapaxes(0, 1)),
        found.skipped,
        {name: values for part in (_geometry_arrays(found), *extra) for name, values in part.items()},
    )


def finished(looks: Iterable[Look]) -> Iterator[HeadTable]:
    """The tables of looks, each taken after the next one began: so the device has work while the host waits."""
    waiting: Look | None = None
    for look in looks:
        if waiting is not None:
            yield waiting.table()
        waiting = look
    if waiting is not None:
        yield waiting.table()


def _geometry_arrays(found: Survey) -> dict[str, Array]:
    """What it takes to say distances in patches or pixels instead of diagonals: [layers, 2]."""
    geometries = [site.geometry for site in found.sites.values()]
    return {
        "grid_size": np.array([geometry.grid_size for geometry in geometries], dtype=np.float64),
        "cell_size": np.array([geometry.cell_size for geometry in geometries], dtype=np.float64),
    }
