"""Do the runs with a factor and those without it fall into two groups, and could chance do that?

A permutation test: were the factor without any effect, the labels "with" and "without" could be dealt to the runs anew
and nothing would change. The p-value is the share of all dealings that separate the runs as far as the real one does.
All of them are counted, though not one by one: a dealing's sum is the sum of its part in one half of the runs and its
part in the other, so sorted lists of the halves' sums are enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError

Array = NDArray[np.float64]
# The most sums kept of one half; beyond it dealings are drawn at random.
MOST_SUMS = 2**22
NUM_DRAWN = 100_000
# Of many runs fewer are drawn: a dealing takes a random number for each run.
MOST_NUMBERS = 2**24
FEWEST_DRAWN = 10_000
_NUMBERS_AT_ONCE = 2**20


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Two groups of runs, the gap between them, and how surprising it is."""

    factor: str
    response: str
    num_with: int
    num_without: int
    """Runs that have the response: others, such as those whose heads could not be measured, are left out."""
    lowest_with: float
    highest_with: float
    lowest_without: float
    highest_without: float
    difference: float
    """Mean with the factor minus mean without it."""
    margin: float
    """The smallest of the upper group minus the largest of the lower: positive for a gap, negative for an overlap."""
    p: float
    """Two-sided: twice the smaller share of dealings whose difference of means is as low, or as high, as the real."""
    p_complete: float
    """The share of dealings that separate the runs completely, on either side."""
    num_dealings: int
    exact: bool
    """Whether all dealings were counted; otherwise so many were drawn at random."""
    blocks: tuple[str, ...]
    """Labels were dealt only among runs that agree in these columns."""

    @property
    def clean(self) -> bool:
        return self.margin > 0


