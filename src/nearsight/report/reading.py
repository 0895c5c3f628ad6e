"""What the numbers of measured models say, in plain words.

Every sentence is computed, and none says more than the numbers do: a difference is stated only where the ranges over
images do not overlap, and one training run per model is never taken for a statement about the recipe.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.metrics import least_share_on_itself, next_patch_distance
from nearsight.report.inputs import ModelHeads, check_labels, shorten
from nearsight.report.own_patch import OWN_PATCH

# mean ± 1.96 standard deviations holds about 95 % of the images when their values are about normal.
COVERAGE = 1.96
LABEL_LIMIT = 60
BRACKETS = "Brackets give the range that holds about 95 % of the images."
ONE_MODEL = "This describes one model; it says nothing about other seeds."
ONE_RUN = "With one training run per model, this says nothing about other seeds."


def quoted(label: str) -> str:
    return f"“{shorten(label, LABEL_LIMIT)}”"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean attention distance or entropy of one model, with its spread over images."""

    label: str
    """The model."""
    layer: int
    """From 0."""
    head: int | None
    """From 0; None for the average over the layer's heads."""
    mean: float
    std: float
    """Over images. For an average over heads: the mean of the heads' deviations, which the true one cannot exceed."""
    num_images: int
    uniform: float | None = None
    """The distance of uniform attention on the layer's grid, where that is known."""

    @property
    def has_interval(self) -> bool:
        """One image has no spread: its deviation of 0 would make every difference look certain."""
        return self.num_images > 1 and bool(np.isfinite(self.std))

    @property
    def low(self) -> float:
        # Neither a distance in diagonals nor a normalised entropy leaves [0, 1].
        return max(0.0, self.mean - COVERAGE * self.std) if self.has_interval else float("nan")

    @property
    def high(self) -> float:
        return min(1.0, self.mean + COVERAGE * self.std) if self.has_interval else float("nan")

    def in_words(self) -> str:
        if not self.has_interval:
            return f"{self.mean:.3f} (no interval)"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The same quantity of two models."""

    a: Estimate
    b: Estimate

    @property
    def clear(self) -> bool:
        return self.lower is not None

    @property
    def lower(self) -> Estimate | None:
        """The clearly lower of the two: the intervals exist and do not overlap.

        Distances on different grids must be apart in diagonals and also relative to uniform attention: on a coarse grid
        even a head that ignores the image has a larger distance than on a fine one.
        """
        lower = self._lower_by(1.0, 1.0)
        if lower is None or not self.grids_differ:
            return lower
        assert self.a.uniform is not None
        assert self.b.uniform is not None
        return lower if self._lower_by(self.a.uniform, self.b.uniform) is lower else None

    @property
    def grids_differ(self) -> bool:
        return bool(self.a.uniform) and bool(self.b.uniform) and self.a.uniform != self.b.uniform

    def _lower_by(self, unit_a: float, unit_b: float) -> Estimate | None:
        # Without an interval both comparisons are with NaN, and false.
        if self.a.high / unit_a < self.b.low / unit_b:
            return self.a
        return self.b if self.b.high / unit_b < self.a.low / unit_a else None

    def verdict(self, clear_words: str) -> str:
        if self.lower is not None:
            return f"The intervals do not overlap: {clear_words.format(quoted(self.lower.label))}."
        if self._lower_by(1.0, 1.0) is not None:
            return "The intervals do not overlap, but relative to uniform attention they do: no clear difference."
        if self.a.has_interval and self.b.has_interval:
            return "The intervals overlap: no clear difference."
        return "An interval needs at least two images: no clear difference can be stated."


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What comparing two models gives: the words, the verdict, and the numbers behind both."""

    sentences: tuple[str, ...]
    """The verdict first, then the sentence of each contrast, then what the comparison cannot say."""
    clear: bool
    """Whether at least one contrast is clear and no other clear one says the opposite."""
    more_local: str | None
    """The label of the more local model, where that is clear."""
    most_local_head: Contrast
    first_layer: Contrast
    """The mean of the first layer that was measured, which need not be the model's first."""
    focus: Contrast
    """The entropy of the same layer. It says how selective attention is, not how local: the verdict leaves it out."""

    @property
    def headline(self) -> str:
        return self.sentences[0]


def most_local_head(model: ModelHeads) -> Estimate:
    """The head with the smallest mean attention distance of the whole model."""
    return _nearest(model, _existing_heads(model))


