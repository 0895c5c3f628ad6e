"""What the numbers of measured models say, in plain words.

Every sentence is computed, and none says more than the numbers do: a difference is stated where its whole interval is
beyond the smallest one that matters, how the images spread is never taken for how certain their mean is, and one
training run per model never for a statement about the recipe.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from nearsight.metrics import least_share_on_itself, next_patch_distance
from nearsight.report.differences import (
    SMALLEST,
    Difference,
    Quantity,
    differ,
    existing_heads,
    first_layer_mean,
    first_layer_name,
    most_local_head,
    quoted,
)
from nearsight.report.inputs import ModelHeads, check_labels
from nearsight.report.own_patch import OWN_PATCH
from nearsight.report.tables import rounded

SPREAD = "The spread over images holds about 95 % of them; it does not say how certain a mean is."
ONE_MODEL = "This describes one model; it says nothing about other seeds."
ONE_RUN = "With one training run per model, this says nothing about other seeds."
ALIKE = 0.03
"""As close to uniform attention as random weights are: those of ViT, DeiT-3, DINOv2, EVA-02, BEiT, Swin, PVT and
torchvision's ViT have distances within 0.025 of it and entropies above 0.977; every trained model that was measured has
at least one head beyond."""
_ENDS = {
    "small": f"less than {SMALLEST}, too little to be called a difference",
    "perhaps small": f"there is a difference, but perhaps of less than {SMALLEST}",
    "not shown": "the interval includes 0, so no difference is shown",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What comparing two models gives: the words, the verdict, and the numbers behind both."""

    sentences: tuple[str, ...]
    """The verdict first, then the sentence of each difference, then what the comparison cannot say."""
    clear: bool
    """Whether at least one difference of distances is clear and no other clear one says the opposite."""
    more_local: str | None
    """The label of the more local model, where that is clear."""
    most_local_head: Difference
    first_layer: Difference
    """The mean of the first layer that was measured, which need not be the model's first."""
    focus: Difference
    """The entropy of the same layer. It says how selective attention is, not how local: `clear` leaves it out."""

    @property
    def headline(self) -> str:
        return self.sentences[0]

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        return sentences_html(self.sentences)

    def as_json(self) -> dict[str, Any]:
        """The verdict and the numbers, for machines; differences are those of the first model minus the second."""
        return {
            "models": [self.first_layer.a.label, self.first_layer.b.label],
            "clear": self.clear,
            "more_local": self.more_local,
            "most_local_head": self.most_local_head.as_json(),
            "first_layer": self.first_layer.as_json(),
            "first_layer_entropy": self.focus.as_json(),
        }


def sentences_html(sentences: Sequence[str]) -> str:
    """For notebooks, light or dark: the first sentence stands out."""
    first, *others = map(escape, sentences)
    return "".join(f'<p style="margin:.4em 0">{words}</p>' for words in (f"<strong>{first}</strong>", *others))


def own_patch_heads(model: ModelHeads) -> pd.DataFrame:
    """The own-patch heads of layers with several patches; none where the grid is not known."""
    rows = existing_heads(model)
    grids = [model.grid(layer) or (1, 1) for layer in rows["layer"]]
    bounds = [OWN_PATCH * next_patch_distance(grid) if math.prod(grid) > 1 else 0.0 for grid in grids]
    return rows[rows["mad"] < bounds]


def compare(a: ModelHeads, b: ModelHeads) -> Reading:
    """Which of two models attends more locally, if either clearly does.

    Models with images in common are compared image by image: the mean of the differences with Student's t interval.
    Others by their means, with Welch's. A difference is clear where its whole 95 % interval is beyond `SMALLEST`.
    """
    heads = differ(most_local_head(a), most_local_head(b))
    layers = differ(first_layer_mean(a), first_layer_mean(b))
    focus = differ(first_layer_mean(a, "entropy"), first_layer_mean(b, "entropy"))
    # By side, not by label: comparing a model with another of the same name must not mix the two up.
    winners = {difference.lower is difference.a for difference in (heads, layers) if difference.clear}
    first, of_a, of_b = first_layer_name((layers.a, layers.b)), _with_layer(layers.a), _with_layer(layers.b)
    more = layers.a if winners == {True} else layers.b
    return Reading(
        sentences=(
            _headline(heads, layers, focus),
            f"The most local head of {quoted(a.label)} ({_place(heads.a)}) has a mean attention distance of "
            f"{heads.a.in_words()}, that of {quoted(b.label)} ({_place(heads.b)}) {heads.b.in_words()}. "
            + _in_words(heads, "{} has the more local head"),
            f"Averaged over the heads of the {first}, it is {layers.a.in_words()} for {of_a} and "
            f"{layers.b.in_words()} for {of_b}. " + _in_words(layers, f"{{}} has the more local {first}"),
            f"The entropy of the {first}'s attention (1: uniform) is {focus.a.in_words()} for {of_a} "
            f"and {focus.b.in_words()} for {of_b}. " + _in_words(focus, "{} attends more selectively"),
            *_about_grids(layers),
            *_about_choice(heads),
            *_about_own_patches(a),
            *_about_own_patches(b),
            *_about_uniform_heads(a),
            *_about_uniform_heads(b),
            *_about_images(focus),
            SPREAD,
            ONE_RUN,
        ),
        clear=len(winners) == 1,
        more_local=more.label if len(winners) == 1 else None,
        most_local_head=heads,
        first_layer=layers,
        focus=focus,
    )


