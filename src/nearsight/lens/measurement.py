"""What a further measurement is: one class that describes it completely; and sums that several need.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, X things, or bins.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from nearsight.lazy import F, marked, np, torch
from nearsight.metrics.attention import to_float64

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nearsight.lens.attention import Attention
    from nearsight.lens.inputs import Batch
    from nearsight.lens.stream import Tile
    from nearsight.lens.survey import Site, Survey
    from nearsight.lens.table import Array, HeadTable

ELSEWHERE = {
    "cka": ("layer_similarity", "between layers, of one model or two: linear CKA of their tokens"),
    "rollout": ("attention_rollout", "per picture: attention rollout from CLS to the patches"),
    "positions": ("position_gram", "per patch: whether its learned position is closest to those of its neighbours"),
}
"""Measurements that are not columns of a table of heads → the function in `nearsight.lens`, and a line about it."""
MEASUREMENTS: dict[str, type[Measurement]] = {}
"""What `measure(what=…)` takes, once `load_all` has been called."""
WHAT: dict[str, str] = {}
"""All that `nearsight measure --what` takes, with a line about each. Those of this room are found in the text of its
files, so that who asks what there is need not load them."""
_FILES: set[str] = set()
"""Of those, by module."""
for _name, _module, _definition in marked(Path(__file__).parent, "measurement"):
    _FILES.add(_module)
    WHAT[_name] = next(
        ast.literal_eval(line.value)
        for line in _definition.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "about"
    )
WHAT.update({name: about for name, (_, about) in ELSEWHERE.items()})

M = TypeVar("M", bound="type[Measurement]")


def measurement(name: str) -> Callable[[M], M]:
    """Register a measurement: it is then one that `measure(what=[name])` and `nearsight measure --what name` take."""

    def register(kind: M) -> M:
        is_new = name not in WHAT or (
            name not in MEASUREMENTS and kind.__module__.removeprefix(f"{__package__}.") in _FILES
        )
        assert is_new, f"there is a measurement {name!r} already"
        MEASUREMENTS[name], WHAT[name] = kind, kind.about
        return kind

    return register


def load_all() -> None:
    """Load the measurements of this room: whoever takes any calls it first."""
    for module in sorted(_FILES):
        import_module(f"nearsight.lens.{module}")


class Measurement(ABC):
    """Something more to see in the forwards of a model, for images of one size.

    It watches one batch at a time; then `results` says what it saw, as means over the batch's images, so that tables
    of disjoint images merge as weighted means. The class says what it is, where its numbers go and how they are shown.
    """

    about: ClassVar[str]
    """In a line, for `--help`."""
    table: ClassVar[Literal["head", "layer"] | None] = "head"
    """Whether its results are columns of extra-heads.csv or extra-layers.csv; None: they are in heads.npz alone."""
    picture: ClassVar[str | Callable[..., Any] | None] = None
    """How it is drawn: "heat", the `columns` by layer and head; "layers", the `columns` by layer; "steps",
    `HeadTable.offset_maps`; "strips", `HeadTable.kinds`, of all models in one; or a function of (table, label=…,
    layers=…) that returns a figure."""
    columns: ClassVar[tuple[str, ...]] = ()
    """The results that "heat" or "layers" show."""
    of_images: ClassVar[tuple[str, ...]] = ()
    """The results that are those of each image, [images, layers, heads]: the table has their means and, beside
    distance and entropy, the values of single images, so that they have intervals."""
    needs_tiles = False
    """Whether it is to be given the tiles of each attention, with all tokens."""
    needs_attention = False
    """Whether it is to be given each attention itself, to look at it more than once or with a kernel of its own."""

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        """What was found, in a sentence or two; `layers` are the numbers of the table's layers in the whole model."""
        return ""

    @abstractmethod
    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        """Prepare for images like the first of this batch; the model is in eval mode."""

    def starting(self, batch: Batch) -> None:  # noqa: B027 (few ask what a batch has beside its pixels)
        """A batch, before its forward."""

    def watching(self) -> AbstractContextManager[None]:
        """Around the forward of a batch: here it may hook what it needs."""
        return nullcontext()

    def add(self, site: Site, tile: Tile) -> None:  # noqa: B027 (only those that need tiles are given any)
        """A tile of one attention; all tiles of all sites come once in a batch. A layer may be several sites."""

    def add_whole(self, site: Site, attention: Attention, dtype: torch.dtype) -> bool:
        """One attention at once, where there is a kernel that makes the sums of its tiles: if not, these are added."""
        return False

    def look(  # noqa: B027 (only those that need it are asked)
        self, site: Site, attention: Attention, reduced_2BH: Tensor, dtype: torch.dtype
    ) -> None:
        """One attention while the model holds it, its distance and entropy, and the type of sums within a query."""

    @abstractmethod
    def results(self) -> Mapping[str, Array | Tensor]:
        """By name, the layers first, but for `of_images`; and ready for the next batch.

        Tensors are brought to the host when the next batch is on its way: who returns them does not wait for a device.
        """


