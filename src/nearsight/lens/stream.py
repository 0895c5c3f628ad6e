"""Distance and entropy of attention, some queries at a time.

Both need only three sums beside the softmax: with weights w and their logarithms s, Σ w, Σ w·d and Σ w·s over the
patches. So a tile of queries is all that is ever in memory, whatever the number of tokens, and patches are renormalised
by never looking at the other tokens.

Shape suffixes: B images, W windows, H heads, N queries, T queries of a tile, M keys.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.lens import kernels
from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.columns import Cells, fused_attention_columns, fused_attention_shares
from nearsight.lens.geometry import Geometry
from nearsight.lens.operations import HIDING
from nearsight.lens.places import without_repetitions
from nearsight.lens.survey import Site
from nearsight.triton_language import runs_on

Precision = Literal["float32", "float64"]
_TILE_BYTES = 2**26
"""Of one tensor of a tile; a few of them are alive at a time."""
_CACHED_BYTES, _FEWEST_QUERIES = 2**22, 48
"""On a CPU tiles should stay in its cache, yet hold enough queries for a matrix product."""


@dataclass(frozen=True)
class Tile:
    """The attention of some queries of every window to all patches (or, of whole tiles, to all tokens)."""

    log_weights_BWHTM: Tensor
    """Logarithms of the weights up to a constant per query; −∞ for keys that are hidden."""
    queries_WT2: Tensor
    """(row, column) of each query in cells of the layer's grid; NaN for one that is not a patch."""
    keys_WM2: Tensor
    """The same for each key; NaN for one that is not a patch, whose log weight is −∞ unless the tile is whole."""
    num_keys: Tensor
    """How many patches each query may attend to; expands to [B, W, H, T]."""
    shown: Tensor | None = None
    """Which keys no mask hides from a query, whatever weight they have; expands to [B, W, H, T, M]. None: all."""

    @property
    def distances(self) -> Tensor:
        """[W, T, M], in cells; 0 where there is no patch."""
        return torch.cdist(self.queries_WT2, self.keys_WM2, compute_mode="donot_use_mm_for_euclid_dist").nan_to_num(0.0)


