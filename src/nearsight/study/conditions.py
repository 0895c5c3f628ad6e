"""What conditions are called: after what they add to the base, or leave out of the whole, or after what they are."""

from collections.abc import Mapping, Sequence
from typing import Final

from nearsight.study.factors import OFF, Factor

ENDS: Final = ("base", "all")
"""The conditions with all factors at their first and at their last level, where nobody says what they are called."""
_ABSENT = ("off", "0", "none")
"""Labels of values that are the absence of the others."""


def condition_name(factors: Sequence[Factor], levels: Mapping[str, str], ends: tuple[str, str]) -> str:
    """The name of a level combination; no two of a study share one.

    `ends` are all factors at the first and at the last level. Between them, one factor that is on is +A, one that is
    off −B, anything else A+B. Of one factor alone the levels say it. Where a factor chooses among things that have
    names, such as networks, a condition is one of them with what is on: "ResNet-18, tiles 4×4". Where one chooses
    among values, nothing is left out of a whole, and a value that is not the base's is told: "lr 0.0003+CutMix".
    """
    if len(factors) == 1:
        (factor,) = factors
        label = levels[factor.name]
        return label if factor.are_labels_given else f"{factor.title} {label}"
    base, full = ends
    on = [factor for factor in factors if levels[factor.name] != factor.labels[0]]
    off = [factor for factor in factors if levels[factor.name] == factor.labels[0]]
    if not on:
        return base
    has_values = any(map(_is_value, factors))
    at_end = all(levels[factor.name] == factor.labels[-1] for factor in on)
    if not off and at_end and not (has_values and full == ENDS[1]):
        return full
    if any(map(_is_choice, factors)):
        return ", ".join(
            levels[factor.name] if _is_choice(factor) else _named(factor, levels)
            for factor in factors
            if _is_choice(factor) or factor in on
        )
    if len(on) == 1:
        return f"+{_named(on[0], levels)}"
    if len(off) == 1 and at_end and not has_values:
        return f"−{off[0].title}"
    return "+".join(_named(factor, levels) for factor in on)


def _is_choice(factor: Factor) -> bool:
    """Whether none of its levels is the absence of the others, and all were given names."""
    return factor.are_labels_given and OFF not in factor.changes


def _is_value(factor: Factor) -> bool:
    """Whether its base is a value as good as the others, such as a learning rate or all images, and not their absence.

    What is off is a value only where someone gave it a name, and where it is settings that the others change: without
    an augmentation there is none, whatever that is called.
    """
    others_are_settings = all(isinstance(change, Mapping) for change in factor.changes if change is not OFF)
    is_off = factor.changes[0] is OFF and not (factor.are_labels_given and others_are_settings)
    return not _is_choice(factor) and not is_off and factor.labels[0] not in _ABSENT


def _named(factor: Factor, levels: Mapping[str, str]) -> str:
    """A factor that is on; where it can be on in several ways, or is a value, in which."""
    is_enough = len(factor.labels) == 2 and not _is_value(factor)
    return factor.title if is_enough else f"{factor.title} {levels[factor.name]}"
