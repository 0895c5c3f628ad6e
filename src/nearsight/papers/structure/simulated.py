"""S3 as simulations: a model that is given only a loss finds which patches belong together, and we can watch it.

All seeds of a condition run as one tensor program on a processor. The constants are those of a public port of S3's
model, not the authors' (assumed), and S3's single step size is two here: v's is as large as it can be without
diverging, and with the same for A the second phase would take some hundred thousand steps.

S3 proves statements that hold with high probability in a limit, so there are few numbers to compare with: a claim has
a strict reading and a weak one, and is judged by whether they hold, and in how many seeds. Here is what the studies
share.
"""

import dataclasses
from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from nearsight.data.structured import PatchData
from nearsight.errors import InputError
from nearsight.report.claims import Claim
from nearsight.report.figures.looks import ModelStyle, model_style
from nearsight.report.figures.style import INK, MUTED, PAPER, add_legend, colour_bar, house_style
from nearsight.report.marks import FEWEST, Drawing, add_footnote, draw_courses, draw_seeds
from nearsight.report.rules import EVERY_SEED, NO, Finding, finding_of, judge_every_seed
from nearsight.report.simulations import (
    attention_of,
    conditions_of,
    patches_of,
    runs_of,
    share_in_words,
)
from nearsight.report.tables import rounded, seeds_in_words, share, with_interval
from nearsight.study import Simulation
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.study.statistics.significance import share_interval
from nearsight.train.structure import Descent, StructureRun, StructureRunner
from nearsight.train.structure.descent import NEAR

QUICK = Descent(num_samples=4000, steps=400, attention_lr=2.0)
"""Twice the step size of A in fewer steps: for studies of many conditions."""
_ASSUMED = (
    *("data.probability", "data.noise", "model.power", "model.slope", "model.init_attention", "model.init_feature"),
    *("descent.num_samples", "descent.steps", "descent.feature_lr", "descent.attention_lr"),
)
_RESPONSES = {"exact": "all associated", "associated": "share associated", "test_acc": "test accuracy"}


