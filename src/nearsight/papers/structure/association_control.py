"""Without structure in the data, is there none in the attention? Is it needed to be right? (S3, negative control)"""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nearsight.data.structured import GaussianPatches
from nearsight.papers.structure import PAPER
from nearsight.papers.structure.simulated import (
    DOTTED,
    POINT,
    TWO_READINGS,
    accuracies_of,
    associated,
    associated_in_words,
    attention_matrices,
    bands_in_words,
    chance_of_association,
    draw_band,
    judge_not_all,
    judge_readings,
    legend_of_lines,
    name_steps,
    simulation_of,
)
from nearsight.report.claims import Claim
from nearsight.report.figures.looks import model_style
from nearsight.report.figures.style import MUTED, house_style, light_grid
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.rules import INFINITE, SIZE_FACTOR, Finding, all_of, judge_within
from nearsight.report.simulations import (
    conditions_of,
    curves_of,
    patches_of,
    runs_of,
    share_in_words,
)
from nearsight.report.studies import report_on
from nearsight.report.tables import percent, share, with_interval
from nearsight.study import Simulation
from nearsight.study.recipes import simulation
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import mean_interval
from nearsight.study.statistics.significance import share_interval
from nearsight.train.structure import Descent, StructureRun
from nearsight.train.structure.descent import NEAR

_STRUCTURED, _INDEPENDENT, _UNMOVED = "structured", "independent", "attention fixed"


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
        _STRUCTURED: StructureRun(),
        _INDEPENDENT: independent,
        _UNMOVED: StructureRun(descent=Descent(samples="fresh", num_samples=2000, attention_lr=0.0)),
    }
    return simulation_of(conditions, seeds, keep=("curves", "attention"))


_CONTROL_ERROR = 0.06
"""Of the negative control, as S3 gives it."""
_ABOVE_CHANCE = 0.1
"""By how much a share of patches may exceed chance and still be none."""
_HALFWAY = 0.75
"""Between guessing and certainty."""


def judge_none(runs: pd.DataFrame, chance: float) -> Finding:
    exact, patches = share_interval(runs["exact"]), mean_interval(runs["associated"])
    strict = judge_within(patches, -INFINITE, chance + _ABOVE_CHANCE, words="")
    return judge_readings(strict, judge_not_all(runs), exact, associated_in_words(exact, patches, chance))


_ERROR = (
    f"*Error.* Shown: the mean test error is at most {SIZE_FACTOR:g} times the paper's, by a one-sided t test over "
    "seeds. Contradicted: it is shown to be more."
)


def judge_error(runs: pd.DataFrame, paper: float) -> Finding:
    error = mean_interval(1 - accuracies_of(runs))
    words = f"test error {with_interval(error, scale=100, digits=2)} %"
    return judge_within(error, -INFINITE, SIZE_FACTOR * paper, words=words)


def judge_without(runs: pd.DataFrame) -> Finding:
    accuracy, exact = mean_interval(accuracies_of(runs)), share_interval(runs["exact"])
    best = float(runs["best_acc"].iloc[0])
    words = (
        f"{with_interval(accuracy, scale=100, digits=2)} %, best possible {percent(best)} %; all patches associated in "
        f"{share_in_words(exact)}"
    )

    def reading(lowest: float) -> Finding:
        parts = (judge_not_all(runs), judge_within(accuracy, lowest, INFINITE, words=""))
        return all_of(parts, "", value=accuracy.value)

    return judge_readings(reading(best - NEAR), reading(_HALFWAY), accuracy, words)


def _judge_independent(results: SimulationResults) -> Finding:
    return judge_none(runs_of(results, _INDEPENDENT), chance=chance_of_association(patches_of(results, _INDEPENDENT)))


_CLAIMS = (
    associated(_STRUCTURED, "Where the data have structure, the attention has it", "S3 abstract"),
    Claim(
        id="control-has-none",
        text="Where they have none (independent Gaussian patches, cubic-CNN labels), the attention has none",
        source="S3, negative control",
        paper="no association",
        rule=TWO_READINGS,
        readings=(
            f"the mean share of associated patches is at most chance plus {100 * _ABOVE_CHANCE:.0f} percentage points "
            "(one-sided t)",
            "not all patches are associated, in most seeds (exact sign test)",
        ),
        judge=_judge_independent,
    ),
    Claim(
        id="control-is-learned",
        text="And yet that task is learned",
        source="S3, negative control",
        paper=f"about {100 * _CONTROL_ERROR:.0f} % test error",
        rule=_ERROR,
        judge=lambda results: judge_error(runs_of(results, _INDEPENDENT), _CONTROL_ERROR),
    ),
    Claim(
        id="without-association",
        text="Structured data also have solutions without association that generalise "
        "(here: the attention left as it starts)",
        source="S3 abstract",
        paper="proved to exist",
        rule=TWO_READINGS,
        readings=(
            f"not all patches are associated, in most seeds (exact sign test), and the mean test accuracy is at most "
            f"{POINT} below the best possible (one-sided t; the larger p-value counts)",
            f"the same, with an accuracy above {share(_HALFWAY)}",
        ),
        judge=lambda results: judge_without(runs_of(results, _UNMOVED)),
    ),
)


_PANELS = {"associated": "patches associated with their sets", "test_acc": "test accuracy"}


def control_curves(results: SimulationResults) -> Drawing:
    """Over steps: the share of patches that are associated, and the test accuracy, of every condition."""
    conditions = conditions_of(results)
    with house_style():
        figure = Figure(figsize=(7.6, 3.3), layout="constrained")
        panels = dict(zip(_PANELS, figure.subplots(1, 2, sharex=True, sharey=True), strict=True))
        for index, condition in enumerate(conditions):
            curves = list(curves_of(results, condition).values())
            for name, panel in panels.items():
                draw_band(panel, curves, name, model_style(index), gid=f"{name}-{condition}")
        first, chance = panels["associated"], chance_of_association(patches_of(results, conditions[0]))
        first.axhline(chance, **DOTTED, gid="chance")
        first.annotate(
            "by chance",
            (1.0, chance),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=MUTED,
        )
        for name, panel in panels.items():
            panel.set_title(_PANELS[name])
            name_steps(panel)
            light_grid(panel, "y")
        first.set_ylim(-0.02, 1.03)
        first.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        legend_of_lines(figure, conditions, loc="outside upper left", ncols=len(conditions))
    words = bands_in_words(results)
    add_footnote(figure, [words])
    return Drawing(figure=figure, with_round_places=True, caption=f"Association and accuracy over steps. {words}")


report_on(
    "association-control",
    paper=PAPER,
    claims=_CLAIMS,
    figures={"attention": attention_matrices, "control": control_curves},
)