def _nearest(model: ModelHeads, rows: pd.DataFrame) -> Estimate:
    """The same, for some of its heads."""
    row = rows.iloc[int(rows["mad"].argmin())]
    return Estimate(
        label=model.label,
        layer=int(row["layer"]),
        head=int(row["head"]),
        mean=float(row["mad"]),
        std=float(row["mad_std"]),
        num_images=int(row["num_images"]),
        uniform=model.uniform_distance(int(row["layer"])),
    )


def own_patch_heads(model: ModelHeads) -> pd.DataFrame:
    """The own-patch heads of layers with several patches; none where the grid is not known."""
    rows = _existing_heads(model)
    grids = [model.grid(layer) or (1, 1) for layer in rows["layer"]]
    bounds = [OWN_PATCH * next_patch_distance(grid) if math.prod(grid) > 1 else 0.0 for grid in grids]
    return rows[rows["mad"] < bounds]


def first_layer_mean(model: ModelHeads, metric: Literal["mad", "entropy"] = "mad") -> Estimate:
    """The mean attention distance (or entropy) of the first measured layer, averaged over its heads."""
    rows = _existing_heads(model)
    rows = rows[rows["layer"] == rows["layer"].min()]
    return Estimate(
        label=model.label,
        layer=int(rows["layer"].iloc[0]),
        head=None,
        mean=float(rows[metric].mean()),
        std=float(rows[f"{metric}_std"].mean(skipna=False)),
        num_images=int(rows["num_images"].min()),
        uniform=model.uniform_distance(int(rows["layer"].iloc[0])) if metric == "mad" else None,
    )


def first_layer_name(estimates: Iterable[Estimate]) -> str:
    """What to call the layers of `first_layer_mean`: of models that were measured in part, they are not the first."""
    return "first layer" if all(estimate.layer == 0 for estimate in estimates) else "first measured layer"


def _existing_heads(model: ModelHeads) -> pd.DataFrame:
    rows = model.measured()
    rows = rows[rows["mad"].notna()]
    if rows.empty:
        raise InputError(f"{quoted(model.label)} has no measured head, so there is nothing to read")
    return rows


def compare(a: ModelHeads, b: ModelHeads) -> Reading:
    """Which of two models attends more locally, if either clearly does.

    The interval of a number is its mean ± 1.96 standard deviations over images: the range that holds about 95 % of the
    images. It is far wider than the error of the mean, so a difference called clear is large compared with the
    images' own variation.
    """
    heads = Contrast(a=most_local_head(a), b=most_local_head(b))
    layers = Contrast(a=first_layer_mean(a), b=first_layer_mean(b))
    focus = Contrast(a=first_layer_mean(a, "entropy"), b=first_layer_mean(b, "entropy"))
    # By side, not by label: comparing a model with another of the same name must not mix the two up.
    winners = {contrast.lower is contrast.a for contrast in (heads, layers) if contrast.clear}
    more, less = (layers.a, layers.b) if winners == {True} else (layers.b, layers.a)
    clear = len(winners) == 1
    first, of_a, of_b = first_layer_name((layers.a, layers.b)), _with_layer(layers.a), _with_layer(layers.b)
    return Reading(
        sentences=(
            _headline(more, less, heads, layers) if clear else _no_clear_difference(layers, contradicted=bool(winners)),
            f"The most local head of {quoted(a.label)} ({_place(heads.a)}) has a mean attention distance of "
            f"{heads.a.in_words()}, that of {quoted(b.label)} ({_place(heads.b)}) {heads.b.in_words()}. "
            + heads.verdict("{} has the more local head"),
            f"Averaged over the heads of the {first}, it is {layers.a.in_words()} for {of_a} and "
            f"{layers.b.in_words()} for {of_b}. " + layers.verdict(f"{{}} has the more local {first}"),
            f"The entropy of the {first}'s attention (1: uniform) is {focus.a.in_words()} for {of_a} "
            f"and {focus.b.in_words()} for {of_b}. " + focus.verdict("{} looks more selectively"),
            *_about_grids(layers),
            *_about_own_patches(a),
            *_about_own_patches(b),
            BRACKETS,
            ONE_RUN,
        ),
        clear=clear,
        more_local=more.label if clear else None,
        most_local_head=heads,
        first_layer=layers,
        focus=focus,
    )


def compare_with_first(models: Sequence[ModelHeads]) -> list[Reading]:
    """Every further model compared with the first one, the clearest finding first; empty for a single model."""
    return sorted((compare(models[0], model) for model in models[1:]), key=_clearness, reverse=True)


