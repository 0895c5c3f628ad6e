"""By how much conditions are above the first: within seeds and, where there is one seed, over test images."""

import math
from dataclasses import asdict, dataclass

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
    study = results.as_study()
    over_seeds = asdict(paired_difference(study.runs, condition, reference, measure))
    if over_seeds["n"] != 1:
        return Difference(**over_seeds, interval_over=SEEDS if over_seeds["n"] else "")
    over_images = _of_one_seed(results, study, condition, reference, measure)
    ends = {"low": over_images.low, "high": over_images.high}
    return Difference(**{**over_seeds, **ends}, interval_over=IMAGES if over_images.has_interval else "")


def _of_one_seed(results: ProbeResults, study: StudyResults, condition: str, reference: str, measure: str) -> Estimate:
    """Of the seed that both have. The difference may be off by what both scores may be off, as of independent numbers
    (Newcombe 1998, method 10). Scores on the same images mostly err together, so it is rather too wide than too narrow.
    """
    models = study.runs.dropna(subset=measure).set_index(["condition", "seed"])["run"]
    ((upper, lower),) = (
        (models[condition, seed], models[reference, seed])
        for seed in models[condition].index
        if (reference, seed) in models.index
    )
    scores = results.scores(measure)
    one, other = scores[upper], scores[lower]
    value = one.value - other.value
    down = math.hypot(one.value - one.low, other.high - other.value)
    up = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(value=value, low=value - down, high=value + up)
