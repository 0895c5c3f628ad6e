"""An SVG file's text made fit to stand inside an HTML page, beside others of its kind."""

import re
import xml.etree.ElementTree as ET

from nearsight.report.figures.style import GRID, HATCH, INK, MUTED, PAPER

# What the page's theme decides; colours that carry data stay as they are.
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)", HATCH: "var(--hatch)"}
_THEMED = re.compile("|".join(THEME))
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_NAMESPACE = re.compile(r"^\{[^}]*\}")

# A figure may grow to this many page pixels per point, and shrink to this many before it scrolls sideways.
LARGEST_SCALE, SMALLEST_SCALE = 1.75, 0.95
SMALLEST_WIDTH = 640


def inline_svg(svg: str, *, prefix: str, description: str) -> str:
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
    least = min(SMALLEST_SCALE * width, SMALLEST_WIDTH)
    root.set("style", f"max-width: {LARGEST_SCALE * width:.0f}px; min-width: {least:.0f}px")
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
        value = _THEMED.sub(lambda match: THEME[match[0]], value)
    return value
