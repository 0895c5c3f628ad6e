"""With the sets known and the feature new, how many samples does it take, and how many from scratch? (S3, transfer)"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from nearsight.data.structured import StructuredPatches
from nearsight.errors import InputError
from nearsight.papers.structure import PAPER
from nearsight.papers.structure.simulated import DOTTED, QUICK, draw_shares, simulation_of
from nearsight.report.claims import OURS, Claim, asked
from nearsight.report.figures.looks import ModelStyle, model_style
from nearsight.report.figures.style import MUTED, add_legend, house_style, light_grid
from nearsight.report.marks import FEWEST, Drawing, add_footnote, dots_and_bars, draw_dots
from nearsight.report.rules import ALL_OF, NO, SIGN, Finding, all_of, judge_sign
from nearsight.report.simulations import conditions_of, notes_of, patches_of
from nearsight.report.studies import report_on
from nearsight.report.tables import MISSING, Row, Table, percent, seeds_in_words, with_interval
from nearsight.study import Simulation
from nearsight.study.recipes import simulation
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.study.statistics.significance import p_of_most
from nearsight.train.structure import StructureRun
from nearsight.train.structure.descent import NEAR

SCRATCH, KEPT, _KEPT_LONG = "scratch", "kept", "kept long"
_SCRATCH_NOISY, _KEPT_NOISY = "scratch noisy", "kept noisy"
_WAYS = {
    SCRATCH: "from scratch: A and v learned",
    KEPT: "A kept, v learned",
    _KEPT_LONG: "A kept, v learned for as long as from scratch",
    _SCRATCH_NOISY: "from scratch, more noise",
    _KEPT_NOISY: "A kept, more noise",
}
"""How v comes to its feature, as conditions are called before their number of samples, and in words."""
_COMPARED = {KEPT: SCRATCH, _KEPT_LONG: SCRATCH, _KEPT_NOISY: _SCRATCH_NOISY}
"""What is compared with what."""
_LEARNED_FROM = 2000
"""Fresh samples at each step that teach the attention which is kept, as in `association`."""


@simulation("transfer")
def transfer(*, seeds: int = 10) -> Simulation:
    """With the sets known and the feature new, how many samples does it take, and how many from scratch? (S3, transfer)

    Run     nearsight study run transfer
    Cost    550 cells; one core: 10 minutes
    Result  2 samples or fewer with the attention kept, 1,262 (630 to 2,527) from scratch; with five times the noise
            the feature itself takes 2,000, and the sets are worth +7.6 ± 0.5 points from 100, +0.07 ± 0.06 from 5,000
            -> results/spatial-structure/transfer
    """
    scratch = dataclasses.replace(QUICK, num_test=40_000, record_every=100)
    kept_long = dataclasses.replace(scratch, attention_lr=0.0)
    # v is found within the first phase, about 70 steps; longer, it begins to fit the noise.
    kept = dataclasses.replace(kept_long, steps=100)
    quiet, noisy = StructuredPatches(noise=0.1), StructuredPatches(noise=0.5)
    ways = {
        SCRATCH: (quiet, scratch, 0),
        KEPT: (quiet, kept, _LEARNED_FROM),
        _KEPT_LONG: (quiet, kept_long, _LEARNED_FROM),
        _SCRATCH_NOISY: (noisy, scratch, 0),
        _KEPT_NOISY: (noisy, kept, _LEARNED_FROM),
    }
    conditions = {
        f"{way} {n}": StructureRun(
            data=data, feature=1, kept_from=learned_from, descent=dataclasses.replace(descent, num_samples=n)
        )
        for way, (data, descent, learned_from) in ways.items()
        for n in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    }
    return simulation_of(conditions, seeds)


def _accuracies(results: SimulationResults, way: str) -> pd.DataFrame:
    """Test accuracy: a row per number of samples, in rising order, and a column per seed."""
    levels = {name: results.levels[name] for name in _conditions(results, way)}
    sizes = {name: int(str(of["descent.num_samples"])) for name, of in levels.items() if "descent.num_samples" in of}
    if not sizes:
        raise InputError(f"no seed of {way} is done")
    runs = results.runs[results.runs["condition"].isin(sizes)]
    return runs.assign(samples=runs["condition"].map(sizes)).pivot(index="samples", columns="seed", values="test_acc")


def _conditions(results: SimulationResults, way: str) -> list[str]:
    return [condition for condition in conditions_of(results) if condition.rpartition(" ")[0] == way]


def _noise(results: SimulationResults, way: str) -> float:
    """Its σ."""
    conditions = _conditions(results, way)
    if not conditions:
        raise InputError(f"no seed of {way} is done")
    return patches_of(results, conditions[0]).noise_std


def _target(results: SimulationResults) -> float:
    """An accuracy within a point of the best possible."""
    return float(results.runs["best_acc"].iloc[0]) - NEAR


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The samples that an accuracy takes, seed by seed."""

    samples: "pd.Series[float]"
    """By seed: the least number tried that reaches the accuracy; infinite where none does."""
    least: int
    """The smallest number that was tried: less cannot be distinguished from it."""
    most: int

    @property
    def mean(self) -> Estimate:
        """The geometric mean and its interval; neither where some seed needs more than was tried."""
        return _powers(_logarithms(self.samples))

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
        return _in_words(self.mean, digits=0)


