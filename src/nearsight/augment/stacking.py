"""Which lists of augmentations can be stacked."""

import itertools
from collections.abc import Sequence

from nearsight.augment import AUGMENTATIONS, Augmentation

_PLACE = {name: place for place, name in enumerate(AUGMENTATIONS)}


def stack_key(augmentations: Sequence[Augmentation]) -> tuple[object, ...]:
    """Lists with equal keys can be stacked: what they share is the same, and one order keeps the order of each.

    The key holds only what is unusual, so that a list with an augmentation stacks with one without it.
    """
    settings = frozenset(
        (augmentation.name, field, value)
        for augmentation in augmentations
        for field in augmentation.shared
        if (value := getattr(augmentation, field)) != getattr(type(augmentation), field)  # the default
    )
    # All lists of a key have these pairs, and every other pair in the usual order: orders cannot contradict each other.
    turned = frozenset(
        (first.name, second.name)
        for first, second in itertools.combinations(augmentations, 2)
        if _usual_place(first) > _usual_place(second)
    )
    return settings, turned


def _usual_place(augmentation: Augmentation) -> tuple[int, int, str]:
    return augmentation.stage, _PLACE.get(augmentation.name, len(_PLACE)), augmentation.name
