"""The table of `permuted-cifar100`: what a fixed shuffling of tiles costs each network, beside the paper's."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions import shuffling
from nearsight.report.study.positions.shuffling import POOLED, num_tiles
from nearsight.report.study.table import Table, rounded, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval


def permutation_table(results: StudyResults) -> Table:
    """A row per network and number of tiles: accuracy, what shuffling changes, and how much more than in the ViT."""
    rows, shown = [], []
    for network in results.factors["model"]:
        for tiles in results.factors["tiles"]:
            accuracy = shuffling.accuracy(results, network, tiles)
            if not accuracy.n:
                continue
            is_shuffled = tiles != s3.UNSHUFFLED
            change = _interval(partial(shuffling.change, results, network, tiles), wanted=is_shuffled)
            beside = is_shuffled and network != s3.VIT
            excess = _interval(partial(shuffling.excess, results, network, s3.VIT, tiles), wanted=beside)
            papers, papers_change = _papers(network, tiles)
            named: dict[str, object] = {"network": network, "tiles": tiles, "seeds": accuracy.n}
            numbers = {"test_acc": accuracy, "change": change, "change_beyond_vit": excess}
            published = {"paper_test_acc": papers, "paper_change": papers_change}
            rows.append({**named, "scale": results.scale, **_flat(numbers), **published})
            shown.append(
                {
                    **named,
                    "test accuracy, %": with_interval(accuracy, scale=100, digits=2),
                    "paper's accuracy": _whole(papers),
                    f"change from {s3.UNSHUFFLED}, points": points(change),
                    "paper's change": _whole(papers_change, signed=True),
                    f"change beyond that of {s3.VIT}, points": points(excess),
                }
            )
    if not rows:
        raise InputError("none of its networks has a run yet")
    first = f"{s3.FIRST_TILES}×{s3.FIRST_TILES}"
    return Table(
        name="permutation",
        title=f"{results.name}: what a fixed shuffling of tiles costs each network",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(
            f"{POOLED} The table of conditions takes each by itself, which few seeds hardly allow.",
            "Changes are taken within seeds, of those that have both runs.",
            f"The paper's numbers are the ends of its curves, read off: {first} tiles, which stand here beside "
            f"{s3.UNSHUFFLED}, and {s3.LAST_TILES}×{s3.LAST_TILES}. How long its networks trained is not "
            "known to us; ours train for few epochs, so that the sign of a change can be compared, its size cannot. "
            f"Its third network, VGG, goes from {ends(s3.CURVES['VGG'])}.",
            f"{s3.PIXELS} tiles are single pixels, finer than patches: there heads have no distances to measure.",
            *missing_notes(results),
        ),
    )


def _papers(network: str, tiles: str) -> tuple[float | None, float | None]:
    """Its accuracy and its change, where its curve has an end there."""
    curve = s3.CURVES.get(network)
    if curve is None:
        return None, None
    if num_tiles(tiles) == s3.LAST_TILES:
        return curve.last, curve.change
    return (curve.first if tiles == s3.UNSHUFFLED else None), None


def _interval(measure: Callable[[], MeanInterval], *, wanted: bool) -> MeanInterval:
    """Of nothing where it is not wanted, or where no seed tells."""
    try:
        return measure() if wanted else mean_interval([])
    except InputError:
        return mean_interval([])


def _flat(numbers: Mapping[str, MeanInterval]) -> dict[str, float]:
    return {f"{name}_{part}": value for name, interval in numbers.items() for part, value in asdict(interval).items()}


def points(change: MeanInterval) -> str:
    return with_interval(change, scale=100, digits=2, signed=True)


def _whole(papers: float | None, *, signed: bool = False) -> str:
    """As exact as what was read off a figure."""
    return rounded(None if papers is None else 100 * papers, 0, signed=signed)


def ends(curve: s3.PublishedCurve) -> str:
    """ "80 to 57 %"."""
    return f"{100 * curve.first:.0f} to {100 * curve.last:.0f} %"