class QueryMeans:
    """Means over the queries of an image and then over images, of every head, tile by tile."""

    def __init__(self, layer_names: Sequence[str]) -> None:
        self._layer_names = layer_names
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, layer_name: str, sums_BHX: Tensor, looking_BWHT: Tensor) -> None:
        """Sums over the queries that are looking; X is any number of things."""
        self.add_counted(layer_name, sums_BHX, looking_BWHT.sum((1, 3))[..., None])

    def add_counted(self, layer_name: str, sums_BHX: Tensor, counts_BHX: Tensor) -> None:
        """Sums over so many cases, which may differ from thing to thing."""
        sums_BHX = to_float64(sums_BHX)
        counts_BHX = counts_BHX.to(sums_BHX.device)
        if layer_name in self._sums:
            sums_before, counts_before = self._sums[layer_name]
            sums_BHX, counts_BHX = sums_BHX + sums_before, counts_BHX + counts_before
        self._sums[layer_name] = sums_BHX, counts_BHX

    def taken(self) -> Array:
        """[layers, heads, X]; and ready for the next batch."""
        return stack_layers(self.taken_by_layer())

    def taken_by_layer(self) -> list[Array]:
        """The same as a list: [heads, X] of each layer."""
        in_order = [self._sums[name] for name in self._layer_names]
        self._sums = {}
        return [(sums / counts).mean(0).cpu().numpy() for sums, counts in in_order]

    def means(self) -> Tensor:
        """As `taken`, where the sums are: nobody waits for a device."""
        in_order = [self._sums[name] for name in self._layer_names]
        self._sums = {}
        sums, counts = ([pair[part].expand_as(pair[0]) for pair in in_order] for part in (0, 1))
        return (stacked(sums, heads=1) / stacked(counts, heads=1)).mean(1)


def stacked(per_layer: Sequence[Tensor], *, heads: int) -> Tensor:
    """Of all layers, where they are; NaN for heads that some have more of. `heads` is their axis."""
    most = max(values.shape[heads] for values in per_layer)
    padding = [[0, 0] * (values.dim() - 1 - heads) + [0, most - values.shape[heads]] for values in per_layer]
    return torch.stack(
        [
            F.pad(values.double(), missing, value=math.nan) if missing[-1] else values
            for values, missing in zip(per_layer, padding, strict=True)
        ]
    )


def stack_layers(per_layer: Sequence[Array]) -> Array:
    """Arrays of one layer each, with equally many axes, as one with the layers first; NaN where one is shorter."""
    shape = np.max([values.shape for values in per_layer], axis=0)
    stacked = np.full((len(per_layer), *shape), np.nan)
    for layer, values in zip(stacked, per_layer, strict=True):
        layer[tuple(map(slice, values.shape))] = values
    return stacked


def patch_shares(tile: Tile) -> tuple[Tensor, Tensor]:
    """Attention renormalised over the patches [B, W, H, T, M], 0 for queries that are not looking; and which are, of
    those that are patches themselves [B, W, H, T]."""
    others_WM = tile.keys_WM2[..., 0].isnan()
    log_BWHTM = tile.log_weights_BWHTM.masked_fill(others_WM[:, None, None, :], -math.inf)
    looking_BWHT = (log_BWHTM.amax(-1) != -math.inf) & tile.queries_WT2[:, None, :, 0].isfinite()
    return log_BWHTM.softmax(-1).masked_fill(~looking_BWHT[..., None], 0.0), looking_BWHT


def sums_by_bin(share_BWHTM: Tensor, bins_WTM: Tensor, num_bins: int) -> Tensor:
    """Attention sorted into bins by where the query and the key are: [B, H, X]."""
    batch, _, heads = share_BWHTM.shape[:3]
    # Pairs of tokens first: then each is one row to add, of all images and heads.
    pairs = share_BWHTM.permute(1, 3, 4, 0, 2).reshape(-1, batch * heads)
    sums: Tensor = pairs.new_zeros(num_bins, batch * heads).index_add_(0, bins_WTM.flatten(), pairs)
    by_head: Tensor = sums.T.unflatten(0, (batch, heads))
    return by_head