def in_full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Around sums over an attention: where the model runs under autocast, they are not to be in its half precision."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # the former torch has no answer for
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def summing_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What sums within a query are computed in; MPS knows no float64."""
    if precision not in get_args(Precision):
        raise InputError(f"precision is one of {', '.join(get_args(Precision))}, not {precision!r}")
    return torch.float32 if precision == "float32" or device.type == "mps" else torch.float64


def reduce_attention(
    attention: Attention,
    site: Site,
    *,
    dtype: torch.dtype = torch.float32,
    tile_bytes: int | None = None,
    without_BWHM: Tensor | None = None,
) -> Tensor:
    """Mean attention distance and normalised entropy of every image and head, and of a video the distance in time:
    float64 [2, B, H] or [3, B, H].

    The numbers of `nearsight.metrics.attention_distance` and `attention_entropy`, without their maps; `dtype` is that
    of what happens within a query. A NaN anywhere in a head's attention is a NaN here. `without_BWHM` are keys that are
    left out as if they were no patches: the attention to the others is renormalised; heads of an image of which none is
    may be NaN then.
    """
    geometry = site.geometry
    means_2BH = _reduced(attention, site, dtype, tile_bytes, without_BWHM)
    if geometry.query_times_WN is None or geometry.key_times_WM is None:
        return means_2BH
    if geometry.is_along_time:
        means_2BH[0] = math.nan
    # In time as on an image of one column, with a row for each frame.
    if "in time" not in geometry.cache:
        query_WN2, key_WM2 = (
            torch.stack([times, torch.where(times.isnan(), math.nan, 0.0)], dim=-1)
            for times in (geometry.query_times_WN, geometry.key_times_WM)
        )
        grid_size = (geometry.num_frames, 1)
        geometry.cache["in time"] = replace(
            geometry, grid_size=grid_size, query_places_WN2=query_WN2, key_places_WM2=key_WM2, cache={}
        )
    in_time = replace(site, geometry=geometry.cache["in time"])
    return torch.cat([means_2BH, _reduced(attention, in_time, dtype, tile_bytes)[:1]])


def _reduced(
    attention: Attention,
    site: Site,
    dtype: torch.dtype,
    tile_bytes: int | None,
    without_BWHM: Tensor | None = None,
) -> Tensor:
    if without_BWHM is not None:
        without_BWHM = without_BWHM[..., _source(attention, site, dtype, whole=False).patches]
    if has_kernel(attention, dtype):
        means_2BH = _try_kernel(_Fused(attention, site, dtype), site.geometry, without_BWHM)
        if means_2BH is not None:
            return means_2BH
    found = tiles(attention, site, dtype=dtype, tile_bytes=tile_bytes)
    if without_BWHM is not None:
        found = (_without(tile, without_BWHM) for tile in found)
    sums = [_tile_sums(tile) for tile in found]
    distance_BH, entropy_BH, looking_BH = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return _means(distance_BH, entropy_BH, looking_BH, site.geometry)


def _without(tile: Tile, keys_BWHM: Tensor) -> Tile:
    keys_BWH1M = keys_BWHM.unsqueeze(-2)
    hidden = keys_BWH1M if tile.shown is None else keys_BWH1M & tile.shown
    log_BWHTM = tile.log_weights_BWHTM.masked_fill(keys_BWH1M, -math.inf)
    return replace(tile, log_weights_BWHTM=log_BWHTM, num_keys=tile.num_keys - hidden.sum(-1))


def _means(distance_BH: Tensor, entropy_BH: Tensor, looking_BH: Tensor, geometry: Geometry) -> Tensor:
    return torch.stack([distance_BH / geometry.diagonal, entropy_BH]) / looking_BH


def tiles(
    attention: Attention,
    site: Site,
    *,
    dtype: torch.dtype = torch.float32,
    tile_bytes: int | None = None,
    whole: bool = False,
) -> Iterator[Tile]:
    """An attention as tiles that hold no more than `tile_bytes` in one tensor, or one query of each window.

    `whole` keeps the tokens that are not patches, among the queries and among the keys.
    """
    source = _source(attention, site, dtype, whole)
    queries = source.tokens.queries
    if tile_bytes is None:
        on_cpu = source.others_WM.device.type == "cpu"
        enough = min(_FEWEST_QUERIES * source.bytes_per_query, _TILE_BYTES // 4)
        tile_bytes = max(_CACHED_BYTES, enough) if on_cpu else _TILE_BYTES
    tile = max(1, tile_bytes // (source.bytes_per_query or 1))
    for start in range(queries.start, queries.stop, tile):
        yield source.tile(slice(start, min(start + tile, queries.stop)))


def received_attention(
    attention: Attention, site: Site, queries_XWN: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What each key, patch or not, receives from some sets of queries: sums of their whole attention, [X, B, W, H, M].

    `queries_XWN` is 1 for a set's queries and 0 for others, float32. A query that attends to nothing gives nothing.
    """
    if has_kernel(attention, dtype):
        source = _Fused(attention, site, dtype, whole=True)
        tokens = source.query_BWHNd, source.key_BWHMd
        return fused_attention_columns(*tokens, scale=source.scale, sets_XWN=queries_XWN, bias=source.mask_BWHNM)
    total: Tensor | float = 0.0
    start = 0
    for tile in tiles(attention, site, dtype=dtype, whole=True):
        log_BWHTM = tile.log_weights_BWHTM
        stop = start + log_BWHTM.shape[-2]
        chosen_WXT = queries_XWN[..., start:stop].transpose(0, 1).to(log_BWHTM.dtype)
        # Not below what is finite: where all keys are hidden, −∞ less −∞ would be NaN.
        weight_BWHTM = (log_BWHTM - log_BWHTM.amax(-1, keepdim=True).clamp(min=_LOWEST)).exp()
        mass_BWHT = weight_BWHTM.sum(-1)
        share_BWHXT = chosen_WXT[:, None] / torch.where(mass_BWHT == 0, 1.0, mass_BWHT).unsqueeze(-2)
        total, start = total + share_BWHXT @ weight_BWHTM, stop
    assert isinstance(total, Tensor)
    return total.movedim(-2, 0)