def _in_words(difference: Difference, clear_words: str) -> str:
    """How far the two differ, and what follows from it."""
    found, kind = difference.estimate, difference.kind
    if kind == "no interval":
        return f"They differ by {abs(found.value):.3f}; an interval needs at least two images, so nothing can be said."
    lower, sign = (difference.a, -1) if found.value < 0 else (difference.b, 1)
    low, high = sorted((sign * found.low, sign * found.high))
    # On images that all agree to the last digit there is nothing to divide by.
    effect = f", {abs(difference.effect):.1f} standard deviations" if math.isfinite(difference.effect) else ""
    interval = f"(95 % interval {rounded(low)} to {rounded(high)}{effect})"
    words = f"Neither is lower {interval}: "
    if round(found.value, 3):
        share = "" if difference.agreeing is None else f", in {100 * difference.agreeing:.0f} % of the images"
        words = f"In {quoted(lower.label)} it is lower by {rounded(abs(found.value))} {interval}{share}: "
    if kind == "clear":
        return f"{words}{clear_words.format(quoted(lower.label))}."
    if kind == "clear but for the grids":
        scaled = difference.scaled
        assert scaled is not None
        low, high = sorted((sign * scaled.low, sign * scaled.high))
        return (
            f"{words}but by {rounded(sign * scaled.value)} ({rounded(low)} to {rounded(high)}) with both scaled to the "
            "same distance of uniform attention, so no clear difference."
        )
    return f"{words}{_ENDS[kind]}."


def _headline(heads: Difference, layers: Difference, focus: Difference) -> str:
    """What is most worth knowing: which model is more local or, where neither is, which is more selective."""
    names = [_as_measured(layers.a), _as_measured(layers.b)]
    first = first_layer_name((layers.a, layers.b))
    if heads.clear and layers.clear:
        of_head, of_layer = (difference.lower is difference.a for difference in (heads, layers))
        more, less = names if of_head else reversed(names)
        if of_head == of_layer:
            return f"{more} attends more locally than {less}."
        return f"{more} has the more local head, {less} the more local {first}."
    if heads.clear or layers.clear:
        found, other = (heads, layers) if heads.clear else (layers, heads)
        more, less = names if found.lower is found.a else reversed(names)
        what, others = ("head", f"{first}s") if heads.clear else (first, "most local heads")
        but = f"differ by less than {SMALLEST}" if other.kind == "small" else "do not clearly differ"
        return f"{more} has a more local {what} than {less}; their {others} {but}."
    if heads.kind == layers.kind == "small":
        words = f"In locality {names[0]} and {names[1]} differ by less than {SMALLEST} of the diagonal"
    else:
        words = f"No clear difference in locality between {names[0]} and {names[1]}"
    if focus.lower is None:
        return f"{words}."
    return f"{words}; {quoted(focus.lower.label)} attends more selectively in its {first}."


def compare_with_first(models: Sequence[ModelHeads]) -> list[Reading]:
    """Every further model compared with the first one, the clearest finding first; empty for a single model."""
    return sorted((compare(models[0], model) for model in models[1:]), key=_clearness, reverse=True)


def _clearness(reading: Reading) -> tuple[int, bool]:
    """How many distances clearly differ, none where they contradict each other; and whether the entropies do."""
    distances = (reading.most_local_head.clear + reading.first_layer.clear) if reading.clear else 0
    return distances, reading.focus.clear


def _about_images(difference: Difference) -> tuple[str, ...]:
    """Which images the differences are over, and how they were found."""
    if not difference.estimate.has_interval:
        return ()
    if difference.is_paired:
        images = f"{difference.estimate.n:,} images that both models were measured on"
        return (
            f"Differences are means over {images}, image by image, with Student's t intervals; they are also given in "
            "standard deviations of the differences.",
        )
    unknown = [quoted(one.label) for one in (difference.a, difference.b) if one.values is None]
    why = "The models were measured on different images, which may be what differs"
    if unknown:
        why = f"What {' and '.join(unknown)} did on single images is not known"
    return (f"{why}: differences are those of the means, not image by image, with Welch's t intervals.",)


