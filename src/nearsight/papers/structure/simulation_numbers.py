"""S3's three phases as claims about the curves of every seed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.rules import Finding, judge_every_seed
from nearsight.report.simulations import attention_of, by_seed, conditions_of, curves_of, notes_of, patches_of, runs_of
from nearsight.report.tables import MISSING, Table, percent, rounded, seeds_in_words, share, with_interval
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.train.structure.descent import NEAR

LEARNED = 0.9
"""Share of its largest value at which v counts as learned."""
STILL, LITTLE = 0.1, 0.25
"""Shares of the largest γ − ρ that count as not moved, and as little."""
SMALL_PART = 0.1


@dataclass(frozen=True, kw_only=True)
class PhaseClaim:
    id: str
    text: str
    strict: str
    weak: str
    judge: Callable[[str], Callable[[SimulationResults], Finding]]
    """From the condition that is looked at to the judge."""


def gain_since_moving(results: SimulationResults, condition: str) -> MeanInterval:
    """Test accuracy at the end minus that at the beginning of the second phase, within seeds."""
    second, gains = by_seed(runs_of(results, condition), "phase_2"), []
    for seed, curve in curves_of(results, condition).items():
        then = curve.loc[curve["step"] == second[seed], "test_acc"].tolist()  # nothing where there is no second phase
        gains += [float(curve["test_acc"].iloc[-1]) - accuracy for accuracy in then]
    return mean_interval([gain for gain in gains if np.isfinite(gain)])  # none of a seed that has diverged


def _first(condition: str) -> Callable[[SimulationResults], Finding]:
    def judge(results: SimulationResults) -> Finding:
        moved = [_moved_when_learned(curve) for curve in curves_of(results, condition).values()]
        words = f"when v has {share(LEARNED)} of its length, γ − ρ has {share(min(moved))} to {share(max(moved))}"
        return judge_every_seed([m <= STILL for m in moved], [m <= LITTLE for m in moved], words)

    return judge


def _moved_when_learned(curve: pd.DataFrame) -> float:
    """The share of the largest γ − ρ that is there when α first has `LEARNED` of its largest value."""
    gap, alpha = curve["gamma"] - curve["rho"], curve["alpha"]
    when = int((alpha >= LEARNED * alpha.max()).to_numpy().argmax())
    return float(gap.iloc[when] / gap.max()) if gap.max() > 0 else 1.0


def _second(condition: str) -> Callable[[SimulationResults], Finding]:
    def judge(results: SimulationResults) -> Finding:
        sets = patches_of(results, condition).sets().numpy()
        within = (sets[:, None] == sets) & ~np.eye(len(sets), dtype=bool)
        between = sets[:, None] != sets
        strict, weak, gaps = [], [], []
        for seed in runs_of(results, condition).index:
            _, after = attention_of(results, condition, int(seed))
            strict.append(bool(after[within].min() > after[between].max()))
            gaps.append(float(after[within].mean() - after[between].mean()))
            weak.append(gaps[-1] > 0)
        return judge_every_seed(strict, weak, f"γ − ρ ends at {rounded(min(gaps), 2)} to {rounded(max(gaps), 2)}")

    return judge


def _third(condition: str) -> Callable[[SimulationResults], Finding]:
    def judge(results: SimulationResults) -> Finding:
        runs = runs_of(results, condition)
        best, best_accuracy = (float(runs[name].iloc[0]) for name in ("best_risk", "best_acc"))
        left, ends = [], []
        for curve in curves_of(results, condition).values():
            first, *_, last = curve["test_risk"].tolist()
            ends.append(last)
            left.append((last - best) / (first - best))
        words = (
            f"test risk ends at {rounded(min(ends))} to {rounded(max(ends))}, least possible {rounded(best)}; of what "
            f"was above that, {share(min(left))} to {share(max(left))} is left"
        )
        near = [bool(accuracy >= best_accuracy - NEAR) for accuracy in runs["test_acc"]]
        return judge_every_seed([part <= SMALL_PART for part in left], near, words)

    return judge


PHASE_CLAIMS = (
    PhaseClaim(
        id="phase-1",
        text="I: at first only v moves",
        strict=f"when α first has {share(LEARNED)} of its largest value, γ − ρ has at most {share(STILL)} of its own",
        weak=f"at most {share(LITTLE)}",
        judge=_first,
    ),
    PhaseClaim(
        id="phase-2",
        text="II: entries of A within sets outgrow those between",
        strict="at the end every entry within a set is larger than every entry between sets",
        weak="γ is larger than ρ",
        judge=_second,
    ),
    PhaseClaim(
        id="phase-3",
        text="III: the risk goes to its least value",
        strict=f"of the test risk above the least possible, at most {share(SMALL_PART)} of that at the start is left",
        weak=f"the test accuracy is within {100 * NEAR:.0f} percentage point of the best possible",
        judge=_third,
    ),
)


# The lines of a sweep: conditions that differ from the base in one setting.


BASE = "base"
FACTORS = {
    "data.num_sets": "L",
    "data.set_size": "C",
    "data.probability": "q",
    "data.noise": "σ",
    "descent.num_samples": "N",
}
"""Setting → its letter in S3."""


@dataclass(frozen=True, kw_only=True)
class SweepLine:
    """One setting varied, all others at the base."""

    setting: str
    points: dict[float, pd.DataFrame]
    """Value → the rows of its condition, in rising order; the base's among them."""
    base: float