def attention_shares(
    attention: FusedAttention,
    site: Site,
    cells: Cells,
    queries_XWN: Tensor | None = None,
    *,
    only_of_whole: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """By a kernel, for attention that has one and no mask: sums over tiles of queries of `columns.SHARES`, or of these
    `columns.OF_WHOLE` alone, [S, B, W, H, T], whose sum over windows and tiles is left to whoever has all layers; and
    what each key receives from the queries, if these are given: [X, B, W, H, M]."""
    source = _Fused(attention, site, torch.float32, whole=True)
    tokens = source.query_BWHNd, source.key_BWHMd
    shares_SBWHT, log_sums = fused_attention_shares(
        *tokens, scale=source.scale, cells=cells, only_of_whole=only_of_whole
    )
    received = None
    if queries_XWN is not None:
        received = fused_attention_columns(*tokens, scale=source.scale, sets_XWN=queries_XWN, log_sums_BWHN=log_sums)
    return shares_SBWHT, received


def rows_without(attention: FusedAttention, site: Site, hidden_BWHM: Tensor) -> Tensor:
    """By a kernel, for attention that has one: distance and entropy of every query, in cells and in nats, with some of
    the patches left out: float32 [2, B, W, H, N]. NaN for maps of which none is, unless there are several windows."""
    return _rows_by_kernel(_Fused(attention, site, torch.float32), hidden_BWHM)


def uniform_distance(attention: Attention, site: Site) -> float:
    """The distance, in diagonals, of a head that attends alike to every patch that it may attend to.

    That is the whole grid of most models, a window, pooled keys, or what masks leave of these. NaN where images or
    heads of a layer may attend to different patches, or where there is no distance on the image.
    """
    cache = site.geometry.cache
    if (own := ("uniform", site.name)) not in cache:
        source = _source(attention, site, torch.float32, whole=False)
        # Layers with tokens at the same places share their geometry, and without masks this number.
        key = own if source.is_masked else ("uniform", None)
        if key not in cache:
            cache[key] = math.nan if site.geometry.is_along_time else _uniform_distance(site.geometry, source)
        cache[own] = cache[key]
    distance: float = cache[own]
    return distance


def _uniform_distance(geometry: Geometry, source: "_Fused | _Explicit") -> float:
    total, count, queries = 0.0, 0, source.tokens.queries
    keys_WM2 = geometry.key_places_WM2[:, source.patches]
    is_key_W1M = keys_WM2[:, None, :, 0].isfinite()
    step = max(1, _TILE_BYTES // (8 * is_key_W1M.numel()))
    for start in range(queries.start, queries.stop, step):
        tile = slice(start, min(start + step, queries.stop))
        shown_WTM, shown = is_key_W1M, source.shown_to(tile)
        if shown is not None:
            shown_BWHTM = shown[(None,) * (5 - shown.dim())]
            first_WTM = shown_BWHTM[0, :, 0]
            if not bool((shown_BWHTM == first_WTM[:, None]).all()):
                return math.nan
            shown_WTM = shown_WTM & first_WTM.cpu()
        queries_WT2 = geometry.query_places_WN2[:, tile]
        distance_WTM = torch.cdist(queries_WT2, keys_WM2, compute_mode="donot_use_mm_for_euclid_dist")
        sum_WT, num_WT = torch.where(shown_WTM, distance_WTM, 0.0).sum(-1), shown_WTM.sum(-1)
        looking_WT = queries_WT2[..., 0].isfinite() & (num_WT > 0)
        total += float((sum_WT / num_WT)[looking_WT].sum())
        count += int(looking_WT.sum())
    return total / count / geometry.diagonal if count else math.nan


class _Tokens:
    """Where the tokens of a site lie, on the device that computes: made once per site."""

    def __init__(self, geometry: Geometry, device: torch.device, dtype: torch.dtype, whole: bool) -> None:
        self.patches = slice(None) if whole else _patch_slice(geometry.key_places_WM2)
        self.queries_WN2 = geometry.query_places_WN2.to(dtype).to(device)  # MPS knows no float64
        self.keys_WM2 = geometry.key_places_WM2[:, self.patches].to(dtype).to(device)
        self.others_WM = self.keys_WM2[..., 0].isnan()
        self.hides_others = bool(self.others_WM.any()) and not whole
        self.num_patches = (~self.others_WM).sum(-1)[:, None, None]
        self.is_query_WN = self.queries_WN2[..., 0].isfinite()
        self.queries = slice(0, self.queries_WN2.shape[1]) if whole else _patch_slice(geometry.query_places_WN2)
        self.means_211 = self._factors(geometry)
        """What makes means out of sums of distances and entropies, if all queries are patches with as many keys."""

    def _factors(self, geometry: Geometry) -> Tensor | None:
        num_keys = (~geometry.key_places_WM2[..., 0].isnan()).sum(-1)
        is_query_WN = geometry.query_places_WN2[:, self.queries, 0].isfinite()
        if not is_query_WN.all() or (num_keys != num_keys[0]).any() or self.queries_WN2.device.type == "mps":
            return None
        most = float(_most(num_keys[:1], torch.float64))
        factors = torch.tensor([1 / geometry.diagonal, 1 / most], dtype=torch.float64) / is_query_WN.numel()
        return factors.view(2, 1, 1).to(self.queries_WN2.device)


class _Source:
    """What the two kinds of attention share: which keys are patches."""

    def __init__(self, site: Site, device: torch.device, dtype: torch.dtype, whole: bool) -> None:
        key = device, dtype, whole
        if key not in site.geometry.cache:
            site.geometry.cache[key] = _Tokens(site.geometry, *key)
        self.tokens: _Tokens = site.geometry.cache[key]
        self.patches = self.tokens.patches
        self.others_WM = self.tokens.others_WM
        self.dtype = dtype

    @property
    def is_masked(self) -> bool:
        return self.shown_to(slice(0, 1)) is not None

    def shown_to(self, queries: slice) -> Tensor | None:
        """Which keys no mask hides from these queries; expands to [B, W, H, T, M]. None: all."""
        raise NotImplementedError

    def finish(self, log_BWHTM: Tensor, queries: slice, num_keys: Tensor | None, shown: Tensor | None) -> Tile:
        tokens = self.tokens
        if tokens.hides_others:
            log_BWHTM = log_BWHTM.masked_fill(self.others_WM[:, None, None, :], -math.inf)
        num_keys = tokens.num_patches if num_keys is None else num_keys
        return Tile(log_BWHTM, tokens.queries_WN2[:, queries], tokens.keys_WM2, num_keys, shown)


def _patch_slice(places_WM2: Tensor) -> slice:
    """From the first patch to the last: most models have their other tokens before or behind them."""
    placed = places_WM2[..., 0].isfinite().any(0).nonzero().flatten()
    return slice(int(placed[0]), int(placed[-1]) + 1)


class _Fused(_Source):
    def __init__(self, attention: FusedAttention, site: Site, dtype: torch.dtype, whole: bool = False) -> None:
        super().__init__(site, attention.query.device, dtype, whole)
        arrange = site.geometry.layout.arrange
        self.scale, self.is_causal = attention.scale, attention.is_causal
        self.query_BWHNd = arrange(attention.query)
        key_BWHMd = arrange(attention.key)
        self.num_keys = key_BWHMd.shape[-2]
        self.key_BWHMd = key_BWHMd[..., self.patches, :]
        self.mask_BWHNM: Tensor | None = None
        if attention.mask is not None:
            shape = (*attention.query.shape[:-1], self.num_keys)
            self.mask_BWHNM = arrange(attention.mask.to(attention.query.device).expand(shape))[..., self.patches]
        self.bytes_per_query = self.key_BWHMd.shape[:-1].numel() * dtype.itemsize
        self._prepared: Tensor | None = None

    def tile(self, queries: slice) -> Tile:
        if self._prepared is None:
            self._prepared = (self.key_BWHMd.to(self.dtype) * self.scale).transpose(-2, -1)
        log_BWHTM = self.query_BWHNd[..., queries, :].to(self.dtype) @ self._prepared
        if self.is_causal:
            log_BWHTM = log_BWHTM.masked_fill(~self._before(queries), -math.inf)
        if self.mask_BWHNM is not None:
            mask = self.mask_BWHNM[..., queries, :]
            is_bool = mask.dtype == torch.bool
            log_BWHTM = log_BWHTM.masked_fill(~mask, -math.inf) if is_bool else log_BWHTM + mask.to(self.dtype)
        allowed = self.shown_to(queries)
        num_keys = None if allowed is None else (allowed & ~self.others_WM[:, None, None, :]).sum(-1)
        return self.finish(log_BWHTM, queries, num_keys, allowed)

    def shown_to(self, queries: slice) -> Tensor | None:
        before = self._before(queries) if self.is_causal else None
        if self.mask_BWHNM is None:
            return before
        shown = self.shown(without_repetitions(self.mask_BWHNM[..., queries, :]))
        return shown if before is None else before & shown

    def _before(self, queries: slice) -> Tensor:
        position = torch.arange(self.num_keys, device=self.others_WM.device)
        return position[self.patches] <= position[queries, None]

    @staticmethod
    def shown(mask: Tensor) -> Tensor:
        """Where attention may be paid."""
        return mask if mask.dtype == torch.bool else mask > HIDING


class _Explicit(_Source):
    def __init__(self, attention: ExplicitAttention, site: Site, dtype: torch.dtype, whole: bool = False) -> None:
        super().__init__(site, attention.weights.device, dtype, whole)
        weights = attention.weights.movedim(site.axes, (-2, -1))
        self._weights_BWHNM = site.geometry.layout.arrange(weights)[..., self.patches]
        shape = self._weights_BWHNM.shape
        self.bytes_per_query = shape[:3].numel() * shape[-1] * dtype.itemsize
        self._shown_WHNM: Tensor | None = None
        self._num_keys_WHN: Tensor | None = None
        if site.hidden_WHNM is not None:
            self._shown_WHNM = ~site.hidden_WHNM[..., self.patches].to(self.others_WM.device)
            self._num_keys_WHN = (self._shown_WHNM & ~self.others_WM[:, None, None]).sum(-1)

    def tile(self, queries: slice) -> Tile:
        log_BWHTM = self._weights_BWHNM[..., queries, :].to(self.dtype).log()
        num_keys = None if self._num_keys_WHN is None else self._num_keys_WHN[..., queries]
        return self.finish(log_BWHTM, queries, num_keys, self.shown_to(queries))

    def shown_to(self, queries: slice) -> Tensor | None:
        return None if self._shown_WHNM is None else self._shown_WHNM[..., queries, :]


def _source(attention: Attention, site: Site, dtype: torch.dtype, whole: bool) -> _Fused | _Explicit:
    if isinstance(attention, ExplicitAttention):
        return _Explicit(attention, site, dtype, whole)
    return _Fused(attention, site, dtype, whole)


def _tile_sums(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the queries of a tile that look at any patch: distances, entropies, and how many they are."""
    log_BWHTM = tile.log_weights_BWHTM
    # Relative to the row's largest, so that a query which gives almost nothing to patches is still seen exactly.
    largest_BWHT1 = log_BWHTM.amax(-1, keepdim=True)
    looking_BWHT = (largest_BWHT1 != -math.inf).squeeze(-1) & tile.queries_WT2[:, None, :, 0].isfinite()
    log_BWHTM = log_BWHTM - largest_BWHT1
    weight_BWHTM = log_BWHTM.exp()
    mass_BWHT = weight_BWHTM.sum(-1)
    distance_BWHT = torch.einsum("bwhtm,wtm->bwht", weight_BWHTM, tile.distances) / mass_BWHT
    # 0 · log 0 is 0: masked keys have no share in the entropy.
    weighted_log_BWHT = torch.linalg.vecdot(weight_BWHTM, log_BWHTM.clamp(min=_LOWEST))
    entropy_BWHT = (mass_BWHT.log() - weighted_log_BWHT / mass_BWHT).clamp(min=0) / _most(
        tile.num_keys, log_BWHTM.dtype
    )
    return (
        _over_looking(distance_BWHT, looking_BWHT),
        _over_looking(entropy_BWHT, looking_BWHT),
        _off_mps(looking_BWHT.sum((1, 3))),
    )


def has_kernel(attention: Attention, dtype: torch.dtype) -> TypeGuard[FusedAttention]:
    """Whether sums of this type over this attention are made by a kernel."""
    if dtype != torch.float32 or not isinstance(attention, FusedAttention):
        return False
    return kernels_take(attention.query) and not attention.is_causal


def kernels_take(tensor: Tensor) -> bool:
    """Whether kernels work here on numbers of its type."""
    on_gpu = tensor.device.type == "cuda" and runs_on(tensor.device) and not _cannot_compile
    return on_gpu and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


_cannot_compile: list[str] = []
"""Why the kernel does not work on this machine, if that was found out."""


def _try_kernel(source: _Fused, geometry: Geometry, without_BWHM: Tensor | None) -> Tensor | None:
    try:
        return _means_by_kernel(source, geometry, without_BWHM)
    except RuntimeError as error:
        if "compiler" not in str(error):  # Triton needs one for C, which not every machine with a GPU has
            raise
        _cannot_compile.append(str(error))
        warnings.warn(f"attention is reduced without its fast kernel: {error}", stacklevel=2)
        return None


def _rows_by_kernel(source: _Fused, hidden_BWHM: Tensor | None) -> Tensor:
    return kernels.fused_attention_rows(
        source.query_BWHNd,
        source.key_BWHMd,
        scale=source.scale,
        query_places_WN2=source.tokens.queries_WN2,
        key_places_WM2=source.tokens.keys_WM2,
        bias=source.mask_BWHNM,
        hidden_BWHM=hidden_BWHM,
    )


def _means_by_kernel(source: _Fused, geometry: Geometry, hidden_BWHM: Tensor | None) -> Tensor:
    tokens, mask = source.tokens, source.mask_BWHNM
    rows_2BWHN = _rows_by_kernel(source, hidden_BWHM)
    if mask is None and hidden_BWHM is None and tokens.means_211 is not None:
        # All queries have equal weight: two operations, because at 197 tokens launching them is what costs.
        return rows_2BWHN[..., tokens.queries].sum((2, 4), dtype=torch.float64) * tokens.means_211
    looking, num_keys = tokens.is_query_WN[:, None], tokens.num_patches
    if mask is not None or hidden_BWHM is not None:
        reachable = shown = ~source.others_WM[:, None, None]
        if hidden_BWHM is not None:
            reachable = shown = shown & ~hidden_BWHM.unsqueeze(-2)
        if mask is not None:
            mask = without_repetitions(mask)
            shown = source.shown(mask) & shown
            reachable = (mask if mask.dtype == torch.bool else mask != -math.inf) & reachable
        num_keys = shown.sum(-1)
        looking = looking & reachable.any(-1)
    distance_BWHN, entropy_BWHN = rows_2BWHN
    looking_BWHN = looking.expand_as(distance_BWHN)
    return _means(
        _over_looking(distance_BWHN, looking_BWHN),
        _over_looking(entropy_BWHN / _most(num_keys, torch.float32), looking_BWHN),
        looking_BWHN.sum((1, 3)),
        geometry,
    )


_LOWEST = -1e30
"""Instead of −∞ where it meets a weight of 0."""


def _most(num_keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest entropy among so many keys; 1 for a single one, where it is 0 anyway."""
    return torch.where(num_keys > 1, num_keys.to(dtype), math.e).log()


def _over_looking(values_BWHT: Tensor, looking_BWHT: Tensor) -> Tensor:
    """Sum over windows and queries: [B, H] float64, on the CPU where the device knows no such numbers."""
    return _off_mps(torch.where(looking_BWHT, values_BWHT, 0.0)).sum((1, 3), dtype=torch.float64)


def _off_mps(values: Tensor) -> Tensor:
    """On the CPU if they were on MPS, which knows no float64."""
    return values.cpu() if values.device.type == "mps" else values
