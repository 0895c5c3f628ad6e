"""S3 as simulations: a model that is given only a loss finds which patches belong together, and we can watch it.

All seeds of a condition run as one tensor program on a processor. The constants are those of a public port of S3's
model, not the authors' (assumed), and S3's single step size is two here: v's is as large as it can be without
diverging, and with the same for A the second phase would take some hundred thousand steps.
"""

import dataclasses
import math

import numpy as np

from nearsight.data.structured import GaussianPatches, StructuredPatches
from nearsight.errors import InputError
from nearsight.papers.structure import PAPER
from nearsight.papers.structure.simulation_figures import (
    attention_matrices,
    control_curves,
    phase_curves,
    sweep_panels,
    transfer_curves,
)
from nearsight.papers.structure.simulation_numbers import (
    BASE,
    BESIDE,
    KEPT,
    KEPT_LONG,
    KEPT_NOISY,
    PHASE_CLAIMS,
    advantage,
    fewer_times,
    gain_since_moving,
    samples_needed,
    sweep_line,
    target_accuracy,
    times_in_words,
    transfer_table,
)
from nearsight.papers.structure.simulation_rules import (
    ASSOCIATED,
    ENOUGH,
    ERROR,
    EVERYWHERE,
    FEWER,
    GENERALISES,
    NONE,
    RARE,
    WITHOUT,
    chance_of_association,
    judge_associated,
    judge_enough,
    judge_error,
    judge_everywhere,
    judge_fewer,
    judge_generalises,
    judge_none,
    judge_rare,
    judge_without,
)
from nearsight.report.claims import Claim
from nearsight.report.rules import EVERY_SEED, Finding, judge_every_seed
from nearsight.report.simulations import patches_of, runs_of
from nearsight.report.studies import report_on
from nearsight.report.tables import percent, rounded
from nearsight.study import Simulation
from nearsight.study.recipes import simulation
from nearsight.study.simulation_folder import SimulationResults
from nearsight.train.structure import Descent, StructureRun, StructureRunner

ASSUMED = (
    *("data.probability", "data.noise", "model.power", "model.slope", "model.init_attention", "model.init_feature"),
    *("descent.num_samples", "descent.steps", "descent.feature_lr", "descent.attention_lr"),
)
RESPONSES = {"exact": "all associated", "associated": "share associated", "test_acc": "test accuracy"}

_QUICK = Descent(num_samples=4000, steps=400, attention_lr=2.0)
"""Twice the step size of A in fewer steps: for studies of many conditions."""
_LEARNED_FROM = 2000
"""Fresh samples at each step that teach the attention which is kept, as in `association`."""
_CHANCE = 0.46
"""ln(d)/D of the default patches, held where D varies."""


@simulation("association")
def association(*, seeds: int = 10) -> Simulation:
    """Does gradient descent on the loss alone find which patches belong together, and in which phases? (S3)

    Run     nearsight study run association
    Cost    20 cells; one core: 2.5 minutes
    Result  all patches associated in 10 of 10 seeds, 90.8 % where 90.9 % is possible
            -> results/spatial-structure/association
    """
    conditions = {
        "fixed sample": StructureRun(),
        "fresh samples": StructureRun(descent=Descent(samples="fresh", num_samples=2000)),
    }
    return _simulation(conditions, seeds, StructureRunner(keep=("curves", "attention")))


@simulation("association-control")
def association_control(*, seeds: int = 10) -> Simulation:
    """Without structure in the data, is there none in the attention? Is it needed to be right? (S3, negative control)

    Run     nearsight study run association-control
    Cost    30 cells; one core: 3 minutes
    Result  structured 10 of 10 seeds associated, independent 0 of 10 with 3.8 % test error
            -> results/spatial-structure/association-control
    """
    # Patches as long as √d instead of about 1 need smaller steps of v.
    independent = StructureRun(data=GaussianPatches(), descent=Descent(feature_lr=5e-4))
    conditions = {
        "structured": StructureRun(),
        "independent": independent,
        "attention fixed": StructureRun(descent=Descent(samples="fresh", num_samples=2000, attention_lr=0.0)),
    }
    return _simulation(conditions, seeds, StructureRunner(keep=("curves", "attention")))