def sweep_line(results: SimulationResults, setting: str) -> SweepLine:
    if BASE not in conditions_of(results):
        raise InputError(f"no seed of {BASE} is done")
    base = results.levels[BASE]
    points = {}
    for condition in conditions_of(results):
        levels = results.levels[condition]
        if all(levels[name] == base[name] for name in levels if name != setting):
            points[float(str(levels[setting]))] = runs_of(results, condition)
    return SweepLine(setting=setting, points=dict(sorted(points.items())), base=float(str(base[setting])))


# How many samples a given accuracy takes, with the attention kept and from scratch.


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


def transfer_table(results: SimulationResults) -> Table:
    """Test accuracy by the number of samples, and how many the stated accuracy takes."""
    tables = {way: accuracies(results, way) for way in WAYS}
    target = target_accuracy(results)
    sizes = sorted({int(size) for table in tables.values() for size in table.index})
    numbers, shown = [], []
    for size in sizes:
        found = {way: mean_interval(table.loc[size].dropna()) for way, table in tables.items() if size in table.index}
        numbers += [
            {"way": way, "samples": size, "n": i.n, "test_acc": i.mean, "low": i.low, "high": i.high}
            for way, i in found.items()
        ]
        cells = {WAYS[way]: with_interval(found[way], scale=100, digits=2) if way in found else MISSING for way in WAYS}
        shown.append({"samples": f"{size:,}", **cells})
    needed = {way: samples_needed(results, way, target) for way in WAYS}
    shown.append({"samples": f"needed for {percent(target)} %", **{WAYS[w]: n.in_words() for w, n in needed.items()}})
    ratios = {way: fewer_times(results, way, target) for way in BESIDE}
    times = {WAYS[way]: times_in_words(r.mean, r.low, r.high) for way, r in ratios.items()}
    shown.append({"samples": "times fewer than from scratch", **dict.fromkeys(WAYS.values(), MISSING), **times})
    return Table(
        name="transfer",
        title=f"{results.name}: test accuracy on a new feature",
        numbers=pd.DataFrame(numbers),
        shown=pd.DataFrame(shown),
        notes=(
            "Accuracies in per cent; ± is half the 95 % interval of the mean over seeds. Needed: the least number that "
            "was tried which reaches the accuracy, a point below the best possible; geometric mean over seeds with its "
            "95 % interval.",
            *notes_of(results),
        ),
    )


def times_in_words(mean: float, low: float, high: float) -> str:
    if not np.isfinite(mean):
        return MISSING
    return f"{mean:,.1f}" if not np.isfinite(low) else f"{mean:,.1f} ({low:,.1f} to {high:,.1f})"
