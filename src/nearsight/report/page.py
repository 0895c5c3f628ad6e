"""One HTML file that says what was found, shows it, and holds everything needed to check it.

The page makes no request: figures are inlined, the style is in the file, and a content policy forbids the rest.
"""

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from matplotlib.figure import Figure

from nearsight.files import write_text
from nearsight.metrics import uniform_attention_distance
from nearsight.report import tables
from nearsight.report.estimates import LABEL_LIMIT, quoted
from nearsight.report.figures import (
    heatmaps,
    locality_intervals,
    mad_entropy_plane,
    mad_profiles,
    svg_text,
    training_curves,
)
from nearsight.report.inline_svg import inline_svg
from nearsight.report.inputs import ModelHeads, check_labels, shorten
from nearsight.report.reading import (
    BRACKETS,
    ONE_MODEL,
    ONE_RUN,
    Reading,
    compare_with_first,
    describe,
    most_local_head,
)
from nearsight.version import __version__

SAID_ONCE = (BRACKETS, ONE_RUN, ONE_MODEL)


def write_page(
    path: Path,
    *,
    title: str,
    models: Sequence[ModelHeads],
    readings: Sequence[Reading] | None = None,
    grid_size: tuple[int, int] | None = None,
    command: str | None = None,
) -> None:
    """Write the report of one or several measured models to `path`, all of it or nothing.

    `readings`: the comparisons to state, the most important first; without them every further model is compared with
    the first one. `grid_size`: rows and columns of patches, for the mark of uniform attention. `command`: what to type
    to get these numbers again.
    """
    write_text(path, page_html(title=title, models=models, readings=readings, grid_size=grid_size, command=command))


def page_html(
    *,
    title: str,
    models: Sequence[ModelHeads],
    readings: Sequence[Reading] | None = None,
    grid_size: tuple[int, int] | None = None,
    command: str | None = None,
) -> str:
    """The text of the page; see `write_page`."""
    check_labels(models)
    if readings is None:
        readings = compare_with_first(models)
    findings = [reading.sentences for reading in readings] or [describe(model) for model in models]
    sections = [
        ("models", "Models", tables.overview(models)),
        ("comparisons", "Further comparisons", _further(findings[1:], models)),
        ("layers", "Layer by layer", tables.layers(models) + NOTE_ON_LAYERS),
        ("profiles", "Profiles", _profiles(models, grid_size)),
        ("plane", "Distance and focus", _plane(models, grid_size)),
        ("heatmaps", "Every head", _heatmaps(models)),
        ("training", "Training", _training(models)),
        ("terms", "How to read this", _terms(grid_size)),
        ("differences", "What differs", _differences(models)),
        (
            "provenance",
            "Provenance",
            tables.facts([model.provenance for model in models], models, only_differing=False),
        ),
        ("configuration", "Full configuration", _configurations(models)),
        ("again", "Run it again", _command(command)),
    ]
    sections = [section for section in sections if section[2]]
    template = Template(resources.files("nearsight.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(shorten(title, 200)),
        title_html=tables.label_html(shorten(title, 200)),
        headline=_sentence(findings[0][0], models),
        details="".join(f"<p>{_sentence(sentence, models)}</p>" for sentence in findings[0][1:]),
        hero=_hero(models, findings[0], grid_size),
        navigation="".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in sections),
        sections="".join(_section(*section) for section in sections),
        version=escape(__version__),
    )


def _section(name: str, heading: str, body: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{heading}</h2>{body}</section>'
    )


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
        + "".join(f"<p>{_sentence(sentence, models)}</p>" for sentence in sentences if sentence not in SAID_ONCE)
        + "</details>"
        for headline, *sentences in findings
    )


def _hero(models: Sequence[ModelHeads], sentences: Sequence[str], grid_size: tuple[int, int] | None) -> str:
    return _figure(
        "finding",
        locality_intervals(models, grid_size=grid_size),
        "The compared distances with their intervals. " + " ".join(sentences[1:-1]),
        "Marks: means over images. Bars: the range that holds about 95 % of the images."
        + (" Dotted: a head that looks everywhere alike." if grid_size else ""),
    )


