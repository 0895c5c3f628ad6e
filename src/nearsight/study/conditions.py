"""What conditions are called: after what they add to the base, or leave out of the whole, or after what they are."""

from collections.abc import Mapping, Sequence

from nearsight.study.factors import OFF, Factor


def condition_name(factors: Sequence[Factor], levels: Mapping[str, str], ends: tuple[str, str]) -> str:
    """The name of a level combination; no two of a study share one.

    `ends` are all factors at the first and at the last level. Between them, one factor that is on is +A, one that is
    off −B, anything else A+B. Of one factor alone the levels say it. Where a factor chooses among things that have
    names, such as networks, a condition is one of them with what is on: "ResNet-18, tiles 4×4".
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
    at_end = all(levels[factor.name] == factor.labels[-1] for factor in on)
    if not off and at_end:
        return full
    if any(map(_is_choice, factors)):
        return ", ".join(
            levels[factor.name] if _is_choice(factor) else _named(factor, levels)
            for factor in factors
            if _is_choice(factor) or factor in on
        )
    if len(on) == 1:
        return f"+{_named(on[0], levels)}"
    if len(off) == 1 and at_end:
        return f"−{off[0].title}"
    return "+".join(_named(factor, levels) for factor in on)


def _is_choice(factor: Factor) -> bool:
    """Whether none of its levels is the absence of the others, and all were given names."""
    return factor.are_labels_given and OFF not in factor.changes


def _named(factor: Factor, levels: Mapping[str, str]) -> str:
    """A factor that is on; where it can be on in several ways, in which."""
    return factor.title if len(factor.labels) == 2 else f"{factor.title} {levels[factor.name]}"