def simulation_of(conditions: dict[str, StructureRun], seeds: int, *, keep: tuple[str, ...] = ()) -> Simulation:
    """`keep`: the tables that are kept in addition to that of the runs."""
    runner = StructureRunner(keep=keep)
    return Simulation(
        conditions=conditions, simulate=runner, shrink=_shrink, responses=_RESPONSES, seeds=seeds, assumed=_ASSUMED
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


POINT = f"{100 * NEAR:.0f} percentage point"
PROVED = "proved, with high probability"
ALMOST_ALL = 0.9
"""Of the seeds: "with high probability"."""
WITH_HIGH_PROBABILITY = (
    f"{EVERY_SEED} Reproduced also takes the strict one in at least {share(ALMOST_ALL)} of the seeds."
)
TWO_READINGS = (
    "*Two readings.* For what the paper proves without a number. The strict reading and the weak one are below, each "
    "with its test over seeds. Shown: the strict one is. It leans that way where either does; its opposite is shown "
    "where the opposites of both are."
)


def judge_proved(strict: Sequence[bool], weak: Sequence[bool], words: str) -> Finding:
    """What should hold with high probability: in how many seeds it does, by a strict reading and a weak one."""
    found = judge_every_seed(strict, weak, words)
    return dataclasses.replace(found, fits=found.value >= ALMOST_ALL)


def judge_readings(strict: Finding, weak: Finding, ours: Estimate, words: str) -> Finding:
    """The same of findings, each from a test of its own; `ours`: the number that is shown."""

    def decides(n: int, alpha: float) -> bool:
        def is_decided(reading: Finding) -> bool:
            return reading.decides is not None and reading.decides(n, alpha)

        # More seeds of the same kind decide each reading the way it leans now.
        is_against = weak.p_against < weak.p and is_decided(weak)
        return is_decided(strict) and (strict.p < strict.p_against or is_against)

    return finding_of(
        ours,
        words,
        p=strict.p,
        p_against=max(strict.p_against, weak.p_against),
        leans=strict.leans or weak.leans,
        fits=strict.fits,
        opposite=NO,
        decides=decides,
    )


def chance_of_association(data: PatchData) -> float:
    """That a patch is associated when the other entries of its row are in random order, below the diagonal's: what a
    matrix that knows nothing would reach."""
    return 1 / comb(data.num_patches - 1, data.set_size - 1)


def judge_associated(runs: pd.DataFrame, chance: float) -> Finding:
    exact, patches = share_interval(runs["exact"]), mean_interval(runs["associated"])
    closer_to_one = runs["associated"] > (1 + chance) / 2
    words = associated_in_words(exact, patches, chance)
    found = judge_proved(list(runs["exact"] == 1), list(closer_to_one), words)
    return dataclasses.replace(found, low=exact.low, high=exact.high)


def judge_not_all(runs: pd.DataFrame) -> Finding:
    """Whether most seeds do not have all patches associated."""
    lacks = list(runs["exact"] == 0)
    return judge_every_seed(lacks, lacks, "")


def associated_in_words(exact: Estimate, patches: Estimate, chance: float) -> str:
    of_patches = f"{with_interval(patches)} of the patches, {rounded(chance)} by chance"
    return f"all patches in {share_in_words(exact)}; {of_patches}"


def associated(condition: str, text: str, source: str) -> Claim:
    def judge(results: SimulationResults) -> Finding:
        chance = chance_of_association(patches_of(results, condition))
        return judge_associated(runs_of(results, condition), chance)

    return Claim(
        id=f"associated-{condition}",
        text=text,
        source=source,
        paper=PROVED,
        rule=WITH_HIGH_PROBABILITY,
        readings=(
            "at the last step all patches are associated",
            "the share of associated patches is closer to 1 than to chance",
        ),
        judge=judge,
    )


def accuracies_of(runs: pd.DataFrame) -> "pd.Series[float]":
    """Of the seeds that have not diverged."""
    found = runs["test_acc"].dropna()
    if found.empty:
        raise InputError("every seed has diverged")
    return found


DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (1, 2))}
"""A line that others are held against."""
_TITLES = ("before", "after", "after, by sets", "by sets, mean over seeds")
_PANEL = 1.85
"""Inches."""


def attention_matrices(results: SimulationResults) -> Drawing:
    """A of the first seed before and after, as it is and with the patches of a set side by side; and its mean."""
    conditions = conditions_of(results)
    rows = {condition: _matrices(results, condition) for condition in conditions}
    everything = np.concatenate([matrix.ravel() for matrices in rows.values() for matrix in matrices])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    with house_style():
        size = (len(_TITLES) * _PANEL + 1.2, len(conditions) * _PANEL + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(conditions), len(_TITLES), squeeze=False)
        for line, (condition, matrices) in zip(panels, rows.items(), strict=True):
            sets = patches_of(results, condition).sets().numpy()
            as_they_are, by_sets = list(range(len(sets))), [int(patch) for patch in np.argsort(sets, kind="stable")]
            orders = (as_they_are, as_they_are, by_sets, by_sets)
            for place, (panel, matrix, shown) in enumerate(zip(line, matrices, orders, strict=True)):
                image = panel.imshow(
                    matrix[np.ix_(shown, shown)],
                    cmap="viridis",
                    vmin=low,
                    vmax=high,
                    interpolation="none",
                    aspect="auto",
                    gid=f"attention-{condition}-{place}",
                )
                for set_ticks in (panel.set_xticks, panel.set_yticks):
                    set_ticks(range(len(shown)), [str(patch + 1) for patch in shown], fontsize=6)
                panel.tick_params(length=0, pad=1.5)
                panel.spines[:].set_visible(False)
                if place >= 2:
                    _outline(panel, len(shown), int(np.bincount(sets)[0]))
            line[0].set_ylabel(condition)
        for panel, title in zip(panels[0], _TITLES, strict=True):
            panel.set_title(title, fontsize=8.5)
        label = "entry of A (logit of attention)"
        colour_bar(figure, image, list(panels.ravel()), label, aspect=10 * len(conditions), pad=0.015)
    counts = [len(runs_of(results, condition)) for condition in conditions]
    first = min(int(runs_of(results, condition).index.min()) for condition in conditions)
    words = (
        f"The attention logits A; rows and columns are patches. First three: seed {first}; last: the mean over "
        f"{seeds_in_words(counts)}. Framed: the sets. The diagonal is fixed."
    )
    add_footnote(figure, [words])
    return Drawing(figure=figure, with_round_places=True, caption=words)


