"""Plans: what heads are to attend to instead, as rules about the places of queries and keys.

A row of a map is a query's attention. By default a plan changes the rows of patches, and of these only how what they
give to *patches* is spread: what they give to CLS, registers and other tokens stays as it is. So two plans differ in
nothing but space.

Shape suffixes: B images, W windows, H heads, T queries of a tile, N queries, M keys, J all keys of all windows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.lens.attention import Attention
from nearsight.lens.stream import Tile, received_attention
from nearsight.lens.survey import Site
from nearsight.metrics import sink_patches

Heads = Mapping[Any, Sequence[int] | None] | None
"""Layers (positions from 0, or names) → heads (from 0); None is all."""
Prefix = Literal["keep", "share", "drop"]
Rows = Literal["patches", "all"]
_SAME = 1e-4
"""Patches: places that are nearer to each other than this are one. Centres of pooled cells are rounded."""


class Plan:
    """What some heads are to attend to.

    Args:
        heads: which: {4: [1]} is head 1 of layer 4, {4: None} all heads of layer 4, None all heads of all layers.
        prefix: what becomes of what rows give to tokens that are not patches (CLS, registers). `keep` leaves it as it
            is; `drop` gives it to patches; `share`, for plans that leave keys out, leaves these out before the softmax,
            so that what they received goes to all other tokens in proportion.
        rows: whose rows are changed: those of patches, or of `all` tokens.

    A plan of your own says in `log_spread` how a row's attention to patches is spread.
    """

    leaves_out = False
    """Whether it keeps the row's own weights of the keys that it does not leave out."""
    has_places = True
    """Whether it is about the place of a query, so that tokens without one have no row to change."""

    def __init__(self, heads: Heads = None, *, prefix: Prefix = "keep", rows: Rows = "patches") -> None:
        name = type(self).__name__
        for option, value, known in (("prefix", prefix, Prefix), ("rows", rows, Rows)):
            if value not in get_args(known):
                raise InputError(f"{option} is one of {', '.join(get_args(known))}, not {value!r}")
        if heads is not None and not isinstance(heads, Mapping):
            raise InputError(f"heads are a mapping from layers to heads, as in {name}({{4: [1]}}), not {heads!r}")
        if prefix == "share" and not self.leaves_out:
            raise InputError(f"{name} leaves no keys out, so that there is nothing to share; take prefix='drop'")
        if rows == "all" and self.has_places:
            raise InputError(f"{name} is about places, and tokens that are not patches have none; leave out rows='all'")
        self.heads, self.prefix, self.rows = heads, prefix, rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'all heads' if self.heads is None else dict(self.heads)})"

    def prepare(self, site: Site, heads: Sequence[int], averages: "AverageMaps | None") -> Any:
        """What it needs to know of a layer, once; an `InputError` refuses one whose rows it cannot describe."""
        return None

    def look(self, attention: Attention, site: Site, dtype: torch.dtype, prepared: Any) -> Any:
        """What it needs to know of the chosen heads' attention, [B, W, H, …], before any of its rows are changed."""
        return prepared

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        """Logarithms, up to a constant per row, of how what goes to patches is spread; expands to [B, W, H, T, M].

        −∞ for keys that get nothing. A row all of whose keys get nothing stays as it is.
        """
        raise NotImplementedError


class Zero(Plan):
    """The heads give nothing: their output is 0, in the rows of all tokens."""


class Identity(Plan):
    """Every patch attends to itself alone."""

    def prepare(self, site: Site, heads: Sequence[int], averages: "AverageMaps | None") -> None:
        if _fewest(site, _distances(site) < _SAME) < 1:
            raise InputError(f"{site.name}: no key lies on the query's own patch, its keys are pooled; use Reach(r)")

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        return torch.where(tile.distances < _SAME, 0.0, -math.inf)[:, None]


class Uniform(Plan):
    """Every patch attends to all patches alike, those that no mask of the model hides."""

    has_places = False

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        return torch.zeros_like(tile.distances)[:, None]


class Reach(Plan):
    """Keys farther than `r` patches are left out; with `beyond`, those nearer than `r`.

    Distances are between centres, in patches of the layer's grid: 1.5 leaves 3×3 patches.
    """

    leaves_out = True

    def __init__(
        self, r: float, heads: Heads = None, *, beyond: bool = False, prefix: Prefix = "keep", rows: Rows = "patches"
    ) -> None:
        if not isinstance(r, int | float) or not r >= 0:
            raise InputError(f"a reach is a distance in patches, 0 or more, not {r!r}: Reach(1.5, {{4: [1]}})")
        super().__init__(heads, prefix=prefix, rows=rows)
        self.r, self.beyond = float(r), beyond

    def prepare(self, site: Site, heads: Sequence[int], averages: "AverageMaps | None") -> None:
        if _fewest(site, self._kept(_distances(site))) < 1:
            which = f"no patch {self.r:g} or more away" if self.beyond else f"no patch within {self.r:g}"
            raise InputError(f"{site.name}: some queries have {which} to attend to; take another reach")

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        return tile.log_weights_BWHTM.masked_fill(~self._kept(tile.distances)[:, None], -math.inf)

    def _kept(self, distances: Tensor) -> Tensor:
        return distances >= self.r - _SAME if self.beyond else distances <= self.r + _SAME


