"""The sizes that a user asks for, looked at before anything takes its time."""

import math
from collections.abc import Sequence

from nearsight.errors import InputError, check_at_least
from nearsight.locat import Grid


def check_counts(name: str, counts: Sequence[int]) -> None:
    """Each makes a row: there must be one, and none that leaves nothing to do."""
    if not counts:
        raise InputError(f"{name} is empty; give at least one number, or leave it out")
    for count in counts:
        check_at_least(name, count, 1)


def check_sizes(num_tokens: Sequence[int], batch_sizes: Sequence[int]) -> None:
    """Numbers of tokens that a square image has, with a batch size for each."""
    check_counts("num_tokens", num_tokens)
    for tokens in num_tokens:
        grid_of(tokens)
    check_counts("batch_sizes", batch_sizes)
    if len(batch_sizes) != len(num_tokens):
        raise InputError(f"num_tokens has {len(num_tokens)} numbers and batch_sizes {len(batch_sizes)}; give as many")


def grid_of(num_tokens: int) -> Grid:
    """Where CLS and a square of patches lie."""
    side = math.isqrt(max(0, num_tokens - 1))
    if side < 1 or 1 + side * side != num_tokens:
        raise InputError(f"{num_tokens} tokens are not CLS and a square of patches: take 197, 1025 or 4097, say")
    return Grid(side, side, 1)