def samples_needed(results: SimulationResults, way: str, accuracy: float) -> Needed:
    table = _accuracies(results, way)
    numbers = table.index.to_numpy(dtype=np.float64)
    samples = (table >= accuracy).apply(
        lambda reached: float(numbers[reached.to_numpy(dtype=bool)].min(initial=np.inf))
    )
    return Needed(samples=samples, least=int(numbers.min()), most=int(numbers.max()))


def log_times(results: SimulationResults, way: str, accuracy: float) -> Estimate:
    """How many times fewer samples `way` takes than from scratch: the mean of its logarithm over seeds.

    A seed that needs more than was tried from scratch counts with the most that was tried, which favours scratch. Where
    one needs more than that with `way`, there is no answer: NaN.
    """
    scratch, ours = samples_needed(results, _COMPARED[way], accuracy), samples_needed(results, way, accuracy)
    ratio = (scratch.samples.clip(upper=scratch.most) / ours.samples).dropna()
    return _logarithms(ratio)


def fewer_times(results: SimulationResults, way: str, accuracy: float) -> Estimate:
    """The geometric mean over seeds, and its interval."""
    return _powers(log_times(results, way, accuracy))


def advantage(results: SimulationResults, way: str) -> dict[int, Estimate]:
    """Test accuracy of `way` minus that from scratch, within seeds, by the number of samples."""
    differences = (_accuracies(results, way) - _accuracies(results, _COMPARED[way])).dropna(how="all")
    if differences.empty:
        raise InputError(f"no number of samples has a seed with both runs, {way} and {_COMPARED[way]}")
    return {int(str(size)): mean_interval(row.dropna()) for size, row in differences.iterrows()}


def _logarithms(of_seeds: "pd.Series[float]") -> Estimate:
    """Their mean and Student's t interval; NaN where a value has none."""
    values = np.asarray(of_seeds, dtype=np.float64)
    has_logarithms = bool((np.isfinite(values) & (values > 0)).all())
    return mean_interval(np.log10(values) if has_logarithms else np.full(len(values), np.nan))


def _powers(logarithms: Estimate) -> Estimate:
    """The geometric mean and its interval."""
    mean, low, high = (float(10**value) for value in (logarithms.value, logarithms.low, logarithms.high))
    return Estimate(n=logarithms.n, value=mean, low=low, high=high)


def _in_words(found: Estimate, *, digits: int) -> str:
    """ "1,262 (630 to 2,527)"."""
    if not np.isfinite(found.value):
        return MISSING
    mean, low, high = (f"{value:,.{digits}f}" for value in (found.value, found.low, found.high))
    return f"{mean} ({low} to {high})" if found.has_interval else mean


_FEWER = (
    f"{SIGN} Here: the logarithm of how many times fewer samples are needed with the attention kept. Few numbers of "
    "samples were tried, so that seeds may agree by chance: no p-value counts as smaller than that of a sign test of "
    "all seeds. A seed that needs more than was tried counts with the most that was, from scratch; with the attention "
    "kept it leaves the claim undecided."
)


def judge_fewer(logarithms: Estimate, words: str) -> Finding:
    """`logarithms`: of how many times fewer samples are needed."""
    times = _powers(logarithms)
    found = judge_sign(logarithms, sign=1, words=words)
    of_signs = p_of_most(found.n, found.n)

    def decides(n: int, alpha: float) -> bool:
        return p_of_most(n, n) <= alpha and found.decides is not None and found.decides(n, alpha)

    return dataclasses.replace(
        found,
        value=times.value,
        low=times.low,
        high=times.high,
        p=max(found.p, of_signs),
        p_against=max(found.p_against, of_signs),
        decides=decides,
    )


