"""Seeds of a study: so many, or certain ones."""

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from nearsight.errors import InputError, check_at_least, check_number


def listed(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Every seed. A number says how many, from 0 on. NumPy's whole numbers, and arrays of them, will do."""
    given: Any = seeds
    if not isinstance(given, bool) and isinstance(given, Integral):
        number = int(given)
        check_at_least("seeds", number, 1)
        return tuple(range(number))
    return _plain(given)


def _plain(seeds: Any) -> tuple[int, ...]:
    """As Python's own numbers, since they become part of files."""
    try:
        found = tuple(map(operator.index, seeds))
    except TypeError as error:
        raise InputError(f"seeds are {seeds!r}, but must be how many, or which: whole numbers") from error
    if not found or len(set(found)) < len(found):
        raise InputError(f"seeds are {list(found)}, but must be some different numbers")
    for seed in found:
        check_number("a seed", seed)
    return found
