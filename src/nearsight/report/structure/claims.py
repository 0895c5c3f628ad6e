"""What S3 says about its simplified model, each with the rule that judges it, by the study that tests it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from nearsight.errors import InputError
from nearsight.report.structure import rules
from nearsight.report.structure.chance import chance_of_association
from nearsight.report.structure.dynamics import PHASE_CLAIMS, gain_since_moving
from nearsight.report.structure.numbers import patches_of, runs_of
from nearsight.report.structure.sweep import BASE, sweep_line
from nearsight.report.structure.tables import times_in_words
from nearsight.report.structure.transfer import (
    BESIDE,
    KEPT,
    KEPT_LONG,
    KEPT_NOISY,
    advantage,
    fewer_times,
    samples_needed,
    target_accuracy,
)
from nearsight.report.study.rules import EVERY_SEED, Finding, judge_every_seed
from nearsight.report.study.table import percent, rounded
from nearsight.study.simulation_folder import SimulationResults

CONTROL_ERROR = 0.06
"""Of the negative control, as S3 gives it."""
NO_RISK, LITTLE_RISK = 0.01, 0.1
PROVED, NO_NUMBER = "proved, with high probability", "no number given"


@dataclass(frozen=True, kw_only=True)
class StructureClaim:
    text: str
    source: str
    """Where the paper makes it."""
    paper: str
    """What the paper has for it, in words."""
    rule: str
    """What judges it, in words."""
    readings: tuple[str, str] | None = None
    """The strict and the weak reading, where the rule is that of every seed."""
    judge: Callable[[SimulationResults], Finding]
    """An `InputError` says why the seeds there are cannot tell."""


def _associated(condition: str, text: str, source: str) -> StructureClaim:
    def judge(results: SimulationResults) -> Finding:
        chance = chance_of_association(patches_of(results, condition))
        return rules.judge_associated(runs_of(results, condition), chance)

    return StructureClaim(text=text, source=source, paper=PROVED, rule=rules.ASSOCIATED, judge=judge)


def _generalises(condition: str) -> StructureClaim:
    def judge(results: SimulationResults) -> Finding:
        return rules.judge_generalises(runs_of(results, condition), gain_since_moving(results, condition))

    return StructureClaim(
        text=f"It learns the structure while generalising ({condition})",
        source="S3 abstract",
        paper=PROVED,
        rule=rules.GENERALISES,
        judge=judge,
    )


def _association() -> tuple[StructureClaim, ...]:
    fixed, fresh = "fixed sample", "fresh samples"
    return (
        _associated(fixed, "Gradient descent on the empirical risk alone associates every patch", "S3 Def. 2.2"),
        _associated(fresh, "So does gradient descent on the population's risk", "S3 Def. 2.2"),
        _generalises(fixed),
        _generalises(fresh),
        *(
            StructureClaim(
                text=claim.text,
                source="S3, dynamics",
                paper=PROVED,
                rule=EVERY_SEED,
                readings=(claim.strict, claim.weak),
                judge=claim.judge(fixed),
            )
            for claim in PHASE_CLAIMS
        ),
    )


def _control() -> tuple[StructureClaim, ...]:
    structured, independent, fixed = "structured", "independent", "attention fixed"

    def none(results: SimulationResults) -> Finding:
        chance = chance_of_association(patches_of(results, independent))
        return rules.judge_none(runs_of(results, independent), chance)

    return (
        _associated(structured, "Where the data have structure, the attention has it", "S3 abstract"),
        StructureClaim(
            text="Where they have none (independent Gaussian patches, cubic-CNN labels), the attention has none",
            source="S3, negative control",
            paper="no association",
            rule=rules.NONE,
            judge=none,
        ),
        StructureClaim(
            text="And yet that task is learned",
            source="S3, negative control",
            paper=f"about {100 * CONTROL_ERROR:.0f} % test error",
            rule=rules.ERROR,
            judge=lambda results: rules.judge_error(runs_of(results, independent), CONTROL_ERROR),
        ),
        StructureClaim(
            text="On structured data, too, there are solutions without association that generalise "
            "(here: the attention left as it starts)",
            source="S3 abstract",
            paper="proved to exist",
            rule=rules.WITHOUT,
            judge=lambda results: rules.judge_without(runs_of(results, fixed)),
        ),
    )


def _sweep() -> tuple[StructureClaim, ...]:
    def vanishes(results: SimulationResults) -> Finding:
        points = sweep_line(results, "data.probability").points
        if 0.0 not in points:
            raise InputError("no seed of q = 0 is done")
        risk = points[0.0]["test_risk"].to_numpy(dtype=np.float64)
        words = f"test risk {rounded(float(risk.min()), 5)} to {rounded(float(risk.max()), 5)}"
        return judge_every_seed(list(risk <= NO_RISK), list(risk <= LITTLE_RISK), words)

    def rare(results: SimulationResults) -> Finding:
        data = patches_of(results, BASE)
        return rules.judge_rare(sweep_line(results, "data.probability").points, math.log(data.dim) / data.num_patches)

    return (
        StructureClaim(
            text="With enough samples association is found",
            source="S3",
            paper="polynomially many in d",
            rule=rules.ENOUGH,
            judge=lambda results: rules.judge_enough(sweep_line(results, "descent.num_samples").points),
        ),
        StructureClaim(
            text="Association is found where other patches carry the feature rarely",
            source="S3 Assumption 1",
            paper="q of the order of log(d)/D",
            rule=rules.RARE,
            judge=rare,
        ),
        StructureClaim(
            text="III: the risk vanishes (where no patch carries the feature by chance, q = 0)",
            source="S3, dynamics",
            paper=PROVED,
            rule=EVERY_SEED,
            readings=(f"the test risk ends at {NO_RISK} or less", f"at {LITTLE_RISK} or less"),
            judge=vanishes,
        ),
    )


def _transfer() -> tuple[StructureClaim, ...]:
    def fewer(way: str, text: str) -> StructureClaim:
        def judge(results: SimulationResults) -> Finding:
            target = target_accuracy(results)
            times = fewer_times(results, way, target)
            kept, scratch = (samples_needed(results, each, target) for each in (way, BESIDE[way]))
            words = (
                f"for {percent(target)} %: {kept.in_words()} with the attention kept, {scratch.in_words()} from "
                f"scratch; {times_in_words(times.mean, times.low, times.high)} times fewer"
            )
            words += ", or more" if kept.is_at_the_least else ""
            return rules.judge_fewer(times, words)

        return StructureClaim(text=text, source="S3 abstract", paper=NO_NUMBER, rule=rules.FEWER, judge=judge)

    def everywhere(way: str, text: str) -> StructureClaim:
        return StructureClaim(
            text=text,
            source="S3 abstract",
            paper=NO_NUMBER,
            rule=rules.EVERYWHERE,
            judge=lambda results: rules.judge_everywhere(advantage(results, way)),
        )

    return (
        fewer(KEPT, "A model that knows the sets learns a new feature from fewer samples than one that does not"),
        fewer(KEPT_LONG, "Also if v is trained for as many steps as from scratch"),
        fewer(KEPT_NOISY, "Also in more noise, where the feature itself takes many samples"),
        everywhere(KEPT, "Knowing the sets helps at any number of samples"),
        everywhere(KEPT_LONG, "Also if v is trained for as many steps as from scratch"),
        everywhere(KEPT_NOISY, "Also in more noise"),
    )


CLAIMS: Mapping[str, tuple[StructureClaim, ...]] = {
    "association": _association(),
    "association-control": _control(),
    "association-sweep": _sweep(),
    "transfer": _transfer(),
}
"""By the name of the study that tests them."""