def _profiles(models: Sequence[ModelHeads], grid_size: tuple[int, int] | None) -> str:
    return _figure(
        "profiles",
        mad_profiles(models, grid_size=grid_size),
        "Line chart of sorted mean attention distances, one line per layer and model. " + _lowest(models),
        "The heads of a layer, sorted by how far they look. Bands: ± one standard deviation over images. "
        "Light lines are early layers, dark lines late ones.",
    )


def _plane(models: Sequence[ModelHeads], grid_size: tuple[int, int] | None) -> str:
    return _figure(
        "plane",
        mad_entropy_plane(models, grid_size=grid_size),
        "Scatter plot of attention entropy against mean attention distance, one point per head. " + _lowest(models),
        "Each point is a head. Lower left: it looks at a few patches close by. Upper right: far and everywhere.",
    )


def _heatmaps(models: Sequence[ModelHeads]) -> str:
    return _figure(
        "heatmaps",
        heatmaps(models),
        "Heatmaps of mean attention distance and attention entropy, layers by heads. The table of layers sums them up. "
        + _lowest(models),
        "Dark is local (top) or focused (bottom). All models share the two colour scales. Hatched: no such head.",
    )


def _training(models: Sequence[ModelHeads]) -> str:
    if all(model.history is None for model in models):
        return ""
    best = [
        f"{quoted(model.label)} reaches a validation accuracy of {100 * model.history['val_acc'].max():.1f} %."
        for model in models
        if model.history is not None
    ]
    return _figure(
        "training",
        training_curves(models),
        "Curves of training loss, validation loss and validation accuracy over epochs. " + " ".join(best),
        "Training losses compare only where augmentation and label smoothing are the same.",
    )


def _lowest(models: Sequence[ModelHeads]) -> str:
    """The one number of each model that a drawing is mostly looked at for."""
    return " ".join(f"Lowest distance of {quoted(model.label)}: {most_local_head(model).mean:.3f}." for model in models)


def _figure(name: str, figure: Figure, description: str, caption: str) -> str:
    drawing = inline_svg(svg_text(figure), prefix=f"figure-{name}", description=description)
    return (
        f'<figure><div class="scroll" role="group" tabindex="0" aria-label="Figure, scrolls sideways">{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


NOTE_ON_LAYERS = '<p class="note">Over the heads of each layer. Bold: the smallest number of its column.</p>'


def _terms(grid_size: tuple[int, int] | None) -> str:
    uniform = ""
    if grid_size is not None:
        rows, columns = grid_size
        uniform = (
            f" On this {rows} × {columns} grid, a head that looks everywhere alike has a distance of "
            f"{uniform_attention_distance(grid_size):.3f}."
        )
    return (
        "<dl><dt>Mean attention distance (MAD)</dt><dd>How far a patch looks on average, weighted by its attention, as "
        "a fraction of the grid’s diagonal. 0: only at itself. Tokens without a place in the image, such as the class "
        f"token, do not count.{uniform}</dd>"
        "<dt>Attention entropy</dt><dd>How spread out attention is. 0: all of it on one patch. 1: the same on every "
        "patch.</dd>"
        "<dt>Intervals</dt><dd>Mean ± 1.96 standard deviations over images: the range that holds about 95 % of the "
        "images. For a mean over heads, the heads’ standard deviations are averaged, which is never below the true "
        "one. A difference is called clear when two intervals do not overlap; on different grids, also not as "
        "fractions of uniform attention’s distance.</dd></dl>"
        '<p class="note">Measures and figures follow “Inducing Spatial Locality in Vision Transformers through the '
        "Training Protocol” (arXiv 2605.16390).</p>"
    )


def _differences(models: Sequence[ModelHeads]) -> str:
    if len(models) < 2 or any(model.config is None for model in models):
        return ""
    differing = tables.facts([model.config for model in models], models, only_differing=True)
    return differing or "<p>All models have the same configuration.</p>"


def _configurations(models: Sequence[ModelHeads]) -> str:
    return "".join(
        f"<details><summary>{tables.model_html(index, model)}</summary>"
        f'<pre tabindex="0"><code>{escape(tables.json_text(model.config, indent=2))}</code></pre></details>'
        for index, model in enumerate(models)
        if model.config is not None
    )


def _command(command: str | None) -> str:
    return "" if command is None else f'<pre class="command" tabindex="0"><code>{escape(command)}</code></pre>'
