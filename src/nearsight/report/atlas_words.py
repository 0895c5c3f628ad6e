"""What an atlas says in sentences."""

from collections.abc import Mapping, Sequence

import numpy as np

from nearsight.report.atlas import AtlasModel, trained_of
from nearsight.report.differences import SMALLEST, differ, quoted
from nearsight.report.tables import difference_in_words, rounded, share

_OWN_PATCH = 0.5
"""Share of a head's attention on its own patch from which on the sentences call it an own-patch head."""
_EARLY = 1 / 3
"""Of the depth."""


def headline(models: Sequence[AtlasModel]) -> str:
    """Where the most local heads are, beside those of random weights."""
    trained, random = trained_of(models), [model for model in models if model.kind == "random"]
    found = _span(sorted(model.most_local.mean for model in trained))
    whose = (
        f"head of {quoted(trained[0].label)}: {found}"
        if len(trained) == 1
        else f"heads: {found} in {len(trained)} models"
    )
    text = f"Mean attention distance of the most local {whose}"
    if random and trained != random:
        text += f", {_span(sorted(model.most_local.mean for model in random))} with random weights"
    return text + "."


def sentences(models: Sequence[AtlasModel]) -> list[str]:
    """What the atlas says beside its headline, the most important first."""
    trained = trained_of(models)
    said = [_of_most_local(trained, {model.label: model for model in models}), _of_own_patch(trained)]
    said += [_of_depth(trained), _of_registers(trained), _of_sinks(trained), *_of_preparations(models)]
    return [text for text in said if text]


def _span(values: Sequence[float]) -> str:
    low, high = f"{values[0]:.3f}", f"{values[-1]:.3f}"
    return low if low == high else f"{low} to {high}"


def _of_most_local(trained: Sequence[AtlasModel], by_label: Mapping[str, AtlasModel]) -> str:
    text = ""
    if len(trained) > 1:
        low, *_, high = sorted(trained, key=lambda model: model.most_local.mean)
        text = f"The lowest is that of {quoted(low.label)}, the highest that of {quoted(high.label)}. "
    twins = [(model, by_label.get(model.beside or "")) for model in trained]
    pairs = [(model, twin) for model, twin in twins if twin is not None]
    lower = [pair for pair in pairs if differ(pair[0].most_local, pair[1].most_local).estimate.high < 0]
    if pairs:
        text += (
            f"In {len(lower)} of {len(pairs)} models it is lower than with random weights, picture by picture, and the "
            "interval excludes 0."
        )
    return text.strip()


def _of_own_patch(trained: Sequence[AtlasModel]) -> str:
    shares = {model.label: model.table.extra["share_self"] for model in trained if "share_self" in model.table.extra}
    if not shares:
        return ""
    having, lacking = [], []
    for label, values in shares.items():
        layer, head = np.unravel_index(np.nanargmax(values), values.shape)
        most = float(values[layer, head])
        if most >= _OWN_PATCH:
            having.append(f"{quoted(label)} (layer {layer}, head {head}: {share(most)})")
        else:
            lacking.append(f"{quoted(label)} {share(most)}")
    text = (
        f"Heads that pay half of their attention or more to their own patch: in {len(having)} of {len(shares)} models"
    )
    text += f", {', '.join(having)}." if having else "."
    return text + (f" The most that a head pays to it in the others: {', '.join(lacking)}." if lacking else "")


def _of_depth(trained: Sequence[AtlasModel]) -> str:
    late = [
        f"{quoted(model.label)}, layer {model.heads.layers()[model.most_local_layer()]} of {len(model.table.mad)}"
        for model in trained
        if model.most_local_layer() > _EARLY * (len(model.table.mad) - 1)
    ]
    return (
        "The layer whose heads have the lowest mean distance lies in the first third of the depth in "
        f"{len(trained) - len(late)} of {len(trained)} models"
        + (f"; not in {'; '.join(late)} (from 0)." if late else ".")
    )


def _of_registers(trained: Sequence[AtlasModel]) -> str:
    found = []
    for model in trained:
        values = model.table.extra.get("share_registers")
        if values is not None and np.nanmax(values) > 0:
            by_layer = np.nanmean(values, axis=1)
            layer = int(np.argmax(by_layer))
            found.append(f"{share(float(by_layer[layer]))} in layer {layer} of {quoted(model.label)}")
    return f"Registers get up to {', '.join(found)}, over the heads of a layer." if found else ""


def _of_sinks(trained: Sequence[AtlasModel]) -> str:
    """Whether single patches that receive much, or have large norms, are what the distances come from."""
    moved, least = [], []
    for model in trained:
        if (changes := model.sink_changes) is None:
            continue
        most, local = changes
        if abs(most.estimate.value) < SMALLEST:
            least.append(abs(most.estimate.value))
            continue
        by, of_local = (difference_in_words(change.estimate) for change in (most, local))
        text = (
            f"in {quoted(model.label)} the distance of layer {most.layer}, head {most.head} changes by {by}, that of "
            f"the most local head by {of_local}"
        )
        if "outlier_share" in model.table.extra:
            outliers = float(np.nanmax(model.table.extra["outlier_share"]))
            text += f", and up to {share(outliers)} of the patches are outliers by the norm of their token"
        moved.append(text)
    if not moved and not least:
        return ""
    start = "Without sinks, single patches that receive more than ten times the mean: "
    no_head = f"no head changes by more than {rounded(max(least))}" if least else ""
    if not moved:
        return f"{start}{no_head}."
    return f"{start}{'; '.join(moved)}{f'. In the others {no_head}' if least else ''}."


def _of_preparations(models: Sequence[AtlasModel]) -> list[str]:
    by_label = {model.label: model for model in models}
    changed: dict[str, list[float]] = {}
    for model in models:
        if model.kind == "preparation" and model.beside in by_label:
            own = by_label[model.beside].most_local.mean
            changed.setdefault(model.beside, [own]).append(model.most_local.mean)
    return [
        f"Preparation counts: on the same pictures the most local head of {quoted(label)} has {values[0]:.3f} with the "
        f"model’s own mean and standard deviation, and {min(values[1:]):.3f} to {max(values[1:]):.3f} with others."
        for label, values in changed.items()
    ]
