"""By how much conditions are above the first: within seeds and, where there is one seed, over test images."""

import math
from dataclasses import asdict, dataclass
from statistics import fmean

from nearsight.report.probes.results import ProbeResults
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.table import rounded, span, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, paired_difference

OF_ONE_SEED = (
    "In brackets, of a single seed: 95 % over test images, from the intervals of both scores (square and add). They "
    "say what other images would change, not what another training would."
)
SEEDS, IMAGES = "seeds", "test images"


@dataclass(frozen=True, kw_only=True)
class Difference(MeanInterval):
    """A difference with the interval that can be had."""

    interval_over: str
    """`SEEDS` or, of a single seed, `IMAGES`; empty where there is none."""

    def in_words(self) -> str:
        """In points."""
        if self.interval_over != IMAGES:
            return with_interval(self, scale=100, digits=2, signed=True)
        value, low, high = (rounded(100 * number, 2, signed=True) for number in (self.mean, self.low, self.high))
        return f"{value} ({span(low, high)})"


def reference_of(study: StudyResults) -> str:
    """The condition with which the others are compared: the first there is."""
    return study.factors["model"][0]


def differences(results: ProbeResults, measure: str) -> dict[str, Difference]:
    """Condition → by how much it is above the first, within seeds; those of which no seed has both are left out."""
    reference, *conditions = results.as_study().factors["model"]
    found = {condition: difference(results, condition, reference, measure) for condition in conditions}
    return {condition: one for condition, one in found.items() if one.n}


def difference(results: ProbeResults, condition: str, reference: str, measure: str) -> Difference:
    """By how much a condition is above another, within seeds."""
    over_seeds = asdict(paired_difference(results.as_study().runs, condition, reference, measure))
    if over_seeds["n"] != 1:
        return Difference(**over_seeds, interval_over=SEEDS if over_seeds["n"] else "")
    over_images = difference_over_images(results, condition, reference, measure)
    ends = {"low": over_images.low, "high": over_images.high}
    return Difference(**{**over_seeds, **ends}, interval_over=IMAGES if over_images.has_interval else "")


def difference_over_images(results: ProbeResults, condition: str, reference: str, measure: str) -> Estimate:
    """The same with an interval over test images, of the seeds that both have.

    The difference may be off by what both scores may be off, as of independent numbers (Newcombe 1998, method 10).
    Scores on the same images mostly err together, so it is rather too wide than too narrow. For the same reason more
    seeds do not make it narrower: its ends are the means of theirs.
    """
    models = results.as_study().runs.dropna(subset=measure).set_index(["condition", "seed"])["run"]
    scores = results.scores(measure)
    pairs = [
        (scores[models[condition, seed]], scores[models[reference, seed]])
        for seed in models[condition].index
        if (reference, seed) in models.index
    ]
    value = fmean(one.value - other.value for one, other in pairs)
    down = fmean(math.hypot(one.value - one.low, other.high - other.value) for one, other in pairs)
    up = fmean(math.hypot(one.high - one.value, other.value - other.low) for one, other in pairs)
    return Estimate(value=value, low=value - down, high=value + up)