def _matrices(results: SimulationResults, condition: str) -> tuple[NDArray[np.float64], ...]:
    seeds = [int(seed) for seed in runs_of(results, condition).index]
    before, after = attention_of(results, condition, min(seeds))
    mean = np.mean([attention_of(results, condition, seed)[1] for seed in seeds], axis=0)
    return before, after, after, mean


def _outline(panel: Axes, num_patches: int, size: int) -> None:
    for first in range(0, num_patches, size):
        for colour, width in ((INK, 2.2), (PAPER, 1.0)):  # stands out from light and dark cells
            frame = Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor=colour, linewidth=width)
            panel.add_patch(frame)


def draw_band(axes: Axes, curves: Sequence[pd.DataFrame], name: str, style: ModelStyle, *, gid: str) -> None:
    """A quantity of every seed over steps, its mean, and its range."""
    steps = curves[0]["step"].to_numpy()
    values = np.stack([curve[name].to_numpy(dtype=np.float64) for curve in curves])
    draw_courses(axes, steps, list(values), style.colour, f"seeds-{gid}")
    if len(values) >= FEWEST:
        axes.fill_between(steps, values.min(0), values.max(0), color=style.colour, alpha=0.22, linewidth=0)
    axes.plot(steps, values.mean(0), color=style.colour, linestyle=style.dash, linewidth=1.6, gid=gid)


def draw_shares(
    axes: Axes,
    places: Sequence[float],
    found: Sequence[Estimate],
    style: ModelStyle,
    *,
    seeds: Sequence[Sequence[float]] = (),
    gid: str,
) -> None:
    """Means of shares or accuracies with their intervals, which lie between 0 and 1, whatever Student's t says.

    `seeds`: what each seed gives; none of a share of seeds, which says it.
    """
    draw_seeds(axes, places if seeds else (), seeds, style.colour, f"seeds-{gid}")
    below, above = [], []
    for each in found:
        has_bar = each.n >= FEWEST
        below.append(each.value - min(each.value, max(each.low, 0.0)) if has_bar else np.nan)
        above.append(max(each.value, min(each.high, 1.0)) - each.value if has_bar else np.nan)
    means = [each.value for each in found]
    look = style.look_with(markersize=4.5, linewidth=1.4, elinewidth=0.9, capsize=2.5)
    axes.errorbar(places, means, yerr=[below, above], **look, gid=gid)


def name_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def legend_of_lines(target: Figure | Axes, names: Sequence[str], **options: Any) -> None:
    """Of lines without marks, in the order of the looks."""
    handles = [model_style(index).handle(marker="none", linewidth=1.6) for index in range(len(names))]
    add_legend(target, handles, names, **options)


def bands_in_words(results: SimulationResults) -> str:
    counts = [len(runs_of(results, condition)) for condition in conditions_of(results)]
    thin = "; thin: seeds" if max(counts) > 1 else ""
    bands = "; bands: from the least to the largest" if max(counts) >= FEWEST else ""
    return f"Lines: mean over {seeds_in_words(counts)}{thin}{bands}."
