"""What a matrix that knows nothing would reach."""

from math import comb

import numpy as np
import pandas as pd

from nearsight.data.structured import PatchData
from nearsight.errors import InputError
from nearsight.report.rules import Finding, Verdict
from nearsight.report.simulations import share_in_words, share_interval
from nearsight.report.tables import percent, rounded, share, with_interval
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.train.structure.descent import NEAR


def chance_of_association(data: PatchData) -> float:
    """That a patch is associated when the other entries of its row are in random order, below the diagonal's."""
    return 1 / comb(data.num_patches - 1, data.set_size - 1)


# From the seeds of a simulation to a verdict: each rule is a function and the words that say what it does.
#
# S3 proves statements that hold with high probability in a limit, so there are few numbers to compare with: a claim is
# judged by whether what it says happened, and in how many seeds.


ALMOST_ALL = 0.9
"""Of the seeds: "with high probability"."""
ABOVE_CHANCE = 0.1
"""By how much a share of patches may exceed chance and still be none."""
HALFWAY = 0.75
"""Between guessing and certainty."""
POINT = f"{100 * NEAR:.0f} percentage point"

ASSOCIATED = (
    f"*Associated.* Reproduced: at the last step all patches are associated in at least {share(ALMOST_ALL)} of the "
    "seeds. In direction: on average the share of associated patches is nearer to 1 than to chance. Not reproduced: "
    "otherwise."
)


def judge_associated(runs: pd.DataFrame, chance: float) -> Finding:
    exact, patches = share_interval(runs["exact"]), mean_interval(runs["associated"])
    verdict = Verdict.IN_DIRECTION if patches.mean > (1 + chance) / 2 else Verdict.NOT_REPRODUCED
    if exact.mean >= ALMOST_ALL:
        verdict = Verdict.REPRODUCED
    words = (
        f"all patches in {share_in_words(exact)}; {with_interval(patches)} of the patches, {rounded(chance)} by chance"
    )
    return _finding(verdict, words, exact)


NONE = (
    "*None.* Reproduced: no seed has all patches associated, and the mean share of associated patches is at most "
    f"{share(ABOVE_CHANCE)} above chance. In direction: no seed has all. Not reproduced: some seed has."
)


def judge_none(runs: pd.DataFrame, chance: float) -> Finding:
    exact, patches = share_interval(runs["exact"]), mean_interval(runs["associated"])
    verdict = Verdict.NOT_REPRODUCED if exact.mean > 0 else Verdict.IN_DIRECTION
    if verdict is Verdict.IN_DIRECTION and patches.mean <= chance + ABOVE_CHANCE:
        verdict = Verdict.REPRODUCED
    words = (
        f"all patches in {share_in_words(exact)}; {with_interval(patches)} of the patches, {rounded(chance)} by chance"
    )
    return _finding(verdict, words, exact)


GENERALISES = (
    f"*Generalises.* Reproduced: the mean test accuracy is within {POINT} of the best that any classifier can reach. "
    "In direction: it is higher than when the attention began to move (95 % interval of the differences within seeds "
    "above 0). Not reproduced: otherwise."
)


def judge_generalises(runs: pd.DataFrame, gain: MeanInterval) -> Finding:
    """`gain`: the accuracy at the end minus that at the beginning of the second phase."""
    accuracy, best = mean_interval(_accuracies(runs)), float(runs["best_acc"].iloc[0])
    sure = gain.mean > 0 and (gain.n == 1 or gain.excludes_zero)
    verdict = Verdict.IN_DIRECTION if sure else Verdict.NOT_REPRODUCED
    if accuracy.mean >= best - NEAR:
        verdict = Verdict.REPRODUCED
    words = (
        f"{with_interval(accuracy, scale=100, digits=2)} %, best possible {percent(best)} %; "
        f"{with_interval(gain, scale=100, digits=2, signed=True)} points since the attention began to move"
    )
    return _finding(verdict, words, accuracy)


WITHOUT = (
    f"*Without association.* Reproduced: the mean test accuracy is within {POINT} of the best possible, though no seed "
    "has all patches associated. In direction: none has, and the accuracy's 95 % interval lies above "
    f"{share(HALFWAY)}. Not reproduced: otherwise."
)


def judge_without(runs: pd.DataFrame) -> Finding:
    accuracy, exact = mean_interval(_accuracies(runs)), share_interval(runs["exact"])
    best = float(runs["best_acc"].iloc[0])
    low = accuracy.low if accuracy.has_interval else accuracy.mean
    verdict = Verdict.NOT_REPRODUCED
    if exact.mean == 0 and accuracy.mean >= best - NEAR:
        verdict = Verdict.REPRODUCED
    elif exact.mean == 0 and low > HALFWAY:
        verdict = Verdict.IN_DIRECTION
    words = (
        f"{with_interval(accuracy, scale=100, digits=2)} %, best possible {percent(best)} %; all patches associated in "
        f"{share_in_words(exact)}"
    )
    return _finding(verdict, words, accuracy)


ERROR = (
    f"*Error.* Reproduced: the mean test error is at most {POINT} above the paper's. In direction: at most twice the "
    "paper's. Not reproduced: more."
)