def _about_choice(difference: Difference) -> tuple[str, ...]:
    """A head that other images would not have chosen."""
    unsettled = [quoted(one.label) for one in (difference.a, difference.b) if not one.is_settled]
    if not unsettled:
        return ()
    return (
        f"Which head of {' and of '.join(unsettled)} is the most local depends on the images: the difference is of the "
        "heads that each half of the images chooses, on the other half.",
    )


def _about_grids(difference: Difference) -> tuple[str, ...]:
    if difference.scaled is None:
        return ()
    a, b = difference.a, difference.b
    return (
        f"Their grids differ: uniform attention in the {first_layer_name((a, b))} has a distance of "
        f"{a.uniform:.3f} in {_with_layer(a)} and {b.uniform:.3f} in {_with_layer(b)}.",
    )


def _about_own_patches(model: ModelHeads) -> tuple[str, ...]:
    """A small distance suggests attention to the neighbours, which these heads do not have."""
    near = own_patch_heads(model)
    if near.empty:
        return ()
    others = existing_heads(model).drop(near.index)
    first = most_local_head(model, near)
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
        second = most_local_head(model, others)
        words += f" The most local of the others is {_place(second)}, at {second.mean:.3f}."
    return (words,)


def is_uniform(model: ModelHeads) -> bool:
    """Whether no head can be distinguished from uniform attention, as with random weights; False where not known."""
    rows = existing_heads(model)
    known = {layer: model.uniform_distance(layer) for layer in model.layers()}
    away = rows["mad"] - rows["layer"].map(known).astype(float)  # NaN where it is not known
    return bool((away.abs() <= ALIKE).all() and (rows["entropy"] >= 1 - ALIKE).all())


def _about_uniform_heads(model: ModelHeads) -> tuple[str, ...]:
    if not is_uniform(model):
        return ()
    return (
        f"{quoted(model.label)} is indistinguishable from uniform attention: are these weights random?",
        f"Did you mean --pretrained (in Python: pretrained=True)? Every head's distance is within {ALIKE} of that of "
        f"uniform attention, and its entropy within {ALIKE} of 1.",
    )


def _about_scale(head: Quantity, grid: tuple[int, int] | None) -> tuple[str, ...]:
    """What the number of a model's most local head means: where it is between the least there can be and uniform."""
    if not head.uniform:
        return ()
    patches = "" if grid is None else f" ({grid[0]} × {grid[1]} patches)"
    step = "" if grid is None else f", one that attends to the next patch {next_patch_distance(grid):.3f}"
    return (
        f"In its layer{patches} a head that attends to its own patch alone has a distance of 0{step}, and uniform "
        f"attention {head.uniform:.3f} with an entropy of 1, which is about what random weights give: this head has "
        f"{100 * head.mean / head.uniform:.0f} % of the distance of uniform attention.",
    )


def describe(model: ModelHeads) -> tuple[str, ...]:
    """One model on its own: its most local head and its first layer, and what these numbers mean."""
    head, layer = most_local_head(model), first_layer_mean(model)
    images = "1 image" if head.num_images == 1 else f"{head.num_images:,} images"
    return (
        *_about_uniform_heads(model),
        f"The most local head of {_as_measured(layer)} has a mean attention distance of {head.in_words()}.",
        f"It is {_place(head)}, measured on {images}. Averaged over the heads of "
        f"{_place(layer) if layer.layer else 'the first layer'}, the distance is {layer.in_words()}.",
        *_about_scale(head, model.grid(head.layer)),
        *_about_own_patches(model),
        *((SPREAD,) if head.num_images > 1 else ()),
        ONE_MODEL,
    )


def _with_layer(first: Quantity) -> str:
    """A model's name, and which of its layers is meant, unless that is its first."""
    return quoted(first.label) + (f" ({_place(first)})" if first.layer else "")


def _as_measured(first: Quantity) -> str:
    """A model's name, and how much of it was seen: a statement about a part is none about the whole."""
    return quoted(first.label) + (f" (from {_place(first)} on)" if first.layer else "")


def _place(quantity: Quantity) -> str:
    """As in heads.csv, where both count from 0."""
    head = "" if quantity.head is None else f", head {quantity.head}"
    return f"layer {quantity.layer}{head}"


def layer_table(models: Sequence[ModelHeads]) -> pd.DataFrame:
    """Per layer (counted from 0, as in heads.csv) and model: min and mean MAD, min and mean entropy over heads.

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
    return table.rename_axis(index="layer")
