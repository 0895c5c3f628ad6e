"""How many sets, how large, how rare, how noisy, from how many samples: where is association found? (S3)"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from nearsight.data.structured import StructuredPatches
from nearsight.errors import InputError
from nearsight.papers.structure import PAPER
from nearsight.papers.structure.simulated import (
    ALMOST_ALL,
    DOTTED,
    PROVED,
    QUICK,
    TWO_READINGS,
    WITH_HIGH_PROBABILITY,
    draw_shares,
    judge_proved,
    judge_readings,
    simulation_of,
)
from nearsight.report.claims import Claim
from nearsight.report.figures.looks import model_style
from nearsight.report.figures.style import add_legend, house_style, light_grid
from nearsight.report.marks import Drawing, add_footnote, dots_and_bars
from nearsight.report.rules import LEANING, Finding, all_of
from nearsight.report.simulations import conditions_of, patches_of, runs_of
from nearsight.report.studies import report_on
from nearsight.report.tables import rounded, seeds_in_words, share
from nearsight.study import Simulation
from nearsight.study.recipes import simulation
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import mean_interval
from nearsight.study.statistics.significance import p_of_most, share_interval
from nearsight.train.structure import StructureRun

_BASE = "base"
_CHANCE = 0.46
"""ln(d)/D of the default patches, held where D varies."""


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
    sizes = {f"N = {n}": dataclasses.replace(QUICK, num_samples=n) for n in (250, 500, 1000, 2000)}
    conditions = {
        _BASE: StructureRun(data=base, descent=QUICK),
        **{label: StructureRun(data=data, descent=QUICK) for label, data in patches.items()},
        **{label: StructureRun(data=base, descent=descent) for label, descent in sizes.items()},
    }
    return simulation_of(conditions, seeds)


_SETTINGS = {
    "data.num_sets": ("L", "sets, L"),
    "data.set_size": ("C", "patches of a set, C"),
    "data.probability": ("q", "chance features, q"),
    "data.noise": ("σ", "noise, σ"),
    "descent.num_samples": ("N", "samples, N"),
}
"""Setting → its letter in S3, and the title of its panel."""
_LOGARITHMIC = ("data.noise", "descent.num_samples")


@dataclass(frozen=True, kw_only=True)
class SweepLine:
    """One setting varied, all others at the base."""

    setting: str
    points: dict[float, pd.DataFrame]
    """Value → the rows of its condition, in rising order; the base's among them."""
    base: float


def sweep_line(results: SimulationResults, setting: str) -> SweepLine:
    if _BASE not in conditions_of(results):
        raise InputError(f"no seed of {_BASE} is done")
    base = results.levels[_BASE]
    points = {}
    for condition in conditions_of(results):
        levels = results.levels[condition]
        if all(levels[name] == base[name] for name in levels if name != setting):
            points[float(str(levels[setting]))] = runs_of(results, condition)
    return SweepLine(setting=setting, points=dict(sorted(points.items())), base=float(str(base[setting])))


def _judge_found(runs: pd.DataFrame) -> Finding:
    """Whether all patches are associated in most seeds."""
    exact = list(runs["exact"] == 1)
    return judge_proved(exact, exact, "")


def _judge_more_seeds(before: pd.DataFrame, after: pd.DataFrame) -> Finding:
    """Whether more seeds have all patches associated: the exact sign test of the seeds that differ (McNemar's)."""
    change = (after["exact"] - before["exact"]).dropna()
    gained, lost, n = int((change > 0).sum()), int((change < 0).sum()), len(change)

    def decides(number: int, alpha: float) -> bool:
        more, fewer = (round(count * number / n) for count in (gained, lost))
        return min(p_of_most(more, more + fewer), p_of_most(fewer, more + fewer)) <= alpha

    p = p_of_most(gained, gained + lost)
    return Finding(
        ours="",
        value=(gained - lost) / n,
        n=n,
        p=p,
        p_against=p_of_most(lost, gained + lost),
        leans=p <= LEANING,
        decides=decides,
    )


def judge_enough(points: dict[float, pd.DataFrame]) -> Finding:
    """`points`: rows by the number of samples, in rising order."""
    if len(points) < 2:
        raise InputError("fewer than two numbers of samples are done")
    first, last = points[min(points)], points[max(points)]
    more = _judge_more_seeds(first, last)
    strict = all_of((_judge_found(last), more), "", value=more.value)
    words = f"seeds with all patches associated, by samples: {_counts(points, ',.0f')}"
    return judge_readings(strict, more, share_interval(last["exact"]), words)


def judge_rare(points: dict[float, pd.DataFrame], limit: float) -> Finding:
    """`points`: rows by q, in rising order."""
    within = {value: runs for value, runs in points.items() if value <= limit}
    if not within:
        raise InputError(f"no seed of a q up to ln(d)/D, which is {rounded(limit, 2)}, is done")
    exact = share_interval(within[max(within)]["exact"])
    strict = all_of([_judge_found(runs) for runs in within.values()], "", value=exact.value)
    words = f"seeds with all patches associated, by q: {_counts(points, 'g')}; ln(d)/D is {rounded(limit, 2)}"
    return judge_readings(strict, _judge_found(within[min(within)]), exact, words)