def separation(
    runs: pd.DataFrame, factor: str, levels: Sequence[str], response: str, *, blocks: Sequence[str] = ()
) -> Separation:
    """Compare the runs at the factor's last level ("with") to those at its first ("without").

    `blocks=["seed"]` deals labels within seeds only; with the seed and all other factors, within pairs of runs that
    differ in nothing else: the strictest of the three, for it holds even where the other factors have effects.
    Runs without a number for the response are left out.
    """
    compared = runs[runs[factor].isin([levels[0], levels[-1]]) & runs[response].notna()]
    has = compared[factor].to_numpy() == levels[-1]
    values = compared[response].to_numpy(dtype=np.float64)
    if len(levels) < 2 or has.all() or not has.any():
        raise InputError(f"runs with and without {factor!r} are needed to compare them; one of the groups is empty")
    by_block = compared.groupby(list(blocks), sort=False).indices.values() if blocks else [np.arange(len(values))]
    members = [np.asarray(block) for block in by_block]
    with_, without = values[has], values[~has]
    num_dealings = math.prod(math.comb(len(block), int(has[block].sum())) for block in members)
    counts = _count_all(values, has, members)
    exact = counts is not None
    if counts is None:
        num_drawn = min(NUM_DRAWN, max(FEWEST_DRAWN, MOST_NUMBERS // len(values)))
        counts, num_counted = _count_drawn(values, has, members, num_drawn), num_drawn + 1
    else:
        num_counted = num_dealings
    return Separation(
        factor=factor,
        response=response,
        num_with=with_.size,
        num_without=without.size,
        lowest_with=float(with_.min()),
        highest_with=float(with_.max()),
        lowest_without=float(without.min()),
        highest_without=float(without.max()),
        difference=float(with_.mean() - without.mean()),
        margin=float(max(without.min() - with_.max(), with_.min() - without.max())),
        p=min(1.0, 2 * min(counts) / num_counted),
        p_complete=_count_complete(values, has, members) / num_dealings,
        num_dealings=num_counted,
        exact=exact,
        blocks=tuple(blocks),
    )


def _tolerance(values: Array) -> float:
    """Sums of the same numbers in another order differ by rounding: equal ones must count as equal."""
    return 1e-12 * float(np.abs(values).sum())


def _count_all(values: Array, has: NDArray[np.bool_], members: Sequence[NDArray[np.intp]]) -> tuple[int, int] | None:
    """How many dealings have a sum "with" at most, and at least, the real one; None where they are too many.

    Group sizes never change, so the sum of one group says the difference of the means.
    """
    halves = _two_halves(values, has, members)
    if halves is None:
        return None
    real, tolerance = float(values[has].sum()), _tolerance(values)
    at_most = at_least = 0
    for first, second in halves:
        ordered = np.sort(second)
        at_most += int(np.searchsorted(ordered, real - first + tolerance, side="right").sum())
        at_least += int((ordered.size - np.searchsorted(ordered, real - first - tolerance, side="left")).sum())
    return at_most, at_least


def _two_halves(
    values: Array, has: NDArray[np.bool_], members: Sequence[NDArray[np.intp]]
) -> list[tuple[Array, Array]] | None:
    """Pairs of lists of sums: every dealing is one sum of a pair's first list plus one of its second, exactly once."""
    if len(members) == 1:
        size, half = int(has.sum()), len(values) // 2
        if 2 ** (len(values) - half) > MOST_SUMS:
            return None
        first, second = _sums_by_size(values[:half]), _sums_by_size(values[half:])
        taken = range(max(0, size - len(second) + 1), min(size, half) + 1)
        return [(first[number], second[size - number]) for number in taken]
    shares = [(block, int(has[block].sum())) for block in sorted(members, key=len, reverse=True)]
    if not _can_be_counted(shares):
        return None
    halves = [np.zeros(1), np.zeros(1)]
    for block, size in shares:
        shorter = int(halves[1].size < halves[0].size)
        halves[shorter] = np.add.outer(halves[shorter], _sums_by_size(values[block])[size]).ravel()
    return [(halves[0], halves[1])]


def _can_be_counted(shares: Sequence[tuple[NDArray[np.intp], int]]) -> bool:
    """Whether the lists of `_two_halves` stay short enough, found out before any is made."""
    sizes = [1, 1]
    for block, size in shares:
        shorter = int(sizes[1] < sizes[0])
        sizes[shorter] *= math.comb(len(block), size)
        if max(2 ** len(block), sizes[shorter]) > MOST_SUMS:
            return False
    return True


def _sums_by_size(values: Array) -> list[Array]:
    """The sums of all subsets, by the subsets' size."""
    sums, sizes = np.zeros(1), np.zeros(1, dtype=np.int8)
    for value in values:
        sums, sizes = np.concatenate([sums, sums + value]), np.concatenate([sizes, sizes + np.int8(1)])
    return [sums[sizes == size] for size in range(len(values) + 1)]


def _count_complete(values: Array, has: NDArray[np.bool_], members: Sequence[NDArray[np.intp]]) -> int:
    """How many dealings separate the runs completely: at most that with all lowest values and that with all highest.

    Dealing within blocks, such a dealing exists only if it takes as many runs of each block as the real one.
    """
    order, size = np.argsort(values, kind="stable"), int(has.sum())
    count = 0
    for chosen, edge in ((order[:size], size), (order[-size:], len(values) - size)):
        gap = values[order[edge]] - values[order[edge - 1]]
        dealt = np.isin(np.arange(len(values)), chosen)
        count += int(gap > 0 and all(dealt[block].sum() == has[block].sum() for block in members))
    return count


def _count_drawn(
    values: Array, has: NDArray[np.bool_], members: Sequence[NDArray[np.intp]], num_drawn: int
) -> tuple[int, int]:
    """As `_count_all`, over random dealings and the real one."""
    shares = tuple((len(block), int(has[block].sum())) for block in members)
    by_block = values[np.concatenate(members)]
    sums = np.empty(num_drawn)
    at_once = max(1, _NUMBERS_AT_ONCE // len(values))
    for start in range(0, num_drawn, at_once):
        some = _dealings(shares, num_drawn)[start : start + at_once]
        sums[start : start + at_once] = np.unpackbits(some, axis=1, count=len(values)).astype(np.float64) @ by_block
    real, tolerance = float(values[has].sum()), _tolerance(values)
    return 1 + int((sums <= real + tolerance).sum()), 1 + int((sums >= real - tolerance).sum())


@lru_cache(maxsize=4)
def _dealings(shares: tuple[tuple[int, int], ...], num_drawn: int) -> NDArray[np.uint8]:
    """Which runs are "with" in random dealings, a row of bits per dealing; `shares`: per block, (runs, runs "with").

    They are the same for every factor and response that has such blocks, so they are drawn once.
    """
    random = np.random.default_rng(0)
    chosen = np.zeros((num_drawn, sum(length for length, _ in shares)), dtype=np.bool_)
    first = 0
    for length, size in shares:
        at_once = max(1, _NUMBERS_AT_ONCE // length)
        for start in range(0, num_drawn, at_once):
            keys = random.random((min(at_once, num_drawn - start), length))
            if size > 0:  # those with the smallest keys
                last = np.partition(keys, size - 1, axis=1)[:, size - 1 : size]
                chosen[start : start + at_once, first : first + length] = keys <= last
        first += length
    return np.packbits(chosen, axis=1)