def judge_error(runs: pd.DataFrame, paper: float) -> Finding:
    error = mean_interval(1 - _accuracies(runs))
    verdict = Verdict.IN_DIRECTION if error.mean <= 2 * paper else Verdict.NOT_REPRODUCED
    if error.mean <= paper + NEAR:
        verdict = Verdict.REPRODUCED
    return _finding(verdict, f"test error {with_interval(error, scale=100, digits=2)} %", error)


ENOUGH = (
    f"*Enough.* Reproduced: with the most samples tried all patches are associated in at least {share(ALMOST_ALL)} of "
    "the seeds, and with the fewest in less. In direction: in more seeds with the most than with the fewest. Not "
    "reproduced: otherwise."
)


def judge_enough(points: dict[float, pd.DataFrame]) -> Finding:
    """`points`: rows by the number of samples, in rising order."""
    if len(points) < 2:
        raise InputError("fewer than two numbers of samples are done")
    shares = {value: share_interval(runs["exact"]) for value, runs in points.items()}
    first, last = shares[min(shares)], shares[max(shares)]
    verdict = Verdict.IN_DIRECTION if last.mean > first.mean else Verdict.NOT_REPRODUCED
    if last.mean >= ALMOST_ALL > first.mean:
        verdict = Verdict.REPRODUCED
    words = ", ".join(f"{value:,.0f}: {round(found.mean * found.n)} of {found.n}" for value, found in shares.items())
    return _finding(verdict, f"seeds with all patches associated, by samples: {words}", last)


RARE = (
    f"*Rare.* Reproduced: for every q tried up to S3's ln(d)/D all patches are associated in at least "
    f"{share(ALMOST_ALL)} of the seeds. In direction: for the smallest. Not reproduced: otherwise."
)


def judge_rare(points: dict[float, pd.DataFrame], limit: float) -> Finding:
    """`points`: rows by q, in rising order."""
    shares = {value: share_interval(runs["exact"]) for value, runs in points.items()}
    within = {value: found for value, found in shares.items() if value <= limit}
    if not within:
        raise InputError(f"no seed of a q up to ln(d)/D, which is {rounded(limit, 2)}, is done")
    holds = [found.mean >= ALMOST_ALL for found in within.values()]
    verdict = Verdict.IN_DIRECTION if holds[0] else Verdict.NOT_REPRODUCED
    if all(holds):
        verdict = Verdict.REPRODUCED
    words = ", ".join(f"{value:g}: {round(found.mean * found.n)} of {found.n}" for value, found in shares.items())
    words = f"seeds with all patches associated, by q: {words}; ln(d)/D is {rounded(limit, 2)}"
    return _finding(verdict, words, within[max(within)])


FEWER = (
    "*Fewer.* Within seeds, the samples needed from scratch are divided by those needed with the attention kept. "
    "Reproduced: the 95 % interval of the geometric mean lies above 1. In direction: the mean does. Not reproduced: "
    "otherwise. Where an interval has no width, every seed gave the same."
)


def judge_fewer(times: MeanInterval, words: str) -> Finding:
    verdict = Verdict.NOT_REPRODUCED
    if np.isfinite(times.mean) and times.mean > 1:
        verdict = Verdict.REPRODUCED if times.low > 1 else Verdict.IN_DIRECTION
    return _finding(verdict, words, times)


EVERYWHERE = (
    "*Everywhere.* Reproduced: at every number of samples that was tried the test accuracy is higher than from scratch "
    "(95 % interval of the differences within seeds above 0). In direction: at more than half of the numbers. Not "
    "reproduced: otherwise."
)


def judge_everywhere(differences: dict[int, MeanInterval]) -> Finding:
    """`differences`: in accuracy, by the number of samples."""
    higher = {size: d.mean > 0 and (d.n == 1 or d.excludes_zero) for size, d in differences.items()}
    verdict = Verdict.IN_DIRECTION if sum(higher.values()) > len(higher) / 2 else Verdict.NOT_REPRODUCED
    if all(higher.values()) and all(d.has_interval for d in differences.values()):  # else the sign is the direction
        verdict = Verdict.REPRODUCED
    worst = min(differences, key=lambda size: differences[size].mean)
    except_for = ", ".join(f"{size:,}" for size, is_higher in higher.items() if not is_higher)
    words = f"higher at {sum(higher.values())} of {len(higher)} numbers of samples"
    words += f", not at {except_for}" if except_for else ""
    least = with_interval(differences[worst], scale=100, digits=2, signed=True)
    return _finding(verdict, f"{words}; least difference {least} points, at {worst:,}", differences[worst])


def _accuracies(runs: pd.DataFrame) -> "pd.Series[float]":
    """Of the seeds that have not diverged."""
    found = runs["test_acc"].dropna()
    if found.empty:
        raise InputError("every seed has diverged")
    return found


def _finding(verdict: Verdict, words: str, interval: MeanInterval) -> Finding:
    return Finding(verdict=verdict, ours=words, value=interval.mean, low=interval.low, high=interval.high, n=interval.n)