class DropSinks(Plan):
    """Patches that receive more than ten times the mean of all (`nearsight.metrics.sink_patches`) are left out."""

    leaves_out = True
    has_places = False

    def prepare(self, site: Site, heads: Sequence[int], averages: "AverageMaps | None") -> None:
        places_J2 = site.geometry.key_places_WM2.flatten(0, 1)
        places_J2 = places_J2[places_J2[:, 0].isfinite()].round(decimals=6)
        if len(places_J2.unique(dim=0)) < len(places_J2):
            raise InputError(f"{site.name}: its windows overlap, so that no one key has what a patch receives")

    def look(self, attention: Attention, site: Site, dtype: torch.dtype, prepared: Any) -> Tensor:
        """Which keys are sinks, [B, W, H, 1, M]."""
        is_query_1WN, is_patch_WM = (
            places[..., 0].isfinite() for places in (site.geometry.query_places_WN2[None], site.geometry.key_places_WM2)
        )
        received_BWHM = received_attention(attention, site, is_query_1WN.to(attention.device), dtype=dtype)[0]
        received_BHJ = received_BWHM.transpose(1, 2).flatten(2)
        patches_J = is_patch_WM.flatten().to(received_BHJ.device)
        sinks_BHJ = torch.zeros_like(received_BHJ, dtype=torch.bool)
        sinks_BHJ[..., patches_J] = sink_patches(received_BHJ[..., patches_J])
        sinks_BHWM: Tensor = sinks_BHJ.unflatten(2, is_patch_WM.shape)
        return sinks_BHWM.transpose(1, 2).unsqueeze(-2)

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        return tile.log_weights_BWHTM.masked_fill(known, -math.inf)


class OnlySinks(DropSinks):
    """All patches but sinks are left out; an image without sinks keeps its rows."""

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        return tile.log_weights_BWHTM.masked_fill(~known, -math.inf)


@dataclass(frozen=True)
class AverageMaps:
    """What heads attend to on average over some images (`nearsight.lens.average_maps`)."""

    weights: Mapping[str, Mapping[int, Tensor]]
    """Attention → head → [W, N, M], float64."""
    num_images: int


class Mean(Plan):
    """The head's average map over a reference set: what it attends to whatever the image.

    The reference is images, as `measure` takes them, over which the average is taken when the intervention begins; or
    what `nearsight.lens.average_maps` returned for them, to use it several times.
    """

    has_places = False

    def __init__(
        self,
        reference: AverageMaps | Tensor | Iterable[Any],
        heads: Heads = None,
        *,
        prefix: Prefix = "keep",
        rows: Rows = "patches",
    ) -> None:
        name = type(self).__name__
        if reference is None or (isinstance(reference, Mapping) and not any(map(torch.is_tensor, reference.values()))):
            raise InputError(f"{name} needs images to average over: {name}(images, {{4: [1]}})")
        super().__init__(heads, prefix=prefix, rows=rows)
        self.reference = reference

    def prepare(self, site: Site, heads: Sequence[int], averages: "AverageMaps | None") -> Tensor:
        """Logarithms of what rows give on average, [W, H, N, M]."""
        geometry, found = site.geometry, {} if averages is None else averages.weights.get(site.name, {})
        if missing := [head for head in heads if head not in found]:
            raise InputError(f"{site.name}: there is no average map of its head {missing[0]}")
        average_WHNM = torch.stack([found[head] for head in heads], dim=1)
        shape = (*geometry.query_places_WN2.shape[:2], geometry.key_places_WM2.shape[1])
        if (len(average_WHNM), *average_WHNM.shape[2:]) != shape:
            raise InputError(f"{site.name}: its average map is of images of another size")
        return self.average(site, average_WHNM).log()

    def average(self, site: Site, average_WHNM: Tensor) -> Tensor:
        """What is used of the average map."""
        return average_WHNM

    def log_spread(self, tile: Tile, queries: slice, known: Any) -> Tensor:
        log_WHTM: Tensor = known[..., queries, :]
        return log_WHTM.to(tile.log_weights_BWHTM)


class Offsets(Mean):
    """The head's average attention by the step from query to key, over a reference set: its spatial prior alone.

    Of all pairs of patches that are the same step apart, the mean; renormalised over the keys that a query has.
    """

    has_places = True

    def average(self, site: Site, average_WHNM: Tensor) -> Tensor:
        places = site.geometry.query_places_WN2[:, :, None], site.geometry.key_places_WM2[:, None]
        step_WNM2 = places[1] - places[0]
        are_patches_WNM = step_WNM2[..., 0].isfinite()
        step_P2 = step_WNM2[are_patches_WNM].round(decimals=6)
        _, number_P, count_S = step_P2.unique(dim=0, return_inverse=True, return_counts=True)
        average_HWNM = average_WHNM.movedim(1, 0)
        pairs_HP = average_HWNM[:, are_patches_WNM]
        means_HS = pairs_HP.new_zeros(len(pairs_HP), len(count_S)).index_add_(1, number_P, pairs_HP) / count_S
        by_step_HWNM = torch.zeros_like(average_HWNM)
        by_step_HWNM[:, are_patches_WNM] = means_HS[:, number_P]
        return by_step_HWNM.movedim(0, 1)


def _distances(site: Site) -> Tensor:
    """[W, N, M] in patches; NaN where one of the two is none."""
    places = site.geometry.query_places_WN2, site.geometry.key_places_WM2
    return torch.cdist(*places, compute_mode="donot_use_mm_for_euclid_dist")


def _fewest(site: Site, kept_WNM: Tensor) -> int:
    """The smallest number of keys that a patch keeps."""
    is_query_WN, is_key_WM = (
        places[..., 0].isfinite() for places in (site.geometry.query_places_WN2, site.geometry.key_places_WM2)
    )
    return int((kept_WNM & is_key_WM[:, None]).sum(-1)[is_query_WN].min())
