"""Does gradient descent on the loss alone find which patches belong together, and in which phases? (S3)"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nearsight.papers.structure import PAPER
from nearsight.papers.structure.simulated import (
    DOTTED,
    POINT,
    PROVED,
    TWO_READINGS,
    WITH_HIGH_PROBABILITY,
    accuracies_of,
    associated,
    attention_matrices,
    bands_in_words,
    draw_band,
    judge_proved,
    judge_readings,
    legend_of_lines,
    name_steps,
    simulation_of,
)
from nearsight.report.claims import Claim
from nearsight.report.figures.looks import model_style
from nearsight.report.figures.style import GRID, INK, house_style, light_grid
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.rules import INFINITE, Finding, judge_sign, judge_within
from nearsight.report.simulations import (
    attention_of,
    by_seed,
    conditions_of,
    curves_of,
    median_or_none,
    patches_of,
    runs_of,
)
from nearsight.report.studies import report_on
from nearsight.report.tables import percent, rounded, share, with_interval
from nearsight.study import Simulation
from nearsight.study.recipes import simulation
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.train.structure import Descent, StructureRun
from nearsight.train.structure.descent import MOVED, NEAR

_FIXED, _FRESH = "fixed sample", "fresh samples"


@simulation("association")
def association(*, seeds: int = 10) -> Simulation:
    """Does gradient descent on the loss alone find which patches belong together, and in which phases? (S3)

    Run     nearsight study run association
    Cost    20 cells; one core: 2.5 minutes
    Result  all patches associated in 10 of 10 seeds, 90.8 % where 90.9 % is possible
            -> results/spatial-structure/association
    """
    conditions = {
        _FIXED: StructureRun(),
        _FRESH: StructureRun(descent=Descent(samples="fresh", num_samples=2000)),
    }
    return simulation_of(conditions, seeds, keep=("curves", "attention"))


def judge_generalises(runs: pd.DataFrame, gain: Estimate) -> Finding:
    """`gain`: the accuracy at the end minus that at the beginning of the second phase."""
    accuracy, best = mean_interval(accuracies_of(runs)), float(runs["best_acc"].iloc[0])
    words = (
        f"{with_interval(accuracy, scale=100, digits=2)} %, best possible {percent(best)} %; "
        f"{with_interval(gain, scale=100, digits=2, signed=True)} points since the attention began to move"
    )
    strict, weak = judge_within(accuracy, best - NEAR, INFINITE, words=""), judge_sign(gain, sign=1, words="")
    return judge_readings(strict, weak, accuracy, words)


def gain_since_moving(results: SimulationResults, condition: str) -> Estimate:
    """Test accuracy at the end minus that at the beginning of the second phase, within seeds."""
    second, gains = by_seed(runs_of(results, condition), "phase_2"), []
    for seed, curve in curves_of(results, condition).items():
        then = curve.loc[curve["step"] == second[seed], "test_acc"].tolist()  # nothing where there is no second phase
        gains += [float(curve["test_acc"].iloc[-1]) - accuracy for accuracy in then]
    return mean_interval([gain for gain in gains if np.isfinite(gain)])  # none of a seed that has diverged


_LEARNED = 0.9
"""Share of its largest value at which v counts as learned."""
_STILL, _LITTLE = 0.1, 0.25
"""Shares of the largest γ − ρ that count as not moved, and as little."""
_SMALL_PART = 0.1


def phase_claims(condition: str) -> tuple[Claim, ...]:
    """S3's three phases as claims about the curves of every seed."""

    def phase(
        number: int, text: str, judge: Callable[[str, SimulationResults], Finding], strict: str, weak: str
    ) -> Claim:
        return Claim(
            id=f"phase-{number}",
            text=text,
            source="S3, dynamics",
            paper=PROVED,
            rule=WITH_HIGH_PROBABILITY,
            readings=(strict, weak),
            judge=partial(judge, condition),
        )

    return (
        phase(
            1,
            "I: at first only v moves",
            _judge_first,
            f"when α first has {share(_LEARNED)} of its largest value, γ − ρ has at most {share(_STILL)} of its own",
            f"at most {share(_LITTLE)}",
        ),
        phase(
            2,
            "II: entries of A within sets outgrow those between",
            _judge_second,
            "at the end every entry within a set is larger than every entry between sets",
            "γ is larger than ρ",
        ),
        phase(
            3,
            "III: the risk goes to its least value",
            _judge_third,
            f"of the test risk above the least possible, at most {share(_SMALL_PART)} of that at the start is left",
            f"the test accuracy is within {POINT} of the best possible",
        ),
    )


def _judge_first(condition: str, results: SimulationResults) -> Finding:
    moved = []
    for curve in curves_of(results, condition).values():
        gap, alpha = curve["gamma"] - curve["rho"], curve["alpha"]
        when = int((alpha >= _LEARNED * alpha.max()).to_numpy().argmax())
        moved.append(float(gap.iloc[when] / gap.max()) if gap.max() > 0 else 1.0)
    words = f"when v has {share(_LEARNED)} of its length, γ − ρ has {share(min(moved))} to {share(max(moved))}"
    return judge_proved([m <= _STILL for m in moved], [m <= _LITTLE for m in moved], words)


