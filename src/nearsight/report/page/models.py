"""The page of measured models: what was found, the figure that shows it, and everything needed to check it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nearsight.files import write_text
from nearsight.metrics import uniform_attention_distance
from nearsight.report.differences import LABEL_LIMIT, SMALLEST, most_local_head, quoted
from nearsight.report.figures.heat import heatmaps
from nearsight.report.figures.models import locality_spreads, mad_entropy_plane, mad_profiles, training_curves
from nearsight.report.inputs import ROUNDING, ModelHeads, check_labels, shorten
from nearsight.report.page import charts, tables
from nearsight.report.page.document import (
    BodyPart,
    Document,
    Section,
    chart_html,
    citing_html,
    command_html,
    figure_html,
    json_html,
    terms_html,
)
from nearsight.report.reading import (
    ONE_MODEL,
    ONE_RUN,
    SPREAD,
    Reading,
    compare_with_first,
    describe,
)

_SAID_ONCE = (SPREAD, ONE_RUN, ONE_MODEL)
_NOTE_ON_MODELS = '<p class="note">Bold: means over images. Beside them: the spread over images.</p>'
_NOTE_ON_LAYERS = '<p class="note">Over the heads of each layer. Bold: the smallest number of its column.</p>'
_INTERVALS = (
    "Two models on the same images are compared image by image: the mean of the differences with its 95 % interval "
    "(Student’s t), how many standard deviations of the differences it is, and the share of the images on which it has "
    f"the same sign. It is called clear when the whole interval is beyond {SMALLEST}, about what two seeds of one "
    "recipe differ by; on different grids, also with both scaled to the same distance of uniform attention. The most "
    "local head is chosen on one half of the images and compared on the other, and the other way round. Models without "
    "images in common are compared by their means (Welch’s t)."
)
_SPREAD = (
    "Mean ± 1.96 standard deviations over images: the range that holds about 95 % of them. It says how far images "
    "differ, not how certain a mean is: two means can differ clearly though the images of both overlap."
)


def write_page(path: Path, **page: Any) -> None:
    """Write the page of one or several measured models to `path`, all of it or nothing; `page`: as in `page_html`."""
    write_text(path, page_html(**page))


def page_html(
    *,
    title: str,
    models: Sequence[ModelHeads],
    readings: Sequence[Reading] | None = None,
    grid_size: tuple[int, int] | None = None,
    command: str | None = None,
    explorer: BodyPart | None = None,
    further: Sequence[Section] = (),
) -> str:
    """The text of the page.

    `readings`: the comparisons to state, the most important first; without them every further model is compared with
    the first one. `grid_size`: rows and columns of patches, for the mark of uniform attention. `command`: what to type
    to get these numbers again. `explorer`: where each head looks, image by image. `further`: what else was measured.
    """
    check_labels(models)
    if readings is None:
        readings = compare_with_first(models)
    findings = [reading.sentences for reading in readings] or [describe(model) for model in models]
    sections = [
        Section(name="explorer", heading="Where heads attend", body="" if explorer is None else explorer.html()),
        Section(name="models", heading="Models", body=tables.overview(models) + _NOTE_ON_MODELS),
        Section(name="comparisons", heading="Further comparisons", body=_further(findings[1:], models)),
        Section(name="layers", heading="Layer by layer", body=tables.layers(models) + _NOTE_ON_LAYERS),
        Section(name="profiles", heading="Profiles", body=_profiles(models, grid_size)),
        Section(name="plane", heading="Distance and focus", body=_plane(models, grid_size)),
        Section(name="heatmaps", heading="Every head", body=_heatmaps(models)),
        *further,
        Section(name="training", heading="Training", body=_training(models)),
        Section(name="terms", heading="How to read this", body=terms_html(grid_size, _INTERVALS, _SPREAD)),
        Section(name="differences", heading="What differs", body=_differences(models)),
        Section(
            name="provenance",
            heading="Provenance",
            body=tables.facts([model.provenance for model in models], models, only_differing=False),
        ),
        Section(name="configuration", heading="Full configuration", body=_configurations(models)),
        Section(name="again", heading="Run it again", body=command_html(command)),
        Section(name="cite", heading="Cite it", body=citing_html()),
    ]
    return Document(
        title=title,
        headline=_sentence(findings[0][0], models),
        details=[_sentence(sentence, models) for sentence in findings[0][1:]],
        hero=_hero(models, findings[0], grid_size),
        sections=sections,
        data=charts.of_models(models, grid_size),
        explorer=explorer,
    ).html()


def common_grid(models: Sequence[ModelHeads]) -> tuple[int, int] | None:
    """The grid that all layers of all models have: the mark of uniform attention has one place only then."""
    grids = {grid for model in models for grid in (model.grids or {}).values()}
    if len(grids) != 1 or not all(model.grids for model in models):
        return None
    (grid,) = grids
    of_grid = uniform_attention_distance(grid)
    # In windows and on pooled keys, uniform attention is not that of the grid, and has no one place either.
    found = [value for model in models for value in (model.uniform or {}).values()]
    return grid if all(abs(value - of_grid) < ROUNDING for value in found) else None


def _sentence(sentence: str, models: Sequence[ModelHeads]) -> str:
    """A sentence with its model names isolated, so that one in another writing direction does not turn the rest."""
    text = escape(sentence)
    for name in {shorten(model.label, LABEL_LIMIT) for model in models}:
        text = text.replace(f"“{escape(name)}”", f"“{tables.label_html(name)}”")
    return text


def _further(findings: Sequence[Sequence[str]], models: Sequence[ModelHeads]) -> str:
    """The other comparisons, opened one by one; what holds for all of them was said with the first."""
    return "".join(
        f"<details><summary>{_sentence(headline, models)}</summary>"
        + "".join(f"<p>{_sentence(sentence, models)}</p>" for sentence in sentences if sentence not in _SAID_ONCE)
        + "</details>"
        for headline, *sentences in findings
    )


def _hero(models: Sequence[ModelHeads], sentences: Sequence[str], grid_size: tuple[int, int] | None) -> str:
    return figure_html(
        "finding",
        locality_spreads(models, grid_size=grid_size),
        "The distances with their spread over images. " + " ".join(sentences[1:-1]),
        "Marks: means over images. Bars: the spread of single images, about 95 % of them; a mean is far more certain."
        + (" Dotted: uniform attention." if grid_size else ""),
        narrow=locality_spreads(models, grid_size=grid_size, is_narrow=True),
    )


def _profiles(models: Sequence[ModelHeads], grid_size: tuple[int, int] | None) -> str:
    return _chart_html(
        "profiles",
        charts.PROFILES_OF_MODELS,
        mad_profiles(models, grid_size=grid_size),
        "Line chart of sorted mean attention distances, one line per layer and model. " + _lowest(models),
        "The heads of a layer, sorted by how far they look. Bands: ± one standard deviation over images. "
        "Light lines are early layers, dark lines late ones. Layers count from 0.",
    )


def _plane(models: Sequence[ModelHeads], grid_size: tuple[int, int] | None) -> str:
    return _chart_html(
        "plane",
        charts.PLANE,
        mad_entropy_plane(models, grid_size=grid_size),
        "Scatter plot of attention entropy against mean attention distance, one point per head. " + _lowest(models),
        "Each point is a head. Lower left: it attends to a few patches close by. Upper right: far and everywhere. "
        "Layers count from 0.",
    )


def _heatmaps(models: Sequence[ModelHeads]) -> str:
    return _chart_html(
        "heatmaps",
        charts.HEATMAPS_OF_MODELS,
        heatmaps(models),
        "Heatmaps of mean attention distance and attention entropy, layers by heads. The table of layers sums them up. "
        + _lowest(models),
        "Bright is far (top) or spread out (bottom), dark is local or focused. All models share the two colour scales. "
        "Hatched: no such head. Layers and heads count from 0.",
    )


def _training(models: Sequence[ModelHeads]) -> str:
    if all(model.history is None for model in models):
        return ""
    best = [
        f"{quoted(model.label)} reaches a validation accuracy of {100 * model.history['val_acc'].max():.1f} %."
        for model in models
        if model.history is not None
    ]
    described = "Curves of training loss, validation loss and validation accuracy over epochs. " + " ".join(best)
    return _chart_html("training", charts.TRAINING, training_curves(models), described, charts.TRAINING)


def _chart_html(name: str, caption: str, figure: Figure, description: str, of_still: str) -> str:
    """A chart with its caption, and the drawing that stands there without scripts, with its own."""
    return chart_html(name, caption, figure_html(name, figure, description, of_still, is_still=True))


def _lowest(models: Sequence[ModelHeads]) -> str:
    """The number of each model that matters most in a drawing."""
    return " ".join(f"Lowest distance of {quoted(model.label)}: {most_local_head(model).mean:.3f}." for model in models)


def _differences(models: Sequence[ModelHeads]) -> str:
    if len(models) < 2 or any(model.config is None for model in models):
        return ""
    differing = tables.facts([model.config for model in models], models, only_differing=True)
    return differing or "<p>All models have the same configuration.</p>"


def _configurations(models: Sequence[ModelHeads]) -> str:
    return "".join(
        json_html(name, model.config)
        for name, model in zip(tables.names_html(models), models, strict=True)
        if model.config is not None
    )
