"""`nearsight.ablate`: what the heads of a model are worth, and how far they have to reach.

Which variants answer which question is decided here; `nearsight.probe.variants` tries them.

Shape suffixes: V variants, N images, P points of a curve.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.lens import (
    DropSinks,
    HeadTable,
    Identity,
    Mean,
    Offsets,
    Plan,
    Reach,
    Survey,
    Uniform,
    Zero,
    average_maps,
    measure,
)
from nearsight.lens.plans import AverageMaps
from nearsight.probe.readouts import Classes, Labelled, Neighbours, Readout, Truth
from nearsight.probe.settings import PLANS, QUESTIONS, USUAL_PLANS, Scored
from nearsight.probe.variants import Tried, Variant, try_variants
from nearsight.randomness import permutation

RANDOM = "random"
"""With a number after it: an order of heads to remove that knows nothing of them."""
_CERTAIN = 1.96
"""Standard errors on both sides of a mean that hold it in 95 of 100 cases."""
MOST_LOCAL, LEAST_LOCAL = "most local first", "least local first"
"""Orders in which heads are removed, by their mean attention distance."""
_NUM_POINTS = 16
"""Of a curve of removal."""
_REACHES = (0, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_PLAIN: dict[str, type[Plan]] = {"zero": Zero, "identity": Identity, "uniform": Uniform, "drop-sinks": DropSinks}
_OF_REFERENCE: dict[str, type[Mean]] = {"mean": Mean, "offsets": Offsets}


@dataclass(frozen=True)
class Ablation:
    """How a model does unchanged and in every variant: what each image contributes to a score, which is the mean."""

    tried: Tried
    heads: HeadTable
    """The same heads as `measure` describes them."""

    @property
    def score(self) -> float:
        """Of the unchanged model."""
        return float(self.tried.base_N.mean())

    def rows(self) -> list[dict[str, Any]]:
        """A row per variant: its settings, its score, and what it loses, with its 95 % interval over images.

        A loss is the score of the unchanged model less that of the variant, on the same images.
        """
        return [
            {
                "kind": variant.kind,
                **variant.settings,
                self.tried.metric: float(values_N.mean()),
                **_with_interval("loss", self.tried.base_N - values_N),
            }
            for variant, values_N in zip(self.tried.variants, self.tried.values_VN, strict=True)
        ]

    def to_frame(self, kind: Literal["head", "reach", "removal"]) -> pd.DataFrame:
        """The rows of a kind: single heads (with their MAD and entropy), reaches (`layer` is "all" where all layers are
        limited), or more and more heads."""
        rows = [row for row in self.rows() if row["kind"] == kind]
        frame = pd.DataFrame(rows).drop(columns=["kind", "loss_se"], errors="ignore")
        if not rows or kind == "removal":
            return frame
        layer_names = list(self.tried.found.layers)
        names = ["all" if row["layer"] is None else layer_names[row["layer"]] for row in rows]
        frame["layer"] = ["all" if row["layer"] is None else row["layer"] for row in rows]
        frame.insert(list(frame.columns).index("layer") + 1, "layer_name", names)
        if kind == "head":
            measured = self.heads.to_frame()[["layer_name", "head", "mad", "entropy"]]
            frame = frame.merge(measured, how="left", on=["layer_name", "head"])
        return frame

    def areas(self) -> list[dict[str, Any]]:
        """A row per order that is not random: the mean score while all heads are removed, from none to the last, and
        how much that is above the mean of the random orders, with its 95 % interval over images.

        The mean is the area under the curve, by trapezoids, which is a weighted sum of an image's values: so it has a
        standard error over images like any score.
        """
        orders: dict[str, list[int]] = {}
        for number, variant in enumerate(self.tried.variants):
            if variant.kind == "removal":
                orders.setdefault(variant.settings["order"], []).append(number)
        areas = {name: self._area(numbers) for name, numbers in orders.items()}
        by_chance = [area_N for name, area_N in areas.items() if name.startswith(RANDOM)]
        return [
            {
                "order": name,
                "area": float(area_N.mean()),
                **(_with_interval("above_random", area_N - np.mean(by_chance, axis=0)) if by_chance else {}),
            }
            for name, area_N in areas.items()
            if not name.startswith(RANDOM)
        ]

    def _area(self, numbers: Sequence[int]) -> NDArray[np.float64]:
        removed_P = np.array([0, *(self.tried.variants[number].settings["removed"] for number in numbers)])
        values_PN = np.vstack([self.tried.base_N, self.tried.values_VN[numbers]])
        area_N: NDArray[np.float64] = np.trapezoid(values_PN, removed_P / removed_P[-1], axis=0)
        return area_N


def _with_interval(name: str, values_N: NDArray[np.float64]) -> dict[str, float]:
    """The mean of differences between two models over images, and its 95 % interval.

    For that, one image that only the one gets right and one that only the other does are added (Bonett & Price 2012):
    where none of a few images differ, the next one still might.
    """
    with_two = np.concatenate([values_N, [1.0, -1.0]])
    middle, error = float(with_two.mean()), float(with_two.std() / len(with_two) ** 0.5)
    ends = {f"{name}_low": middle - _CERTAIN * error, f"{name}_high": middle + _CERTAIN * error}
    return {name: float(values_N.mean()), f"{name}_se": error, **ends}


def every_head(found: Survey, plan: Callable[[Mapping[int | str, Sequence[int]]], Plan], name: str) -> list[Variant]:
    """Every head by itself, changed by a plan such as `Zero`."""
    return [
        Variant("head", plan({layer: [head]}), {"plan": name, "layer": layer, "head": head})
        for layer, site in enumerate(found.layers.values())
        for head in range(site.num_heads)
    ]


def every_reach(found: Survey, reaches: Sequence[float]) -> list[Variant]:
    """All heads limited to some patches around each: of one layer at a time, and of all layers."""
    layers: list[int | None] = [*range(len(found.layers)), None]
    return [
        Variant("reach", Reach(r, None if layer is None else {layer: None}), {"layer": layer, "reach": float(r)})
        for layer in layers
        for r in reaches
    ]


def removal(order: Sequence[tuple[int, int]], name: str, *, step: int = 1) -> list[Variant]:
    """More and more heads, (layer, head), give nothing, in an order, until none is left."""
    variants = []
    for number in (*range(step, len(order), step), len(order)):
        heads: dict[int | str, list[int]] = {}
        for layer, head in order[:number]:
            heads.setdefault(layer, []).append(head)
        variants.append(Variant("removal", Zero(heads), {"order": name, "removed": number}))
    return variants


def ablate(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    labels: Truth | Sequence[int],
    *,
    what: Sequence[str] = QUESTIONS,
    plans: Sequence[str] | None = None,
    reaches: Sequence[float] | None = None,
    orders: int = 3,
    reference: Tensor | Iterable[Any] | None = None,
    score: Scored | Readout = "classifier",
    batch_size: int = 64,
    variants_at_once: int = 8,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Ablation:
    """What a model loses when its heads are changed: every head, every layer, and more and more heads.

        found = nearsight.ablate(model, images, labels)
        found.score, found.to_frame("head")

    Args:
        model: a ViT with a classifier, unmodified, and left as it was.
        images: normalised, [N, C, H, W], or batches of such.
        labels: their classes, from 0, [N]; for a readout of pixels their masks, each [H, W].
        what: any of `heads` (one at a time), `reach` (all heads of a layer, or of all, limited to some patches) and
            `removal` (more and more heads give nothing, in the order of their distance and in random ones).
        plans: what single heads do instead: `zero`, `identity`, `uniform`, `mean`, `offsets`, `drop-sinks`; by default
            the first three, as far as they fit the model.
        reaches: in patches; by default some that fit its grid.
        orders: how many random orders of removal.
        reference: images for `mean` and `offsets`.
        score: the model's own `classifier`; `knn`, the 20 nearest of the other images; or what `fit_pixels` returns,
            for the mIoU of images with masks.
        batch_size: of `images` that are one tensor.
        variants_at_once: how many changed models run as one batch.
        seed: of the random orders.
        device: where to run; by default where the model is.
    """
    batches = list(images.split(batch_size)) if isinstance(images, Tensor) else list(images)
    truth = labels if isinstance(score, Readout) else torch.as_tensor(labels)
    if (num_images := sum(map(len, batches))) != len(truth):
        raise InputError(f"there are {num_images} images, but {len(truth)} labels")
    check_questions(what, plans, reaches, orders)
    heads = measure(model, batches, device=device)
    averages = None if reference is None else average_maps(model, reference, device=device)

    def variants(found: Survey) -> list[Variant]:
        return questions(
            found, heads, what=what, plans=plans, reaches=reaches, orders=orders, seed=seed, averages=averages
        )

    tried = try_variants(
        model,
        labelled(batches, truth),
        variants,
        readout(score),
        variants_at_once=variants_at_once,
        device=device,
        num_images=num_images,
    )
    return Ablation(tried, heads)


def readout(score: Scored | Readout) -> Readout:
    """By its name."""
    if isinstance(score, Readout):
        return score
    known: dict[str, type[Readout]] = {"classifier": Classes, "knn": Neighbours}
    if score not in known:
        raise unknown_name("score", score, known)
    return known[score]()


def labelled(batches: Iterable[Tensor], truth: Any) -> Labelled:
    """Batches of images with what is true of them."""
    begin = 0
    for batch in batches:
        yield batch, truth[begin : begin + len(batch)]
        begin += len(batch)


def questions(
    found: Survey,
    heads: HeadTable,
    *,
    what: Sequence[str] = QUESTIONS,
    plans: Sequence[str] | None = None,
    reaches: Sequence[float] | None = None,
    orders: int = 3,
    seed: int = 0,
    averages: AverageMaps | None = None,
) -> list[Variant]:
    """The variants that answer them; arguments as for `ablate`. What does not fit the model is refused before any of
    them is tried, or left out if nobody asked for it by name."""
    variants: list[Variant] = []
    if "heads" in what:
        for name, plan in _plans(found, plans, averages).items():
            variants += every_head(found, plan, name)
    if "reach" in what:
        variants += every_reach(found, _reaches(found, reaches))
    if "removal" in what:
        for name, order in _orders(found, heads, orders, seed).items():
            variants += removal(order, name, step=math.ceil(len(order) / _NUM_POINTS))
    return variants


def check_questions(
    what: Sequence[str], plans: Sequence[str] | None, reaches: Sequence[float] | None, orders: int
) -> None:
    """Refuse what is wrong for any model."""
    for kind, names, known in (("question", what, QUESTIONS), ("plan", plans or (), PLANS)):
        for name in names:
            if name not in known:
                raise unknown_name(kind, name, known)
    for reach in reaches or ():
        Reach(reach)
    check_at_least("orders", orders, 0)


def _plans(
    found: Survey, names: Sequence[str] | None, averages: AverageMaps | None
) -> dict[str, Callable[[Mapping[int | str, Sequence[int]]], Plan]]:
    """Name → what makes the plan for some heads."""
    chosen: dict[str, Callable[[Mapping[int | str, Sequence[int]]], Plan]] = {}
    for name in USUAL_PLANS if names is None else dict.fromkeys(names):
        if name in _OF_REFERENCE:
            if averages is None:
                raise InputError(f"{name} is an average over images; say with reference over which")
            chosen[name] = _on_average(_OF_REFERENCE[name], averages)
        elif _fits(found, _PLAIN[name](), refuse=names is not None):
            chosen[name] = _PLAIN[name]
    return chosen


def _on_average(kind: type[Mean], averages: AverageMaps) -> Callable[[Mapping[int | str, Sequence[int]]], Plan]:
    return lambda heads: kind(averages, heads)


def _fits(found: Survey, plan: Plan, *, refuse: bool) -> bool:
    """Whether all layers allow the plan; where one does not, it may `refuse` with its reason."""
    try:
        for site in found.sites.values():
            plan.prepare(site, range(site.num_heads), None)
    except InputError:
        if refuse:
            raise
        return False
    return True


def _reaches(found: Survey, asked: Sequence[float] | None) -> list[float]:
    side = max(max(site.geometry.grid_size) for site in found.sites.values())
    reaches = [r for r in _REACHES if r < side - 1] if asked is None else sorted(set(asked))
    return [float(r) for r in reaches if _fits(found, Reach(r), refuse=asked is not None)]


def _orders(found: Survey, table: HeadTable, num_random: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    """Name → (layer, head), the first that is removed first."""
    mads = [table.mad[table.layer_names.index(name)] for name in found.layers]
    all_heads = [(layer, head) for layer, site in enumerate(found.layers.values()) for head in range(site.num_heads)]
    # A head without a distance (its layer has one patch) is neither local nor not: it is among the last either way.
    local = sorted(all_heads, key=lambda at: float(np.nan_to_num(mads[at[0]][at[1]], nan=np.inf)))
    least = sorted(all_heads, key=lambda at: -float(np.nan_to_num(mads[at[0]][at[1]], nan=-np.inf)))
    by_chance = (
        permutation(torch.tensor([seed]), "order of removed heads", torch.tensor(number), len(all_heads))[0].tolist()
        for number in range(num_random)
    )
    numbered: Iterator[tuple[str, list[tuple[int, int]]]] = (
        (f"{RANDOM} {number}", [all_heads[at] for at in order]) for number, order in enumerate(by_chance)
    )
    return {MOST_LOCAL: local, LEAST_LOCAL: least, **dict(numbered)}
