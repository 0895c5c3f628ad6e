"""Seeds of a study: so many, or certain ones."""

from collections.abc import Sequence

from nearsight.errors import InputError, check_at_least


def listed(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Every seed. A number says how many, from 0 on."""
    if isinstance(seeds, int):
        check_at_least("seeds", seeds, 1)
        return tuple(range(seeds))
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds are {list(seeds)}, but must be some different numbers")
    return tuple(seeds)
