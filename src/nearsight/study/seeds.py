"""Seeds of a study: so many, or certain ones."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from nearsight.errors import check_at_least
from nearsight.randomness import different_seeds


def listed(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Every seed. A number says how many, from 0 on. NumPy's whole numbers, and arrays of them, will do."""
    given: Any = seeds
    if not isinstance(given, bool) and isinstance(given, Integral):
        number = int(given)
        check_at_least("seeds", number, 1)
        return tuple(range(number))
    return different_seeds(given, needed="how many, or which: whole numbers")
