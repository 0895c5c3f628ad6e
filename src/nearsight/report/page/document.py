"""The page as one file: its parts put together, and a content policy that lets nothing else in.

Scripts are allowed by the hashes of their text, so that nothing that came in with a name or a number can ever run.
"""

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from string import Template
from typing import Any, Protocol

from matplotlib.figure import Figure

from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.style import GRID, HATCH, INK, MUTED, PAPER, svg_text
from nearsight.report.inputs import shorten
from nearsight.report.page.tables import json_text, label_html
from nearsight.version import __version__

PAGE = "report.html"
"""Its file in a folder."""
LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.min.js")
"""In the order in which they need each other."""
_SCRIPTS = (
    *("base.js", "tables.js", "charts.js", "heads.js", "plane.js", "head_table.js", "profiles.js", "heatmaps.js"),
    *("training.js", "effects.js"),
)
"""Ours, in the order in which they run; they share one scope."""
_TITLE_LIMIT = 200
# What the page's theme decides; colours that carry data stay as they are.
_THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)", HATCH: "var(--hatch)"}
_THEMED = re.compile("|".join(_THEME))
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_NAMESPACE = re.compile(r"^\{[^}]*\}")

# A figure may grow to this many page pixels per point, and shrink to this many before it scrolls sideways.
_LARGEST_SCALE, _SMALLEST_SCALE = 1.75, 0.95
_SMALLEST_WIDTH = 640