_EVERYWHERE = (
    f"{ALL_OF} Here: at every number of samples that was tried the test accuracy is higher than from scratch (t of the "
    "differences within seeds, two-sided)."
)


def judge_everywhere(differences: dict[int, Estimate]) -> Finding:
    """`differences`: in accuracy, by the number of samples."""
    higher = {size: d.value > 0 and (d.n == 1 or d.excludes_zero) for size, d in differences.items()}
    worst = min(differences, key=lambda size: differences[size].value)
    except_for = ", ".join(f"{size:,}" for size, is_higher in higher.items() if not is_higher)
    words = f"higher at {sum(higher.values())} of {len(higher)} numbers of samples"
    words += f", not at {except_for}" if except_for else ""
    least = differences[worst]
    words += f"; least difference {with_interval(least, scale=100, digits=2, signed=True)} points, at {worst:,}"
    parts = [judge_sign(each, sign=1, words="") for each in differences.values()]
    found = all_of(parts, words, value=least.value)
    return dataclasses.replace(found, low=least.low, high=least.high, opposite=NO)


def _fewer(way: str, text: str) -> Claim:
    def judge(results: SimulationResults) -> Finding:
        target = _target(results)
        logarithms = log_times(results, way, target)
        kept, scratch = (samples_needed(results, each, target) for each in (way, _COMPARED[way]))
        words = (
            f"for {percent(target)} %: {kept.in_words()} with the attention kept, {scratch.in_words()} from scratch; "
            f"{_in_words(_powers(logarithms), digits=1)} times fewer{', or more' if kept.is_at_the_least else ''}"
        )
        return judge_fewer(logarithms, words)

    paper = "no number given"
    return Claim(id=f"fewer-samples-{way}", text=text, source="S3 abstract", paper=paper, rule=_FEWER, judge=judge)


def _everywhere(way: str, text: str) -> Claim:
    """Of our own: that it takes fewer samples does not say that it helps with any number of them."""

    @asked(f"everywhere-{way}", text, source=OURS, rule=_EVERYWHERE)
    def question(results: SimulationResults) -> Finding:
        return judge_everywhere(advantage(results, way))

    return question


_CLAIMS = (
    _fewer(KEPT, "A model that knows the sets learns a new feature from fewer samples than one that does not"),
    _fewer(_KEPT_LONG, "Also if v is trained for as many steps as from scratch"),
    _fewer(_KEPT_NOISY, "Also in more noise, where the feature itself takes many samples"),
    _everywhere(KEPT, "Does knowing the sets help at every number of samples?"),
    _everywhere(_KEPT_LONG, "And if v is trained for as many steps as from scratch?"),
    _everywhere(_KEPT_NOISY, "And in more noise?"),
)


def transfer_table(results: SimulationResults) -> Table:
    """Test accuracy by the number of samples, and how many the stated accuracy takes."""
    tables, target = {way: _accuracies(results, way) for way in _WAYS}, _target(results)
    rows, shown = [], []
    for size in sorted({int(size) for table in tables.values() for size in table.index}):
        words = Row().show("samples", f"{size:,}")
        for way, title in _WAYS.items():
            words.show(title, MISSING)
            if size in tables[way].index:
                found = mean_interval(tables[way].loc[size].dropna())
                ends = {"test_acc": found.value, "low": found.low, "high": found.high}
                rows.append(Row(way=way, samples=size, n=found.n).keep(**ends))
                words.show(title, with_interval(found, scale=100, digits=2))
        shown.append(words)
    needed, fewer = Row().show("samples", f"needed for {percent(target)} %"), Row()
    fewer.show("samples", "times fewer than from scratch")
    for way, title in _WAYS.items():
        needed.show(title, samples_needed(results, way, target).in_words())
        fewer.show(title, _in_words(fewer_times(results, way, target), digits=1) if way in _COMPARED else MISSING)
    return Table.of(
        "transfer",
        f"{results.name}: test accuracy on a new feature",
        rows,
        shown=[*shown, needed, fewer],
        notes=(
            "Accuracies in per cent; ± is half the 95 % interval of the mean over seeds. Needed: the least number that "
            "was tried which reaches the accuracy, a point below the best possible; geometric mean over seeds with its "
            "95 % interval.",
            *notes_of(results),
        ),
    )


_PANELS = ((SCRATCH, KEPT, _KEPT_LONG), (_SCRATCH_NOISY, _KEPT_NOISY))
"""The ways of each panel, in the order of their looks."""
_LIMITS = (0.7, 8000.0)


