"""What S3 says about shuffled tiles, what we ask beyond it, and how the runs of `permuted-cifar100` answer."""

from functools import partial

from nearsight.report.study.claim import OURS, Claim
from nearsight.report.study.locat.rules import judge_order
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions import shuffling
from nearsight.report.study.positions.permuted import ends, points
from nearsight.report.study.positions.rules import AS_LITTLE, KEEPS, ORDER, judge_as_little, judge_keeps
from nearsight.report.study.positions.shuffling import accuracy_by_seed, change_by_seed, excess_by_seed
from nearsight.report.study.rules import Finding
from nearsight.report.study.table import percent, rounded
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval

SIZES = {s3.LARGE_TILES: f"tiles larger than a patch ({s3.LARGE_TILES})", s3.PIXELS: f"single pixels ({s3.PIXELS})"}
"""Tiles → in words."""


def permuted_claims() -> tuple[Claim, ...]:
    """Per size of tiles the paper's claims, then our questions."""
    return (
        *(claim for tiles, size in SIZES.items() for claim in _claims_about(tiles, size)),
        *(
            Claim(
                id=f"positional-{tiles}",
                text=f"Does positional attention mind a fixed shuffling of {size} as little as the usual one?",
                source=OURS,
                rule=AS_LITTLE,
                judge=partial(_judge_as_little, s3.POSITIONAL_VIT, s3.VIT, tiles),
            )
            for tiles, size in SIZES.items()
        ),
    )


def _claims_about(tiles: str, size: str) -> tuple[Claim, ...]:
    vit, resnet = s3.CURVES[s3.VIT], s3.CURVES[s3.RESNET]
    # Its curves have a point at 4×4 tiles, too, but only their ends are known to us.
    over = f"from {s3.FIRST_TILES}×{s3.FIRST_TILES} to {s3.LAST_TILES}×{s3.LAST_TILES} tiles"
    return (
        Claim(
            id=f"vit-{tiles}",
            text=f"A ViT does not mind a fixed shuffling of {size}",
            source=s3.SHUFFLED,
            paper=f"stays near {100 * vit.first:.0f} % {over}",
            rule=KEEPS,
            judge=partial(_judge_kept, s3.VIT, tiles),
        ),
        Claim(
            id=f"resnet-{tiles}",
            text=f"A ResNet loses accuracy by a fixed shuffling of {size}",
            source=s3.SHUFFLED,
            paper=f"{ends(resnet)} {over}",
            rule=ORDER,
            judge=partial(_judge_lost, s3.RESNET, tiles),
        ),
        Claim(
            id=f"resnet-beside-vit-{tiles}",
            text=f"A ResNet loses more than a ViT by a fixed shuffling of {size}",
            source=s3.SHUFFLED,
            paper=f"{rounded(100 * resnet.change, 0, signed=True)} and about {100 * vit.change:.0f} points {over}",
            rule=ORDER,
            judge=partial(_judge_more_lost, s3.RESNET, s3.VIT, tiles),
        ),
    )


def _judge_kept(network: str, tiles: str, results: StudyResults) -> Finding:
    ours = shuffling.change(results, network, tiles)
    return judge_keeps(ours, words=_in_words(results, network, tiles, ours))


def _judge_lost(network: str, tiles: str, results: StudyResults) -> Finding:
    ours = shuffling.change(results, network, tiles)
    values = change_by_seed(results, network, tiles).tolist()
    return judge_order(values, ours, sign=-1, words=_in_words(results, network, tiles, ours))


def _judge_more_lost(network: str, reference: str, tiles: str, results: StudyResults) -> Finding:
    ours = shuffling.excess(results, network, reference, tiles)
    values = excess_by_seed(results, network, reference, tiles).tolist()
    return judge_order(values, ours, sign=-1, words=_beside_in_words(results, network, reference, tiles, ours))


def _judge_as_little(network: str, reference: str, tiles: str, results: StudyResults) -> Finding:
    ours = shuffling.excess(results, network, reference, tiles)
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
