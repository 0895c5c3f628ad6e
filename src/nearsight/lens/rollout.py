"""Attention rollout: what reaches CLS through all layers, if attention is all that moves information.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers" (2020). Shape suffixes: B images, H heads, N tokens,
T some of them as queries.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens.attention import Attention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.geometry import Geometry, same_places
from nearsight.lens.running import batches, never_compiled, not_finite, running, surveyed, without_gradients
from nearsight.lens.stream import in_full_precision, tiles
from nearsight.lens.survey import Site, Survey
from nearsight.lens.tokens import class_keys

HeadFusion = Literal["mean", "max", "min"]
_FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weight_BHTN: weight_BHTN.mean(1),
    "max": lambda weight_BHTN: weight_BHTN.amax(1),
    "min": lambda weight_BHTN: weight_BHTN.amin(1),
}


@never_compiled
def attention_rollout(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    residual: float = 0.5,
    head_fusion: HeadFusion = "mean",
    discard: float = 0.0,
    batch_size: int = 16,
    device: torch.device | str | None = None,
) -> Tensor:
    """Attention from CLS to the patches through all layers: [B, rows, cols] float32 on the CPU.

    In a model without a class token it is the mean over all patches as queries. All tokens together, prefix tokens too,
    would sum to 1; what is missing went to prefix tokens.

    Args:
        model: a ViT whose layers share one sequence of tokens: no windows, no pooling. It is left as it was.
        images: normalised images [B, 3, H, W] of one size, or an iterable of such batches.
        residual: the part of a token that goes past attention: a layer is (1 − residual)·A + residual·I, with rows that
            sum to 1.
        head_fusion: how the heads of a layer become one map.
        discard: the share of each fused map's entries, the smallest ones of an image, that are taken as 0.
        batch_size: images per forward. A map of all tokens is kept for each.
        device: where to run; by default where the model is.
    """
    check_at_least("batch_size", batch_size, 1)
    if head_fusion not in _FUSIONS:
        raise InputError(f"head_fusion is one of {', '.join(_FUSIONS)}, not {head_fusion!r}")
    for name, value in (("residual", residual), ("discard", discard)):
        if not 0 <= value < 1:
            raise InputError(f"{name} is {value}, but must be at least 0 and less than 1")
    found: Survey | None = None
    size: torch.Size | None = None
    maps: list[Tensor] = []
    with running(model, device) as run:
        for batch in batches(images, batch_size):
            with without_gradients():
                batch = run.brought(batch)
                if found is None:
                    size, found = batch.shape[1:], surveyed(run.model, batch[0])
                    geometry = _one_sequence(found)
                    start_N = _starting_tokens(run.model, geometry).to(run.device)
                if batch.shape[1:] != size:
                    raise InputError("attention is rolled out on images of one size only")
                for part in batch.split(1) if found.is_alone else [batch]:
                    rolled_BNN = _rolled(run.model, part, found, residual, _FUSIONS[head_fusion], discard)
                    maps.append(_on_grid(rolled_BNN[:, start_N].mean(1).cpu(), geometry))
    if not maps:
        raise InputError("there are no images to roll attention out on")
    maps_BRC = torch.cat(maps)
    if maps_BRC.isnan().any():
        raise not_finite(f"the attention of {type(run.model).__name__}")
    return maps_BRC


def _one_sequence(found: Survey) -> Geometry:
    """The geometry that all layers share."""
    if found.skipped:
        name, reason = next(iter(found.skipped.items()))
        raise InputError(f"attention cannot be rolled out through {name}: {reason}")
    first = next(iter(found.sites.values()))
    for site in found.sites.values():
        if (difference := _difference(site, first)) is not None:
            raise InputError(f"attention cannot be rolled out: {site.name} {difference}")
    return first.geometry


def _difference(site: Site, first: Site) -> str | None:
    queries, keys = site.geometry.query_places_WN2, site.geometry.key_places_WM2
    if len(queries) > 1:
        return "attends within windows"
    if not same_places(queries, keys):
        return "has keys that are not its queries (pooled, or other tokens)"
    if not same_places(queries, first.geometry.query_places_WN2) or site.geometry.grid_size != first.geometry.grid_size:
        return f"has other tokens than {first.name}"
    return None


def _starting_tokens(model: nn.Module, geometry: Geometry) -> Tensor:
    """Which tokens the rollout is read off at, [N] bool: CLS, or all patches."""
    cls_N = class_keys(model, geometry)[0]
    return cls_N if cls_N.any() else geometry.query_places_WN2[0, :, 0].isfinite()


def _rolled(
    model: nn.Module, images: Tensor, found: Survey, residual: float, fuse: Callable[[Tensor], Tensor], discard: float
) -> Tensor:
    """The product of all layers, the last one first: [B, N, N]."""
    rolled: list[Tensor] = []

    def multiply(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if (site := found.sites.get(call)) is None:
            return
        attention = candidates[site.operand]()
        with in_full_precision(images.device):
            whole = tiles(attention, site, whole=True)
            fused_BNN = torch.cat([fuse(tile.log_weights_BWHTM[:, 0].softmax(-1)) for tile in whole], dim=1)
            layer_BNN = _with_residual(_without_smallest(fused_BNN, discard), residual)
            rolled[:] = [layer_BNN @ rolled[0] if rolled else layer_BNN]

    with AttentionTap(model, multiply):
        model(images)
    return rolled[0]


def _without_smallest(map_BNN: Tensor, discard: float) -> Tensor:
    num_discarded = int(discard * map_BNN[0].numel())
    if not num_discarded:
        return map_BNN
    smallest = map_BNN.flatten(1).topk(num_discarded, largest=False).indices
    return map_BNN.flatten(1).scatter(1, smallest, 0.0).view_as(map_BNN)


def _with_residual(map_BNN: Tensor, residual: float) -> Tensor:
    eye = torch.eye(map_BNN.shape[-1], dtype=map_BNN.dtype, device=map_BNN.device)
    mixed = (1 - residual) * map_BNN + residual * eye
    # A row of zeros, all discarded, stays one.
    return mixed / mixed.sum(-1, keepdim=True).clamp(min=torch.finfo(mixed.dtype).tiny)


def _on_grid(row_BN: Tensor, geometry: Geometry) -> Tensor:
    places_N2 = geometry.query_places_WN2[0]
    is_patch = places_N2[:, 0].isfinite()
    row, col = places_N2[is_patch].round().long().T
    grid = row_BN.new_zeros(len(row_BN), *geometry.grid_size)
    grid[:, row, col] = row_BN[:, is_patch]
    return grid
