"""How many samples a given accuracy takes, with the attention kept and from scratch."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.structure.numbers import conditions_of, patches_of
from nearsight.report.study.notes import seeds_in_words
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.train.structure.descent import NEAR

SCRATCH, KEPT, KEPT_LONG = "scratch", "kept", "kept long"
SCRATCH_NOISY, KEPT_NOISY = "scratch noisy", "kept noisy"
WAYS = {
    SCRATCH: "from scratch: A and v learned",
    KEPT: "A kept, v learned",
    KEPT_LONG: "A kept, v learned for as long as from scratch",
    SCRATCH_NOISY: "from scratch, more noise",
    KEPT_NOISY: "A kept, more noise",
}
"""How v comes to its feature, as conditions are called before their number of samples, and in words."""
BESIDE = {KEPT: SCRATCH, KEPT_LONG: SCRATCH, KEPT_NOISY: SCRATCH_NOISY}
"""What is compared with what."""


def target_accuracy(results: SimulationResults) -> float:
    """Within a point of the best possible."""
    return float(results.runs["best_acc"].iloc[0]) - NEAR


def noise_of(results: SimulationResults, way: str) -> float:
    """Its σ."""
    conditions = [condition for condition in conditions_of(results) if condition.rpartition(" ")[0] == way]
    if not conditions:
        raise InputError(f"no seed of {way} is done")
    return patches_of(results, conditions[0]).noise_std


def accuracies(results: SimulationResults, way: str) -> pd.DataFrame:
    """Test accuracy: a row per number of samples, in rising order, and a column per seed."""
    wanted = {
        condition: int(str(results.levels[condition]["descent.num_samples"]))
        for condition in conditions_of(results)
        if condition.rpartition(" ")[0] == way and "descent.num_samples" in results.levels[condition]
    }
    runs = results.runs[results.runs["condition"].isin(wanted)]
    if runs.empty:
        raise InputError(f"no seed of {way} is done")
    return runs.assign(samples=runs["condition"].map(wanted)).pivot(index="samples", columns="seed", values="test_acc")


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The samples that an accuracy takes, seed by seed."""

    samples: "pd.Series[float]"
    """By seed: the least number tried that reaches the accuracy; infinite where none does."""
    least: int
    """The smallest number that was tried: less cannot be told from it."""
    most: int

    @property
    def mean(self) -> MeanInterval:
        """The geometric mean and its interval; neither where some seed needs more than was tried."""
        return _geometric(self.samples)

    @property
    def is_at_the_least(self) -> bool:
        """Whether the smallest number that was tried was enough for every seed."""
        return bool((self.samples == self.least).all())

    def in_words(self) -> str:
        beyond = int(np.isinf(self.samples).sum())
        seeds = seeds_in_words([len(self.samples)])
        if beyond:
            return f"more than {self.most:,} in {beyond} of {seeds}"
        if self.is_at_the_least:
            return f"{self.least} or fewer in {'all ' if len(self.samples) > 1 else ''}{seeds}"
        mean = self.mean
        if not mean.has_interval:
            return f"{mean.mean:,.0f}"
        return f"{mean.mean:,.0f} ({mean.low:,.0f} to {mean.high:,.0f})"


def samples_needed(results: SimulationResults, way: str, accuracy: float) -> Needed:
    table = accuracies(results, way)
    numbers = table.index.to_numpy(dtype=np.float64)
    samples = (table >= accuracy).apply(
        lambda reached: float(numbers[reached.to_numpy(dtype=bool)].min(initial=np.inf))
    )
    return Needed(samples=samples, least=int(numbers.min()), most=int(numbers.max()))


def fewer_times(results: SimulationResults, way: str, accuracy: float) -> MeanInterval:
    """How many times fewer samples `way` takes than from scratch: the geometric mean over seeds, and its interval.

    A seed that needs more than was tried from scratch counts with the most that was tried, which favours scratch. Where
    one needs more than that with `way`, there is no answer: NaN.
    """
    scratch, ours = samples_needed(results, BESIDE[way], accuracy), samples_needed(results, way, accuracy)
    ratio = (scratch.samples.clip(upper=scratch.most) / ours.samples).dropna()
    return _geometric(ratio)


def advantage(results: SimulationResults, way: str) -> dict[int, MeanInterval]:
    """Test accuracy of `way` minus that from scratch, within seeds, by the number of samples."""
    differences = (accuracies(results, way) - accuracies(results, BESIDE[way])).dropna(how="all")
    if differences.empty:
        raise InputError(f"no number of samples has a seed that is done both ways, {way} and {BESIDE[way]}")
    return {int(str(size)): mean_interval(row.dropna()) for size, row in differences.iterrows()}


def _geometric(of_seeds: "pd.Series[float]") -> MeanInterval:
    """Mean and Student's t interval of the logarithms; NaN where a value has none."""
    values = np.asarray(of_seeds, dtype=np.float64)
    has_logarithms = bool((np.isfinite(values) & (values > 0)).all())
    found = mean_interval(np.log10(values) if has_logarithms else np.full(len(values), np.nan))
    mean, low, high = (float(10**value) for value in (found.mean, found.low, found.high))
    return MeanInterval(n=found.n, mean=mean, std=float("nan"), low=low, high=high)