@simulation("association-sweep")
def association_sweep(*, seeds: int = 10) -> Simulation:
    """How many sets, how large, how rare, how noisy, from how many samples: where is association found? (S3)

    Run     nearsight study run association-sweep
    Cost    190 cells; one core: 4 minutes
    Result  found from 2,000 to 4,000 samples on, and for q up to ln(d)/D; less with L = 8, C = 3 and C = 4, where q
            stays 0.46, above ln(d)/D (a try of 3 seeds at ln(d)/D associated all with L = 8 and C = 3)
            -> results/spatial-structure/association-sweep
    """
    base = StructuredPatches(probability=_CHANCE, noise=0.1)
    patches = {
        **{f"L = {n}": dataclasses.replace(base, num_sets=n) for n in (2, 3, 8)},
        **{f"C = {n}": dataclasses.replace(base, set_size=n) for n in (3, 4)},
        **{f"q = {p}": dataclasses.replace(base, probability=p) for p in (0.0, 0.1, 0.25, 0.6, 0.75, 1.0)},
        **{f"σ = {s}": dataclasses.replace(base, noise=s) for s in (0.01, 0.3, 1.0)},
    }
    sizes = {f"N = {n}": dataclasses.replace(_QUICK, num_samples=n) for n in (250, 500, 1000, 2000)}
    conditions = {
        "base": StructureRun(data=base, descent=_QUICK),
        **{label: StructureRun(data=data, descent=_QUICK) for label, data in patches.items()},
        **{label: StructureRun(data=base, descent=descent) for label, descent in sizes.items()},
    }
    return _simulation(conditions, seeds, StructureRunner(keep=()))


@simulation("transfer")
def transfer(*, seeds: int = 10) -> Simulation:
    """With the sets known and the feature new, how many samples does it take, and how many from scratch? (S3, transfer)

    Run     nearsight study run transfer
    Cost    550 cells; one core: 10 minutes
    Result  2 samples or fewer with the attention kept, 1,262 (630 to 2,527) from scratch; with five times the noise
            the feature itself takes 2,000, and the sets are worth +7.6 ± 0.5 points from 100, +0.07 ± 0.06 from 5,000
            -> results/spatial-structure/transfer
    """
    scratch = dataclasses.replace(_QUICK, num_test=40_000, record_every=100)
    kept_long = dataclasses.replace(scratch, attention_lr=0.0)
    # v is found within the first phase, about 70 steps; longer, it begins to fit the noise.
    kept = dataclasses.replace(kept_long, steps=100)
    quiet, noisy = StructuredPatches(noise=0.1), StructuredPatches(noise=0.5)
    ways = {
        "scratch": (quiet, scratch, 0),
        "kept": (quiet, kept, _LEARNED_FROM),
        "kept long": (quiet, kept_long, _LEARNED_FROM),
        "scratch noisy": (noisy, scratch, 0),
        "kept noisy": (noisy, kept, _LEARNED_FROM),
    }
    conditions = {
        f"{way} {n}": StructureRun(
            data=data, feature=1, kept_from=learned_from, descent=dataclasses.replace(descent, num_samples=n)
        )
        for way, (data, descent, learned_from) in ways.items()
        for n in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    }
    return _simulation(conditions, seeds, StructureRunner(keep=()))


def _simulation(conditions: dict[str, StructureRun], seeds: int, runner: StructureRunner) -> Simulation:
    return Simulation(
        conditions=conditions, simulate=runner, shrink=_shrink, responses=RESPONSES, seeds=seeds, assumed=ASSUMED
    )


def _shrink(run: StructureRun) -> StructureRun:
    """Few dimensions, samples and steps; conditions that differ still do."""
    data, descent = dataclasses.replace(run.data, dim=16), run.descent
    descent = dataclasses.replace(
        descent, num_samples=_few(descent.num_samples), steps=descent.steps // 20, num_test=200, record_every=5
    )
    return dataclasses.replace(run, data=data, descent=descent, kept_from=_few(run.kept_from))


def _few(samples: int) -> int:
    return samples if samples <= 64 else 64 + samples // 64


# What S3 says about its simplified model, each with the rule that judges it, by the study that tests it.


CONTROL_ERROR = 0.06
"""Of the negative control, as S3 gives it."""
NO_RISK, LITTLE_RISK = 0.01, 0.1
PROVED, NO_NUMBER = "proved, with high probability", "no number given"


def _associated(condition: str, text: str, source: str) -> Claim:
    def judge(results: SimulationResults) -> Finding:
        chance = chance_of_association(patches_of(results, condition))
        return judge_associated(runs_of(results, condition), chance)

    return Claim(id=f"associated-{condition}", text=text, source=source, paper=PROVED, rule=ASSOCIATED, judge=judge)


def _generalises(condition: str) -> Claim:
    def judge(results: SimulationResults) -> Finding:
        return judge_generalises(runs_of(results, condition), gain_since_moving(results, condition))

    return Claim(
        id=f"generalises-{condition}",
        text=f"It learns the structure while generalising ({condition})",
        source="S3 abstract",
        paper=PROVED,
        rule=GENERALISES,
        judge=judge,
    )


