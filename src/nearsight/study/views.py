"""Parts of a factorial study that answer one question each, as level combinations (factor → label)."""

from collections.abc import Mapping, Sequence

Factors = Mapping[str, Sequence[str]]
"""Factor → the labels of its levels; the first is the base, the last is all the way on."""


def add_one(factors: Factors) -> list[dict[str, str]]:
    """What does each factor do by itself? The base, then each factor alone at each of its other levels."""
    base = {name: labels[0] for name, labels in factors.items()}
    return [base, *({**base, name: label} for name, labels in factors.items() for label in labels[1:])]


def leave_one_out(factors: Factors) -> list[dict[str, str]]:
    """What is each factor needed for? All factors on, then each of them alone at its base."""
    full = {name: labels[-1] for name, labels in factors.items()}
    return [full, *({**full, name: labels[0]} for name, labels in factors.items())]
