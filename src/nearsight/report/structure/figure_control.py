"""Association and accuracy side by side: structure is found where there is some, and is not needed to be right."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nearsight.report.figures.style import MUTED, add_legend, house_style, light_grid, model_style
from nearsight.report.structure.chance import chance_of_association
from nearsight.report.structure.figure_phases import draw_band
from nearsight.report.structure.numbers import conditions_of, curves_of, patches_of, runs_of
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, seeds_in_words
from nearsight.study.simulation_folder import SimulationResults

PANELS = {"associated": "patches associated with their sets", "test_acc": "test accuracy"}


def control_curves(results: SimulationResults) -> Drawing:
    """Over steps: the share of patches that are associated, and the test accuracy, of every condition."""
    conditions = conditions_of(results)
    with house_style():
        figure = Figure(figsize=(7.6, 3.3), layout="constrained")
        panels = dict(zip(PANELS, figure.subplots(1, 2, sharex=True, sharey=True), strict=True))
        for index, condition in enumerate(conditions):
            curves = list(curves_of(results, condition).values())
            for name, panel in panels.items():
                draw_band(panel, curves, name, model_style(index), gid=f"{name}-{condition}")
        chance = chance_of_association(patches_of(results, conditions[0]))
        panels["associated"].axhline(chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), gid="chance")
        panels["associated"].annotate(
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
            panel.set_title(PANELS[name])
            panel.set_xlabel("step")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            light_grid(panel, "y")
        panels["associated"].set_ylim(-0.02, 1.03)
        panels["associated"].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        styles = [model_style(index) for index in range(len(conditions))]
        handles = [Line2D([], [], color=style.colour, linestyle=style.dash, linewidth=1.6) for style in styles]
        add_legend(figure, handles, conditions, loc="outside upper left", ncols=len(conditions))
    seeds = seeds_in_words(len(runs_of(results, condition)) for condition in conditions)
    words = f"Lines: mean over {seeds}; bands: from the least to the largest."
    add_footnote(figure, [words])
    return Drawing(figure=figure, caption=f"Association and accuracy over steps. {words}")
