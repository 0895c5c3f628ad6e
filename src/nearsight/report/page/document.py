"""The page as one file: its parts put together, and a content policy that lets nothing else in.

Scripts are allowed by the hashes of their text, so that nothing that came in with a name or a number can ever run.
"""

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from string import Template
from typing import Any, Protocol

from nearsight.report.inputs import shorten
from nearsight.report.page.html_tables import label_html
from nearsight.report.page.packing import packed
from nearsight.version import __version__

LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.min.js")
"""In the order in which they need each other."""
SCRIPTS = (
    *("base.js", "tables.js", "charts.js", "heads.js", "plane.js", "head_table.js", "profiles.js", "heatmaps.js"),
    *("training.js", "effects.js"),
)
"""Ours, in the order in which they run; they share one scope."""
TITLE_LIMIT = 200
DATA = "page-data"
"""The element whose text is the data of the charts."""


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
        title = shorten(self.title, TITLE_LIMIT)
        return Template(part("page.html")).substitute(
            policy=_policy(scripts),
            refresh=_refresh_html(self.refresh_seconds),
            style=part("style.css") + self._explorer_style(),
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
        libraries = [] if self.data is None else [part(f"vendor/{name}") for name in LIBRARIES]
        own = "(() => {\n'use strict';\n" + "\n".join(part(f"script/{name}") for name in SCRIPTS) + "\n})();"
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
    return "" if data is None else f'<script type="application/json" id="{DATA}">{packed(data)}</script>'


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
def part(name: str) -> str:
    """The text of a file beside this one."""
    return resources.files("nearsight.report.page").joinpath(name).read_text(encoding="utf-8")
