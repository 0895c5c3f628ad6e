"""S3 as simulations: a model that is given only a loss finds which patches belong together, and we can watch it.

All seeds of a condition run as one tensor program on a processor. The constants are those of a public port of S3's
model, not the authors' (assumed), and S3's single step size is two here: v's is as large as it can be without
diverging, and with the same for A the second phase would take some hundred thousand steps.
"""

import dataclasses

from nearsight.data.structured import GaussianPatches, StructuredPatches
from nearsight.recipes.registry import simulation
from nearsight.study import Simulation
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