def _clearness(reading: Reading) -> int:
    """How many numbers clearly differ; none where they contradict each other."""
    return (reading.most_local_head.clear + reading.first_layer.clear) if reading.clear else 0


def _about_grids(contrast: Contrast) -> tuple[str, ...]:
    if not contrast.grids_differ:
        return ()
    a, b = contrast.a, contrast.b
    return (
        f"Their grids differ: uniform attention in the {first_layer_name((a, b))} has a distance of "
        f"{a.uniform:.3f} in {_with_layer(a)} and {b.uniform:.3f} in {_with_layer(b)}.",
    )


def _about_own_patches(model: ModelHeads) -> tuple[str, ...]:
    """A small distance suggests attention to the neighbours, which these heads do not have."""
    near = own_patch_heads(model)
    if near.empty:
        return ()
    others = _existing_heads(model).drop(near.index)
    first = _nearest(model, near)
    grid = model.grid(first.layer)
    assert grid is not None  # otherwise it would not be known
    share, step = least_share_on_itself(first.mean, grid), next_patch_distance(grid)
    words = (
        f"{_place(first).capitalize()} of {quoted(model.label)} attends to its own patch rather than its neighbours: "
        f"with the next patch at {step:.3f}, at least {100 * share:.0f} % of its attention on patches stays there."
    )
    if len(near) > 1:
        words += f" It is the most local of {len(near)} such heads."
    if len(others):
        second = _nearest(model, others)
        words += f" The most local of the others is {_place(second)}, at {second.mean:.3f}."
    return (words,)


def _headline(more: Estimate, less: Estimate, heads: Contrast, layers: Contrast) -> str:
    local, other, first = _as_measured(more), _as_measured(less), first_layer_name((more, less))
    if heads.clear and layers.clear:
        return f"{local} attends more locally than {other}."
    if heads.clear:
        return f"{local} has a more local head than {other}; their {first}s do not clearly differ."
    return f"{local} has a more local {first} than {other}; their most local heads do not clearly differ."


def _no_clear_difference(layers: Contrast, *, contradicted: bool) -> str:
    both = f"{_as_measured(layers.a)} and {_as_measured(layers.b)}"
    if contradicted:
        first = first_layer_name((layers.a, layers.b))
        return f"No clear difference between {both}: one has the more local head, the other the more local {first}."
    return f"No clear difference in locality between {both}."


def describe(model: ModelHeads) -> tuple[str, ...]:
    """One model on its own: its most local head and its first layer."""
    head, layer = most_local_head(model), first_layer_mean(model)
    images = "1 image" if head.num_images == 1 else f"{head.num_images:,} images"
    return (
        f"The most local head of {_as_measured(layer)} has a mean attention distance of {head.in_words()}.",
        f"It is {_place(head)}, measured on {images}. Averaged over the heads of "
        f"{_place(layer) if layer.layer else 'the first layer'}, the distance is {layer.in_words()}.",
        *_about_own_patches(model),
        *((BRACKETS,) if head.num_images > 1 else ()),
        ONE_MODEL,
    )


def _with_layer(first: Estimate) -> str:
    """A model's name, and which of its layers is meant, unless that is its first."""
    return quoted(first.label) + (f" ({_place(first)})" if first.layer else "")


def _as_measured(first: Estimate) -> str:
    """A model's name, and how much of it was seen: a statement about a part is none about the whole."""
    return quoted(first.label) + (f" (from {_place(first)} on)" if first.layer else "")


def _place(estimate: Estimate) -> str:
    head = "" if estimate.head is None else f", head {estimate.head + 1}"
    return f"layer {estimate.layer + 1}{head}"


def layer_table(models: Sequence[ModelHeads]) -> pd.DataFrame:
    """Per layer (counted from 1, as in the figures) and model: min and mean MAD, min and mean entropy over heads.

    Columns are pairs of label and `min_mad`, `mean_mad`, `min_entropy`, `mean_entropy`; a layer that a model does not
    have is NaN.
    """
    check_labels(models)
    tables = {}
    for model in models:
        by_layer = model.measured().groupby("layer")
        tables[model.label] = pd.DataFrame(
            {
                "min_mad": by_layer["mad"].min(),
                "mean_mad": by_layer["mad"].mean(),
                "min_entropy": by_layer["entropy"].min(),
                "mean_entropy": by_layer["entropy"].mean(),
            }
        )
    # The numbers have their own names; pandas would print a name of theirs as if it headed a column.
    table = pd.concat(tables, axis=1, names=["model", None]).sort_index()
    table.index = (table.index + 1).rename("layer")
    return table