def _association() -> tuple[Claim, ...]:
    fixed, fresh = "fixed sample", "fresh samples"
    return (
        _associated(fixed, "Gradient descent on the empirical risk alone associates every patch", "S3 Def. 2.2"),
        _associated(fresh, "So does gradient descent on the population's risk", "S3 Def. 2.2"),
        _generalises(fixed),
        _generalises(fresh),
        *(
            Claim(
                id=claim.id,
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


def _control() -> tuple[Claim, ...]:
    structured, independent, fixed = "structured", "independent", "attention fixed"

    def none(results: SimulationResults) -> Finding:
        chance = chance_of_association(patches_of(results, independent))
        return judge_none(runs_of(results, independent), chance)

    return (
        _associated(structured, "Where the data have structure, the attention has it", "S3 abstract"),
        Claim(
            id="control-has-none",
            text="Where they have none (independent Gaussian patches, cubic-CNN labels), the attention has none",
            source="S3, negative control",
            paper="no association",
            rule=NONE,
            judge=none,
        ),
        Claim(
            id="control-is-learned",
            text="And yet that task is learned",
            source="S3, negative control",
            paper=f"about {100 * CONTROL_ERROR:.0f} % test error",
            rule=ERROR,
            judge=lambda results: judge_error(runs_of(results, independent), CONTROL_ERROR),
        ),
        Claim(
            id="without-association",
            text="On structured data, too, there are solutions without association that generalise "
            "(here: the attention left as it starts)",
            source="S3 abstract",
            paper="proved to exist",
            rule=WITHOUT,
            judge=lambda results: judge_without(runs_of(results, fixed)),
        ),
    )


def _sweep() -> tuple[Claim, ...]:
    def vanishes(results: SimulationResults) -> Finding:
        points = sweep_line(results, "data.probability").points
        if 0.0 not in points:
            raise InputError("no seed of q = 0 is done")
        risk = points[0.0]["test_risk"].to_numpy(dtype=np.float64)
        words = f"test risk {rounded(float(risk.min()), 5)} to {rounded(float(risk.max()), 5)}"
        return judge_every_seed(list(risk <= NO_RISK), list(risk <= LITTLE_RISK), words)

    def rare(results: SimulationResults) -> Finding:
        data = patches_of(results, BASE)
        return judge_rare(sweep_line(results, "data.probability").points, math.log(data.dim) / data.num_patches)

    return (
        Claim(
            id="enough-samples",
            text="With enough samples association is found",
            source="S3",
            paper="polynomially many in d",
            rule=ENOUGH,
            judge=lambda results: judge_enough(sweep_line(results, "descent.num_samples").points),
        ),
        Claim(
            id="rare-features",
            text="Association is found where other patches carry the feature rarely",
            source="S3 Assumption 1",
            paper="q of the order of log(d)/D",
            rule=RARE,
            judge=rare,
        ),
        Claim(
            id="risk-vanishes",
            text="III: the risk vanishes (where no patch carries the feature by chance, q = 0)",
            source="S3, dynamics",
            paper=PROVED,
            rule=EVERY_SEED,
            readings=(f"the test risk ends at {NO_RISK} or less", f"at {LITTLE_RISK} or less"),
            judge=vanishes,
        ),
    )


def _transfer() -> tuple[Claim, ...]:
    def fewer(way: str, text: str) -> Claim:
        def judge(results: SimulationResults) -> Finding:
            target = target_accuracy(results)
            times = fewer_times(results, way, target)
            kept, scratch = (samples_needed(results, each, target) for each in (way, BESIDE[way]))
            words = (
                f"for {percent(target)} %: {kept.in_words()} with the attention kept, {scratch.in_words()} from "
                f"scratch; {times_in_words(times.mean, times.low, times.high)} times fewer"
            )
            words += ", or more" if kept.is_at_the_least else ""
            return judge_fewer(times, words)

        return Claim(
            id=f"fewer-samples-{way}", text=text, source="S3 abstract", paper=NO_NUMBER, rule=FEWER, judge=judge
        )

    def everywhere(way: str, text: str) -> Claim:
        return Claim(
            id=f"everywhere-{way}",
            text=text,
            source="S3 abstract",
            paper=NO_NUMBER,
            rule=EVERYWHERE,
            judge=lambda results: judge_everywhere(advantage(results, way)),
        )

    return (
        fewer(KEPT, "A model that knows the sets learns a new feature from fewer samples than one that does not"),
        fewer(KEPT_LONG, "Also if v is trained for as many steps as from scratch"),
        fewer(KEPT_NOISY, "Also in more noise, where the feature itself takes many samples"),
        everywhere(KEPT, "Knowing the sets helps at any number of samples"),
        everywhere(KEPT_LONG, "Also if v is trained for as many steps as from scratch"),
        everywhere(KEPT_NOISY, "Also in more noise"),
    )


report_on(
    "association",
    paper=PAPER,
    claims=_association(),
    figures={"attention": attention_matrices, "phases": phase_curves},
)
report_on(
    "association-control",
    paper=PAPER,
    claims=_control(),
    figures={"attention": attention_matrices, "control": control_curves},
)
report_on("association-sweep", paper=PAPER, claims=_sweep(), figures={"sweep": sweep_panels})
report_on("transfer", paper=PAPER, claims=_transfer(), tables=[transfer_table], figures={"transfer": transfer_curves})
