"""Pieces that pages of models and of studies share, as HTML."""

import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from html import escape
from typing import Any

from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures import svg_text
from nearsight.report.inline_svg import inline_svg
from nearsight.report.marks import Drawing
from nearsight.report.page.html_tables import json_text
from nearsight.report.reports import Draw
from nearsight.study.recipes import SIMULATIONS, STUDIES
from nearsight.version import __version__


def figure_html(name: str, figure: Figure, description: str, caption: str, *, is_still: bool = False) -> str:
    """A drawing with its caption. A still one gives way to its chart where scripts run, except on paper."""
    drawing = inline_svg(svg_text(figure), prefix=f"figure-{name}", description=description)
    return (
        f"<figure{' class=still' if is_still else ''}>"
        f'<div class="scroll" role="group" tabindex="0" aria-label="Figure, scrolls sideways">{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def drawn_html(figures: Mapping[str, Draw]) -> list[str]:
    """Those that the runs there are can give."""
    drawn = []
    for name, draw in figures.items():
        with suppress(InputError):
            drawing = draw()
            assert isinstance(drawing, Drawing), name
            drawn.append(figure_html(name, drawing.figure, drawing.caption, drawing.caption))
    return drawn


def chart_html(name: str, caption: str, still: str = "") -> str:
    """The place where a chart will be, after the drawing that stands there without scripts."""
    return (
        f'{still}<div class="chart" id="chart-{name}" hidden><div class="chart-body"></div>'
        f'<p class="caption">{escape(caption)}</p></div>'
    )


def command_html(command: str | None) -> str:
    return "" if command is None else f'<pre class="command" tabindex="0"><code>{escape(command)}</code></pre>'


def study_again_html(name: str, *, seeds: Collection[int], scale: str, runner: str) -> str:
    """What to type to get the runs of a study again; of one that no command knows, the function that ran it."""
    if name in {**STUDIES, **SIMULATIONS} and set(seeds) == set(range(len(seeds))):
        size = "" if scale == "full" else f" --scale {scale}"
        return command_html(f"nearsight study run {shlex.quote(name)} --seeds {len(seeds)}{size}")
    told = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, sorted(seeds)))}"
    return (
        f"<p>No command runs this study with {told}: it was run from Python, by "
        f"<code>nearsight.study.{runner}</code>. Its study.json holds the whole settings of every run.</p>"
    )


def json_html(summary: str, value: Mapping[str, Any]) -> str:
    """A record to open; the summary is HTML."""
    return (
        f"<details><summary>{summary}</summary>"
        f'<pre tabindex="0"><code>{escape(json_text(value, indent=2))}</code></pre></details>'
    )


def terms_html(grid_size: tuple[int, int] | None, intervals: str) -> str:
    """What the words mean; `intervals` says what those of this page are, as HTML."""
    uniform = ""
    if grid_size is not None:
        rows, num_columns = grid_size
        uniform = (
            f" On this {rows} × {num_columns} grid, a head that looks everywhere alike has a distance of "
            f"{uniform_attention_distance(grid_size):.3f}."
        )
    return (
        "<dl><dt>Mean attention distance (MAD)</dt><dd>How far a patch looks on average, weighted by its attention, as "
        "a fraction of the grid’s diagonal. 0: only at itself. Tokens without a place in the image, such as the class "
        f"token, do not count.{uniform}</dd>"
        "<dt>Attention entropy</dt><dd>How spread out attention is. 0: all of it on one patch. 1: the same on every "
        f"patch.</dd><dt>Intervals</dt><dd>{intervals}</dd></dl>"
    )


PAPERS = {
    "arXiv:2605.16390": "Santiago Toledo and Martínez (2026). Inducing Spatial Locality in Vision Transformers through "
    "the Training Protocol. The measures, the compact ViT, the protocols and the figures.",
    "arXiv:2603.04892": "Hajimiri et al. (2026). Locality-Attending Vision Transformer. ICLR. LocAt.",
    "arXiv:2210.09221": "Jelassi, Sander and Li (2022). Vision Transformers provably learn spatial structure. NeurIPS. "
    "Positional attention, patch association and the structured data.",
}
"""As in CITATION.cff."""


def citing_html() -> str:
    papers = "".join(f"<li>{escape(text)} {identifier}</li>" for identifier, text in PAPERS.items())
    return (
        f"<p>The nearsight developers. nearsight {escape(__version__)}: see, measure and induce spatial locality in "
        "Vision Transformers. Please cite it and the papers whose methods you use:</p>"
        f"<ul>{papers}</ul>"
    )
