"""All that can be measured beside distance and entropy: what registers itself, and what has a function of its own."""

from collections.abc import Sequence

from nearsight.errors import InputError, unknown_name
from nearsight.lens import distribution, features, gaussian, offsets, shares  # noqa: F401 (each registers itself)
from nearsight.lens.measurement import MEASUREMENTS, WHAT, Measurement

_ELSEWHERE = {
    "cka": ("layer_similarity", "between layers, of one model or two: linear CKA of their tokens"),
    "rollout": ("attention_rollout", "per picture: attention rollout from CLS to the patches"),
    "positions": (
        "position_gram",
        "per patch: whether its learned position is most alike to those of its neighbours",
    ),
}
"""What is no column of a table of heads → its function in `nearsight.lens`, and a line about it."""
WHAT.update({name: about for name, (_, about) in _ELSEWHERE.items()})


def chosen(what: Sequence[str]) -> list[type[Measurement]]:
    """The measurements with these names, each once."""
    if isinstance(what, str):
        raise InputError(f"what is a list of names, not {what!r}; give [{what!r}]")
    for name in what:
        if name in _ELSEWHERE:
            raise InputError(f"{name!r} is not measured per head; use nearsight.lens.{_ELSEWHERE[name][0]}")
        if name not in MEASUREMENTS:
            raise unknown_name("measurement", name, WHAT)
    return [MEASUREMENTS[name] for name in dict.fromkeys(what)]