class BodyPart(Protocol):
    """What the attention explorer is to the page."""

    def html(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    """Its place in the page's address."""
    heading: str
    body: str
    """HTML; a section without any is left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """Everything a page shows. All fields but the title are HTML."""

    title: str
    """As text, from outside."""
    headline: str
    details: Sequence[str]
    """What else the first screen says, a paragraph each; the first one stands between the headline and the figure."""
    hero: str
    """The figure that shows the finding."""
    sections: Sequence[Section]
    data: Mapping[str, Any] | None = None
    """What the charts draw; without it the page has none, and the libraries stay out."""
    explorer: BodyPart | None = None
    banner: str = ""
    """What stands above all else."""
    refresh_seconds: int | None = None
    """After how long a browser looks for a newer page."""

    def html(self) -> str:
        sections = [section for section in self.sections if section.body]
        scripts = self._scripts()
        title = shorten(self.title, _TITLE_LIMIT)
        return Template(_part("page.html")).substitute(
            policy=_policy(scripts),
            refresh=_refresh_html(self.refresh_seconds),
            style=_part("style.css") + self._explorer_style(),
            title=escape(title),
            title_html=label_html(title),
            banner=self.banner,
            headline=self.headline,
            lead="".join(f'<p class="lead">{paragraph}</p>' for paragraph in self.details[:1]),
            hero=self.hero,
            details="".join(f"<p>{paragraph}</p>" for paragraph in self.details[1:]),
            navigation=_navigation_html(sections),
            sections="".join(map(_section_html, sections)),
            data=_data_html(self.data),
            scripts="".join(f"<script>{script}</script>" for script in scripts),
            version=escape(__version__),
        )

    def _scripts(self) -> list[str]:
        libraries = [] if self.data is None else [_part(f"vendor/{name}") for name in LIBRARIES]
        own = "(() => {\n'use strict';\n" + "\n".join(_part(f"script/{name}") for name in _SCRIPTS) + "\n})();"
        if self.explorer is None:
            return [*libraries, own]
        from nearsight.report.explorer import explorer_script

        return [*libraries, explorer_script(), own]

    def _explorer_style(self) -> str:
        if self.explorer is None:
            return ""
        from nearsight.report.explorer import explorer_style

        return explorer_style()


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _refresh_html(seconds: int | None) -> str:
    return "" if seconds is None else f'<meta http-equiv="refresh" content="{seconds}">'


def _data_html(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Without any "<" it can neither end its element nor open another.
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="page-data">{text}</script>'


def _navigation_html(sections: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{section.name}">{section.heading}</a></li>' for section in sections)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if links else ""


def _section_html(section: Section) -> str:
    name = section.name
    return (
        f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{section.heading}</h2>'
        f"{section.body}</section>"
    )


@cache
def _part(name: str) -> str:
    """The text of a file next to this one."""
    return resources.files("nearsight.report.page").joinpath(name).read_text(encoding="utf-8")


def figure_html(
    name: str,
    figure: Figure,
    description: str,
    caption: str,
    *,
    is_still: bool = False,
    narrow: Figure | None = None,
) -> str:
    """A drawing with its caption. A still one gives way to its chart where scripts run, except on paper; `narrow` is
    the same for a phone."""
    drawing = _inline_svg(svg_text(figure), prefix=f"figure-{name}", description=description)
    small = ""
    if narrow is not None:
        small = _inline_svg(svg_text(narrow), prefix=f"figure-{name}-narrow", description=description)
        small = f'<div class="narrow">{small}</div>'
    return (
        f"<figure{' class=still' if is_still else ''}>{small}"
        f'<div class="scroll{" wide" if small else ""}" role="group" tabindex="0" '
        f'aria-label="Figure, scrolls sideways">{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _inline_svg(svg: str, *, prefix: str, description: str) -> str:
    """The `<svg>` element for an HTML page.

    Every id gets the prefix, since ids are unique in a page and matplotlib gives each figure the same ones; the theme's
    colours become the page's variables; the description is what a screen reader says instead of the drawing.
    """
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            # The metadata name a schema by its web address; the style sheet would apply to the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            element.set(name, _rewritten(name, value, prefix))
    width = float(root.attrib["viewBox"].split()[2])
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("preserveAspectRatio", "xMinYMid meet")  # where the page limits its height, it stays at the left
    root.set("role", "img")
    root.set("aria-label", description)
    least = min(_SMALLEST_SCALE * width, _SMALLEST_WIDTH)
    root.set("style", f"max-width: {_LARGEST_SCALE * width:.0f}px; min-width: {least:.0f}px")
    return ET.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """A name without its namespace: HTML knows SVG's elements, and `href` needs no prefix there."""
    return _NAMESPACE.sub("", name)


def _rewritten(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    value = _REFERENCE.sub(rf"url(#{prefix}-\1)", value)
    if name in ("style", "fill", "stroke"):
        value = _THEMED.sub(lambda match: _THEME[match[0]], value)
    return value


def chart_html(name: str, caption: str, still: str = "") -> str:
    """The place where a chart will be, after the drawing that stands there without scripts."""
    return (
        f'{still}<div class="chart" id="chart-{name}" hidden><div class="chart-body"></div>'
        f'<p class="caption">{escape(caption)}</p></div>'
    )


def command_html(command: str | None) -> str:
    return "" if command is None else f'<pre class="command" tabindex="0"><code>{escape(command)}</code></pre>'


def json_html(summary: str, value: Mapping[str, Any]) -> str:
    """A record to open; the summary is HTML."""
    return (
        f'<details class="record"><summary>{summary}</summary>'
        f'<pre tabindex="0"><code>{escape(json_text(value, indent=2))}</code></pre></details>'
    )


def terms_html(grid_size: tuple[int, int] | None, intervals: str, spread: str = "") -> str:
    """What the words mean; `intervals`, and `spread` where there is one, say what those of this page are, as HTML."""
    uniform = ""
    if grid_size is not None:
        rows, num_columns = grid_size
        uniform = (
            f" On this {rows} × {num_columns} grid, uniform attention has a distance of "
            f"{uniform_attention_distance(grid_size):.3f}."
        )
    return (
        "<dl><dt>Mean attention distance (MAD)</dt><dd>How far a patch looks on average, weighted by its attention, as "
        "a fraction of the grid’s diagonal. 0: only at itself. Tokens without a place in the image, such as the class "
        f"token, do not count.{uniform}</dd>"
        "<dt>Attention entropy</dt><dd>How spread out attention is. 0: all of it on one patch. 1: the same on every "
        f"patch.</dd><dt>Intervals</dt><dd>{intervals}</dd>"
        + (f"<dt>Spread over images</dt><dd>{spread}</dd></dl>" if spread else "</dl>")
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