def transfer_curves(results: SimulationResults) -> Drawing:
    """Test accuracy over samples, and the samples that the stated accuracy takes, for each way to learn."""
    there = {name.rpartition(" ")[0] for name in conditions_of(results)}
    shown = [[way for way in ways if way in there] for ways in _PANELS]
    if not all(shown):
        raise InputError("not every noise has a condition that is done")
    target, best = _target(results), float(results.runs["best_acc"].iloc[0])
    looks = {way: model_style(place) for ways in _PANELS for place, way in enumerate(ways)}
    with house_style():
        figure = Figure(figsize=(9.2, 3.8), layout="constrained")
        quiet, noisy, needed = figure.subplots(1, 3, sharex=True, width_ratios=(1.25, 1.25, 1))
        for panel, ways in zip((quiet, noisy), shown, strict=True):
            panel.axhline(best, **DOTTED, zorder=1)
            panel.axhline(target, **{**DOTTED, "linestyle": (0, (4, 2))}, zorder=1)
            for way in ways:
                table = _accuracies(results, way)
                sizes, seeds = list(table.index.astype(float)), [row.dropna().tolist() for _, row in table.iterrows()]
                found = [mean_interval(of_seeds) for of_seeds in seeds]
                draw_shares(panel, sizes, found, looks[way], seeds=seeds, gid=f"accuracy-{way}")
            panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            panel.set_title(f"test accuracy, σ = {_noise(results, ways[0]):g}")
            light_grid(panel, "y")
        _draw_all_needed(needed, results, shown, looks, target)
        quiet.set_xscale("log")
        quiet.set_xlim(_LIMITS)
        for panel in (quiet, noisy, needed):
            panel.set_xticks([1, 10, 100, 1000])
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("training samples")
        handles = [looks[way].handle(markersize=4.5) for way in shown[0]]
        add_legend(figure, handles, [_WAYS[way] for way in shown[0]], loc="outside upper left", ncols=len(shown[0]))
    counts = [_accuracies(results, way).shape[1] for ways in shown for way in ways]
    words = (
        f"Mean over {seeds_in_words(counts)}{dots_and_bars(counts)}; dotted: the best possible accuracy; dashed: a "
        "point below. Right: the geometric mean; an arrow: more than was tried."
    )
    add_footnote(figure, [words])
    caption = f"Test accuracy on a new feature, with the sets known and from scratch. {words}"
    return Drawing(figure=figure, with_round_places=True, caption=caption)


def _draw_all_needed(
    axes: Axes, results: SimulationResults, shown: list[list[str]], looks: dict[str, ModelStyle], target: float
) -> None:
    """A line per way, the noises apart."""
    height = 0.0
    for ways in shown:
        axes.annotate(
            f"σ = {_noise(results, ways[0]):g}",
            (0.0, height - 0.55),
            xycoords=("axes fraction", "data"),
            fontsize=8.0,
            color=MUTED,
        )
        for way in ways:
            _draw_needed(axes, samples_needed(results, way, target), way, looks[way], height)
            height += 1.0
        height += 0.5
    axes.set_ylim(height - 0.9, -1.0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(f"samples needed for {100 * target:.1f} %")
    light_grid(axes, "x")


def _draw_needed(axes: Axes, needed: Needed, way: str, style: ModelStyle, height: float) -> None:
    reached = needed.samples[np.isfinite(needed.samples)].to_numpy()
    spread = np.linspace(0.18, 0.5, len(reached)) if len(reached) > 1 else np.full(len(reached), 0.24)
    look = style.look_with(linestyle="none")
    draw_dots(axes, reached, height + spread, style.colour, f"seeds-{way}")
    mean = needed.mean
    if np.isfinite(mean.value):
        if mean.n >= FEWEST:
            axes.plot([mean.low, mean.high], [height] * 2, color=style.colour, linewidth=5, alpha=0.35)
        axes.plot(mean.value, height, **look, markersize=7.5, gid=f"mean-{way}")
        words, place = f"{mean.value:,.0f}", mean.value
    else:
        axes.plot(needed.most, height, **{**look, "marker": ">"}, markersize=7.5, gid=f"beyond-{way}")
        words, place = f"> {needed.most:,}", float(needed.most)
    is_far = place > 100
    axes.annotate(
        words,
        (place, height),
        xytext=(-12 if is_far else 10, 7),
        textcoords="offset points",
        ha="right" if is_far else "left",
        va="center",
        fontsize=8.5,
        fontweight="bold",
    )


report_on("transfer", paper=PAPER, claims=_CLAIMS, tables=[transfer_table], figures={"transfer": transfer_curves})
