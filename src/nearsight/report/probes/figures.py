"""The scores of models with their intervals, and the differences between conditions."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nearsight.report.figures.style import FIGURE_LABEL_LIMIT, house_style, light_grid, model_style
from nearsight.report.inputs import shorten
from nearsight.report.probes.differences import IMAGES, SEEDS, differences, reference_of
from nearsight.report.probes.measures import main_measures, title_of
from nearsight.report.probes.results import ProbeResults
from nearsight.report.probes.tables import OVER_IMAGES
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.forest import Row, forest
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.notes import add_footnote, missing_notes, seeds_in_words

# In inches.
ROW, AROUND, PANEL, LABELS = 0.3, 1.0, 1.9, 1.8


def scores_of_models(results: ProbeResults) -> Drawing:
    """A panel per probe, a row per model. Models of one condition share a look."""
    models, measures = results.models, main_measures(results.measures)
    looks = list(dict.fromkeys(model.condition or model.model for model in models))
    with house_style():
        size = LABELS + PANEL * len(measures), AROUND + ROW * len(models)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
        for panel, measure in zip(panels, measures, strict=True):
            scores = results.scores(measure)
            for place, model in enumerate(models):
                if model.model not in scores:
                    continue
                style, score = model_style(looks.index(model.condition or model.model)), scores[model.model]
                name = f"{measure}-model{place}"
                if score.has_interval:
                    ends = [100 * score.low, 100 * score.high]
                    panel.plot(
                        ends,
                        [place, place],
                        color=style.colour,
                        linewidth=4,
                        alpha=0.35,
                        solid_capstyle="butt",
                        gid=f"interval-{name}",
                    )
                panel.plot(100 * score.value, place, color=style.colour, marker=style.marker, markersize=6.5, gid=name)
            panel.set_title(f"{title_of(measure)}, %", fontsize=8.5)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=4))
            light_grid(panel, "x")
            panel.tick_params(axis="y", length=0)
        names = [shorten(model.model, FIGURE_LABEL_LIMIT) for model in models]
        panels[0].set_yticks(range(len(models)), names, parse_math=False)
        panels[0].set_ylim(len(models) - 0.5, -0.5)
    add_footnote(figure, ["Bars: 95 % intervals over test images.", *results.scale_notes])
    return Drawing(figure=figure, caption=f"Scores of all probes, in per cent. {OVER_IMAGES}")


def differences_of_conditions(results: ProbeResults, measure: str) -> Drawing:
    """A row per condition: how much better it is than the first."""
    study, found = results.as_study(), differences(results, measure)
    reference = reference_of(study)
    rows = [
        Row(
            label=condition,
            estimate=Estimate(value=100 * interval.mean, low=100 * interval.low, high=100 * interval.high),
            words=interval.in_words(),
        )
        for condition, interval in found.items()
    ]
    figure = forest(rows, f"{title_of(measure)}: difference to {reference}, in points")
    counts, over = [interval.n for interval in found.values()], {interval.interval_over for interval in found.values()}
    words = "The difference within a seed"
    words += f", mean over {seeds_in_words(counts)}" if max(counts) > 1 else ""
    told = {SEEDS: "over seeds", IMAGES: "(in brackets) over test images, since there is one seed"}
    bars = ", ".join(kind_words for kind, kind_words in told.items() if kind in over)
    words += f"; bars: 95 % intervals {bars}." if bars else "; one seed has no interval."
    add_footnote(figure, [words, *missing_notes(study), *results.scale_notes])
    return Drawing(figure=figure, caption=f"{title_of(measure)}: how far conditions are above {reference}. {words}")
