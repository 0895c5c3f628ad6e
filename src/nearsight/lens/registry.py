"""All that can be measured beside distance and entropy."""

from collections.abc import Sequence

from nearsight.errors import InputError, unknown_name
from nearsight.lens.distribution import DistanceMass
from nearsight.lens.features import Features
from nearsight.lens.gaussian import Gaussians
from nearsight.lens.measurement import Measurement
from nearsight.lens.offsets import Offsets
from nearsight.lens.shares import Shares

MEASUREMENTS: dict[str, type[Measurement]] = {
    "shares": Shares,
    "quantiles": DistanceMass,
    "offsets": Offsets,
    "features": Features,
    "gaussians": Gaussians,
}
"""What `measure(what=…)` takes."""

WHAT: dict[str, str] = {
    "shares": "per head: shares of attention on the patch itself, its 8 neighbours, CLS and registers",
    "quantiles": "per head: at which distances attention is paid (quantiles of the distribution whose mean is MAD)",
    "offsets": "per head: how much attention is paid at each step from the patch, up, down and sideways (a picture)",
    "features": "per layer: locality score and patch-CLS similarity of its tokens",
    "gaussians": "per head of a LocAt model: width and strength of its Gaussians",
    "cka": "between layers, of one model or two: linear CKA of their tokens",
    "rollout": "per picture: attention rollout from CLS to the patches",
    "positions": "per patch: whether its learned position is most alike to those of its neighbours",
}
"""All there is, with a line about each. The last three are no columns of a table of heads, and have functions of their
own: `layer_similarity`, `attention_rollout` and `position_gram`."""

_ELSEWHERE = {"cka": "layer_similarity", "rollout": "attention_rollout", "positions": "position_gram"}


def chosen(what: Sequence[str]) -> list[type[Measurement]]:
    """The measurements with these names, each once."""
    if isinstance(what, str):
        raise InputError(f"what is a list of names, not {what!r}; give [{what!r}]")
    for name in what:
        if name in _ELSEWHERE:
            raise InputError(f"{name!r} is not measured per head; use nearsight.lens.{_ELSEWHERE[name]}")
        if name not in MEASUREMENTS:
            raise unknown_name("measurement", name, WHAT)
    return [MEASUREMENTS[name] for name in dict.fromkeys(what)]
