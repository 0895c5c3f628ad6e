"""What a fixed shuffling of tiles costs each network: the numbers, the table and the claims of `permuted-cifar100`."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.claim import Claim
from nearsight.report.study.locat.rules import judge_order
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.rules import AS_LITTLE, KEEPS, ORDER, judge_as_little, judge_keeps
from nearsight.report.study.rules import Finding
from nearsight.report.study.table import MISSING, Table, percent, rounded, with_interval
from nearsight.report.study.tables_conditions import INTERVALS
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval


def num_tiles(level: str) -> int:
    """Along a side: 4 of "4×4"."""
    return int(level.partition("×")[0])


def accuracy_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Of the seeds that have such a run."""
    runs = results.runs
    here = runs[(runs["model"] == network) & (runs["tiles"] == tiles)]
    return here.set_index("seed")["test_acc"].astype("float64")


def change_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Accuracy with shuffled tiles minus that of the same seed without. No such seed is an `InputError`."""
    after, before = (accuracy_by_seed(results, network, level) for level in (tiles, s3.UNSHUFFLED))
    change = (after - before).dropna()
    if change.empty:
        raise InputError(f"no seed of {network} has a run with {tiles} tiles and one without shuffling")
    return change


def excess_by_seed(results: StudyResults, network: str, reference: str, tiles: str) -> "pd.Series[float]":
    """How much more a network changes than another, seed by seed. No such seed is an `InputError`."""
    excess = (change_by_seed(results, network, tiles) - change_by_seed(results, reference, tiles)).dropna()
    if excess.empty:
        raise InputError(f"no seed of which both {network} and {reference} have runs with {tiles} tiles and without")
    return excess


def permutation_table(results: StudyResults) -> Table:
    """A row per network and number of tiles: accuracy, what shuffling changes, and how much more than in the ViT."""
    rows, shown = [], []
    for network in results.factors["model"]:
        for tiles in results.factors["tiles"]:
            accuracy = mean_interval(accuracy_by_seed(results, network, tiles))
            if not accuracy.n:
                continue
            is_shuffled, curve = tiles != s3.UNSHUFFLED, s3.CURVES.get(network)
            change = _interval(partial(change_by_seed, results, network, tiles), wanted=is_shuffled)
            beside = is_shuffled and network != s3.VIT
            excess = _interval(partial(excess_by_seed, results, network, s3.VIT, tiles), wanted=beside)
            # Only the end of its curves is the same shuffling as one of ours.
            papers = curve.change if curve is not None and num_tiles(tiles) == s3.LAST_TILES else None
            named: dict[str, object] = {"network": network, "tiles": tiles, "seeds": accuracy.n}
            numbers = {"test_acc": accuracy, "change": change, "change_beyond_vit": excess}
            rows.append({**named, "scale": results.scale, **_flat(numbers), "paper_change": papers})
            shown.append(
                {
                    **named,
                    "test accuracy, %": with_interval(accuracy, scale=100, digits=2),
                    f"change from {s3.UNSHUFFLED}, points": points(change),
                    "paper's change": MISSING if papers is None else rounded(100 * papers, 0, signed=True),
                    f"change beyond that of {s3.VIT}, points": points(excess),
                }
            )
    if not rows:
        raise InputError("none of its networks has a run yet")
    return Table(
        name="permutation",
        title=f"{results.name}: what a fixed shuffling of tiles costs each network",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(
            INTERVALS,
            "Changes are taken within seeds, of those that have both runs.",
            f"The paper's changes are those from {s3.FIRST_TILES}×{s3.FIRST_TILES} to {s3.LAST_TILES}×{s3.LAST_TILES} "
            "tiles, read off its figure, of networks that trained longer: their sign can be compared, their size "
            f"cannot. Its third network, VGG, goes from {_ends(s3.CURVES['VGG'])}.",
            f"{s3.PIXELS} tiles are single pixels, finer than patches: there heads have no distances to measure.",
            *missing_notes(results),
        ),
    )


def _interval(values: Callable[[], "pd.Series[float]"], *, wanted: bool) -> MeanInterval:
    """Of nothing where it is not wanted, or where no seed tells."""
    try:
        return mean_interval(values() if wanted else [])
    except InputError:
        return mean_interval([])


def _flat(numbers: dict[str, MeanInterval]) -> dict[str, float]:
    return {f"{name}_{part}": value for name, interval in numbers.items() for part, value in asdict(interval).items()}


def points(change: MeanInterval) -> str:
    return with_interval(change, scale=100, digits=2, signed=True)


def _ends(curve: s3.PublishedCurve) -> str:
    return f"{100 * curve.first:.0f} to {100 * curve.last:.0f} %"


def _judge_kept(network: str, tiles: str, results: StudyResults) -> Finding:
    ours = mean_interval(change_by_seed(results, network, tiles))
    return judge_keeps(ours, words=_in_words(results, network, tiles, ours))


def _judge_lost(network: str, tiles: str, results: StudyResults) -> Finding:
    change = change_by_seed(results, network, tiles)
    ours = mean_interval(change)
    return judge_order(change.tolist(), ours, sign=-1, words=_in_words(results, network, tiles, ours))


def _judge_more_lost(network: str, reference: str, tiles: str, results: StudyResults) -> Finding:
    excess = excess_by_seed(results, network, reference, tiles)
    ours = mean_interval(excess)
    return judge_order(excess.tolist(), ours, sign=-1, words=_beside_in_words(results, network, reference, tiles, ours))


def _judge_as_little(network: str, reference: str, tiles: str, results: StudyResults) -> Finding:
    ours = mean_interval(excess_by_seed(results, network, reference, tiles))
    return judge_as_little(ours, words=_beside_in_words(results, network, reference, tiles, ours))


def _in_words(results: StudyResults, network: str, tiles: str, ours: MeanInterval) -> str:
    """Of the seeds that have both, so that the change is the difference of the two."""
    seeds = change_by_seed(results, network, tiles).index
    before, after = (
        percent(float(accuracy_by_seed(results, network, level)[seeds].mean())) for level in (s3.UNSHUFFLED, tiles)
    )
    return f"{before} to {after} %: {points(ours)} points"


def _beside_in_words(results: StudyResults, network: str, reference: str, tiles: str, ours: MeanInterval) -> str:
    seeds = excess_by_seed(results, network, reference, tiles).index
    one, other = (
        rounded(100 * float(change_by_seed(results, name, tiles)[seeds].mean()), 2, signed=True)
        for name in (network, reference)
    )
    return f"{network} {one}, {reference} {other}: {points(ours)} points"


def permuted_claims() -> tuple[Claim, ...]:
    vit, resnet = s3.CURVES[s3.VIT], s3.CURVES[s3.RESNET]
    # Its curves have a point at 4×4 tiles, too, but only their ends are known to us.
    over = f"from {s3.FIRST_TILES}×{s3.FIRST_TILES} to {s3.LAST_TILES}×{s3.LAST_TILES} tiles"
    kept, fell = f"stays near {100 * vit.first:.0f} % {over}", f"{_ends(resnet)} {over}"
    both = f"{rounded(100 * resnet.change, 0, signed=True)} and about {100 * vit.change:.0f} points {over}"
    sizes = {s3.LARGE_TILES: "tiles larger than a patch ({})", s3.PIXELS: "single pixels ({})"}
    claims = []
    for tiles, words in sizes.items():
        size = words.format(tiles)
        claims += [
            Claim(
                text=f"A ViT does not mind a fixed shuffling of {size}",
                source=s3.SHUFFLED,
                paper=kept,
                rule=KEEPS,
                judge=partial(_judge_kept, s3.VIT, tiles),
            ),
            Claim(
                text=f"A ResNet loses accuracy by a fixed shuffling of {size}",
                source=s3.SHUFFLED,
                paper=fell,
                rule=ORDER,
                judge=partial(_judge_lost, s3.RESNET, tiles),
            ),
            Claim(
                text=f"A ResNet loses more than a ViT by a fixed shuffling of {size}",
                source=s3.SHUFFLED,
                paper=both,
                rule=ORDER,
                judge=partial(_judge_more_lost, s3.RESNET, s3.VIT, tiles),
            ),
            Claim(
                text=f"Does positional attention mind a fixed shuffling of {size} as little as the usual one?",
                source=s3.OURS,
                rule=AS_LITTLE,
                judge=partial(_judge_as_little, s3.POSITIONAL_VIT, s3.VIT, tiles),
            ),
        ]
    return tuple(claims)