def _judge_second(condition: str, results: SimulationResults) -> Finding:
    sets = patches_of(results, condition).sets().numpy()
    within = (sets[:, None] == sets) & ~np.eye(len(sets), dtype=bool)
    between = sets[:, None] != sets
    strict, gaps = [], []
    for seed in runs_of(results, condition).index:
        _, after = attention_of(results, condition, int(seed))
        strict.append(bool(after[within].min() > after[between].max()))
        gaps.append(float(after[within].mean() - after[between].mean()))
    words = f"γ − ρ ends at {rounded(min(gaps), 2)} to {rounded(max(gaps), 2)}"
    return judge_proved(strict, [gap > 0 for gap in gaps], words)


def _judge_third(condition: str, results: SimulationResults) -> Finding:
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
    return judge_proved([part <= _SMALL_PART for part in left], near, words)


def _generalises(condition: str) -> Claim:
    def judge(results: SimulationResults) -> Finding:
        return judge_generalises(runs_of(results, condition), gain_since_moving(results, condition))

    return Claim(
        id=f"generalises-{condition}",
        text=f"It learns the structure while generalising ({condition})",
        source="S3 abstract",
        paper=PROVED,
        rule=TWO_READINGS,
        readings=(
            f"the mean test accuracy is at most {POINT} below the best that any classifier can reach (one-sided t)",
            "it is higher than when the attention began to move (t of the differences within seeds, two-sided)",
        ),
        judge=judge,
    )


_CLAIMS = (
    associated(_FIXED, "Gradient descent on the empirical risk alone associates every patch", "S3 Def. 2.2"),
    associated(_FRESH, "So does gradient descent on the population's risk", "S3 Def. 2.2"),
    _generalises(_FIXED),
    _generalises(_FRESH),
    *phase_claims(_FIXED),
)


@dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    quantities: Mapping[str, str]
    """Column of the curves → its name in the legend."""
    best: str | None = None
    """Column of the runs with the best value there is."""
    percent: bool = False


_PANELS = (
    _Panel(title="v: the feature", quantities={"alpha": "α, along the feature", "across": "across it"}),
    _Panel(title="A: the sets", quantities={"gamma": "γ, within sets", "rho": "ρ, between sets"}),
    _Panel(title="risk", quantities={"test_risk": "test", "train_risk": "training"}, best="best_risk"),
    _Panel(
        title="accuracy, association",
        quantities={"test_acc": "test accuracy", "associated": "patches associated"},
        best="best_acc",
        percent=True,
    ),
)
_NUMERALS = ("I", "II", "III")


def phase_curves(results: SimulationResults) -> Drawing:
    """Feature alignment, attention within and between sets, risk and accuracy, over steps."""
    conditions = conditions_of(results)
    with house_style():
        figure = Figure(figsize=(1.2 + 3.4 * len(conditions), 8.2), layout="constrained")
        panels = figure.subplots(len(_PANELS), len(conditions), squeeze=False, sharex="col", sharey="row")
        for column, condition in enumerate(conditions):
            curves, runs = curves_of(results, condition), runs_of(results, condition)
            borders = [median_or_none(runs[name]) for name in ("phase_2", "phase_3")]
            last = float(max(curve["step"].max() for curve in curves.values()))
            for row, panel in enumerate(_PANELS):
                axes = panels[row, column]
                _draw_borders(axes, borders, last, with_numerals=row == 0)
                for index, name in enumerate(panel.quantities):
                    draw_band(axes, list(curves.values()), name, model_style(index), gid=f"{name}-{condition}")
                if panel.best is not None:
                    axes.axhline(float(runs[panel.best].iloc[0]), **DOTTED)
                light_grid(axes, "y")
            panels[0, column].set_title(condition, pad=18)
            name_steps(panels[-1, column])
        for row, panel in enumerate(_PANELS):
            panels[row, 0].set_ylabel(panel.title)
            if panel.percent:
                panels[row, 0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            names = list(panel.quantities.values())
            legend_of_lines(panels[row, -1], names, loc="center left", bbox_to_anchor=(1.0, 0.5))
    words = (
        f"{bands_in_words(results)} Vertical lines: median step at which a phase begins. II: γ − ρ reaches {MOVED}. "
        f"III: all patches are associated and the test accuracy is within {100 * NEAR:.0f} point of the best possible. "
        "Dotted: the best possible."
    )
    add_footnote(figure, [words])
    return Drawing(figure=figure, with_round_places=True, caption=f"How v and A learn. {words}")


def _draw_borders(axes: Axes, borders: Sequence[float], last: float, *, with_numerals: bool) -> None:
    """A line where a phase begins, and above the first panel the phases' numerals."""
    ends = [0.0, *(border for border in borders if np.isfinite(border)), last]
    for border in ends[1:-1]:
        axes.axvline(border, color=INK, linewidth=0.8, zorder=1)
    for number, (low, high) in enumerate(pairwise(ends)):
        if number % 2:
            axes.axvspan(low, high, facecolor=GRID, alpha=0.35, linewidth=0, zorder=0)
        if with_numerals:
            axes.annotate(
                _NUMERALS[number],
                ((low + high) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
                fontweight="bold",
                color=INK,
            )


report_on(
    "association",
    paper=PAPER,
    claims=_CLAIMS,
    figures={"attention": attention_matrices, "phases": phase_curves},
)