def _counts(points: dict[float, pd.DataFrame], form: str) -> str:
    """ "250: 2 of 10, 500: 3 of 10"."""
    return ", ".join(f"{value:{form}}: {int(runs['exact'].sum())} of {len(runs)}" for value, runs in points.items())


_NO_RISK, _LITTLE_RISK = 0.01, 0.1


def _judge_rare(results: SimulationResults) -> Finding:
    data = patches_of(results, _BASE)
    return judge_rare(sweep_line(results, "data.probability").points, math.log(data.dim) / data.num_patches)


def _judge_risk(results: SimulationResults) -> Finding:
    points = sweep_line(results, "data.probability").points
    if 0.0 not in points:
        raise InputError("no seed of q = 0 is done")
    risk = points[0.0]["test_risk"].to_numpy(dtype=np.float64)
    words = f"test risk {rounded(float(risk.min()), 5)} to {rounded(float(risk.max()), 5)}"
    return judge_proved(list(risk <= _NO_RISK), list(risk <= _LITTLE_RISK), words)


_CLAIMS = (
    Claim(
        id="enough-samples",
        text="With enough samples association is found",
        source="S3",
        paper="polynomially many in d",
        rule=TWO_READINGS,
        readings=(
            "with the most samples tried all patches are associated in most seeds (exact sign test; reproduced also "
            f"takes {share(ALMOST_ALL)} of the seeds), and in more than with the fewest (exact sign test of the seeds "
            "that differ; the larger p-value counts)",
            "in more seeds with the most than with the fewest",
        ),
        judge=lambda results: judge_enough(sweep_line(results, "descent.num_samples").points),
    ),
    Claim(
        id="rare-features",
        text="Association is found where other patches carry the feature rarely",
        source="S3 Assumption 1",
        paper="q of the order of log(d)/D",
        rule=TWO_READINGS,
        readings=(
            "for every q tried up to S3's ln(d)/D all patches are associated in most seeds (exact sign test, the "
            f"largest p-value counts; reproduced also takes {share(ALMOST_ALL)} of the seeds for each)",
            "for the smallest",
        ),
        judge=_judge_rare,
    ),
    Claim(
        id="risk-vanishes",
        text="III: the risk vanishes (where no patch carries the feature by chance, q = 0)",
        source="S3, dynamics",
        paper=PROVED,
        rule=WITH_HIGH_PROBABILITY,
        readings=(f"the test risk ends at {_NO_RISK} or less", f"at {_LITTLE_RISK} or less"),
        judge=_judge_risk,
    ),
)


def sweep_panels(results: SimulationResults) -> Drawing:
    """The share of seeds with all patches associated, and the mean share of patches, over each setting."""
    lines = [sweep_line(results, setting) for setting in _SETTINGS]
    of_seeds, of_patches = model_style(0), model_style(1)
    with house_style():
        figure = Figure(figsize=(8.4, 5.0), layout="constrained")
        panels = figure.subplots(2, 3, sharey=True).ravel()
        for panel, line in zip(panels, lines, strict=False):
            panel.axvline(line.base, **DOTTED, zorder=1)
            values, exact = list(line.points), [share_interval(runs["exact"]) for runs in line.points.values()]
            seeds = [runs["associated"].tolist() for runs in line.points.values()]
            patches = [mean_interval(of_seeds) for of_seeds in seeds]
            draw_shares(panel, values, patches, of_patches, seeds=seeds, gid=f"associated-{line.setting}")
            draw_shares(panel, values, exact, of_seeds, gid=f"exact-{line.setting}")
            if line.setting in _LOGARITHMIC:
                panel.set_xscale("log")
            panel.set_xticks(values)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_title(_SETTINGS[line.setting][1])
            light_grid(panel, "y")
        panels[0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        panels[0].set_ylim(-0.04, 1.06)
        panels[-1].set_axis_off()
        handles = [*(style.handle(markersize=4.5) for style in (of_seeds, of_patches)), Line2D([], [], **DOTTED)]
        labels = ["seeds with all patches associated", "patches associated, mean", "the base"]
        add_legend(panels[-1], handles, labels, loc="center left")
    counts = [len(runs) for line in lines for runs in line.points.values()]
    bars = "bars: 95 % intervals (Clopper and Pearson's of the share of seeds, Student's t of the mean)"
    words = f"One setting is varied at a time, with {seeds_in_words(counts)} each{dots_and_bars(counts, bars)}."
    add_footnote(figure, [words])
    caption = f"Where association is found. {words}{_beyond_s3(results, lines)}"
    return Drawing(figure=figure, with_round_places=True, caption=caption)


def _beyond_s3(results: SimulationResults, lines: list[SweepLine]) -> str:
    """Where q, which is held while there are more or fewer patches, is above S3's ln(d)/D."""
    bases, data = {line.setting: line.base for line in lines}, patches_of(results, _BASE)
    q, other = bases["data.probability"], {"data.num_sets": data.set_size, "data.set_size": data.num_sets}
    found = [
        f"{_SETTINGS[line.setting][0]} = {value:g}"
        for line in lines
        if line.setting in other
        for value in line.points
        if q > math.log(data.dim) / (value * other[line.setting])
    ]
    return f" With {', '.join(found)}, q stays {q:g}, which is above S3's ln(d)/D there." if found else ""


report_on("association-sweep", paper=PAPER, claims=_CLAIMS, figures={"sweep": sweep_panels})
