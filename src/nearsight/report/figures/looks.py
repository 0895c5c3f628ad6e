"""One look per condition, everywhere: its colour, dash and marker in figures, in charts and on the page's chips.

The name decides. A baseline is grey, CutMix has a colour of its own and so has LocAt, whatever stands beside them; a
protocol without a part (−CutMix) has the part's colour, darkened. Names that say nothing of all this get what is left
of the palette, in their order. Looks differ in colour, dash and marker at once, layers in lightness, so that a figure
survives colour blindness and a grey printer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D

# Okabe and Ito's colours that stand out from white as lines; grey stands in for their black, which would vanish on a
# dark page, and the yellow is darkened.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#767676", "#a89b00")
_BLUE, _VERMILION, _GREEN, _PINK, _AMBER, _SKY, _GREY, _OLIVE = PALETTE
_VIOLET = "#7a5fc0"
_DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.2, 1.4)),
    (0, (5, 1.5, 1.2, 1.5)),
    (0, (9, 2.5)),
    (0, (3, 1.2, 1.2, 1.2, 1.2, 1.2)),
    (0, (2.5, 1.2)),
)
_MARKERS = ("o", "^", "s", "D", "v", "P", "X", "p", "*")
_TOLD_APART = len(PALETTE) + 1
"""So many names have colours of their own."""
_DARKER, _STRONGER = 0.6, 0.8
"""What is left of a part's colour where a protocol lacks the part, and where it has it in every batch."""


@dataclass(frozen=True, kw_only=True)
class ModelStyle:
    colour: str
    dash: Any
    marker: str

    def look_with(self, **options: Any) -> dict[str, Any]:
        """What matplotlib needs for a line with marks or, with linestyle "none", for points."""
        return {"color": self.colour, "linestyle": self.dash, "marker": self.marker, **options}

    def handle(self, **options: Any) -> Line2D:
        """A line of this look for a legend."""
        return Line2D([], [], **self.look_with(**options))


def _style(colour: str, dash: int, marker: str) -> ModelStyle:
    return ModelStyle(colour=colour, dash=_DASHES[dash], marker=marker)


BASE = _style(_GREY, 1, "^")
"""With nothing added. The markers of S1's four key conditions are the paper's."""
_MODERN, _BOTH = _style(_BLUE, 0, "o"), _style(_VIOLET, 0, "o")
_PARTS = {
    "cutmix": (_style(_VERMILION, 4, "X"), "s"),
    "autoaugment": (_style(_PINK, 3, "P"), "D"),
    "colorjitter": (_style(_OLIVE, 3, "P"), "D"),
    "labelsmoothing": (_style(_SKY, 2, "v"), "p"),
    "gaug": (_style(_AMBER, 5, "p"), "v"),
    "prr": (_style(_PINK, 2, "v"), "P"),
    "locat": (_style(_GREEN, 0, "D"), "s"),
}
"""A part of a protocol or model → its look, and the marker of what lacks it alone."""
_NAMED = {
    **dict.fromkeys(("baseline", "base", "vit", "none of these", "neither", "plain", "off"), BASE),
    "modern": _MODERN,
    **dict.fromkeys(("cutmix + locat", "cutmix and locat"), _BOTH),
}
_PART = re.compile(r"(?:\+|with |vit \+ )?([a-z ]+?)(?:[ :]+(?:p ?= ?)?(\d[\d.]*))?")
_LACKING = re.compile(r"[−-]([a-z ]+)")


def looks(labels: Sequence[str]) -> dict[str, ModelStyle]:
    """The look of each of these, which are shown together: all conditions of a study, or all models of a page."""
    found: dict[str, ModelStyle] = {}
    for name in (_named, _mentioned):
        for label in labels:
            style = None if label in found else name(label)
            if style is not None and style not in found.values():
                found[label] = style
    taken = {style.colour for style in found.values()}
    free = [colour for colour in PALETTE if colour not in taken] or list(PALETTE)
    rest = [label for label in dict.fromkeys(labels) if label not in found]
    for place, label in enumerate(rest):
        kin = _kin(label) if len(labels) > _TOLD_APART else None
        colour = free[place % len(free)] if kin is None else kin.colour
        found[label] = _style(colour, place % len(_DASHES), _MARKERS[place % len(_MARKERS)])
    return {label: found[label] for label in labels}


def _kin(label: str) -> ModelStyle | None:
    """Of more names than there are colours, what one shares its colour with: the last part in it that has one, and
    the baseline where it is put together from others."""
    parts = [style for piece in label.split("+") if (style := _named(piece)) not in (None, BASE)]
    return (parts[-1] if parts else None) or _mentioned(label) or (BASE if "+" in label else None)


def _named(label: str) -> ModelStyle | None:
    """Of a name that is one of a condition."""
    text = label.strip().lower()
    if text in _NAMED:
        return _NAMED[text]
    if text.startswith("without "):
        return BASE
    if (lacking := _LACKING.fullmatch(text)) and (part := _PARTS.get(lacking[1].replace(" ", ""))):
        return ModelStyle(colour=_darker(part[0].colour, _DARKER), dash=part[0].dash, marker=part[1])
    if (having := _PART.fullmatch(text)) and (part := _PARTS.get(having[1].replace(" ", ""))):
        in_every_batch = having[1] == "cutmix" and having[2] is not None and float(having[2].rstrip(".")) == 1.0
        return _style(_darker(part[0].colour, _STRONGER), 0, "P") if in_every_batch else part[0]
    return None


def _mentioned(label: str) -> ModelStyle | None:
    """Of a name that has such a one in it: compact_vit.modern_cifar100, runs/baseline."""
    words = set(re.findall(r"[a-z]+", label.lower()))
    styles: Mapping[str, ModelStyle] = {
        "locat": _PARTS["locat"][0],
        "modern": _MODERN,
        "baseline": BASE,
        "cutmix": _PARTS["cutmix"][0],
    }
    return next((style for word, style in styles.items() if word in words), None)


def _darker(colour: str, kept: float) -> str:
    red, green, blue = to_rgb(colour)
    return to_hex((kept * red, kept * green, kept * blue))


def model_style(index: int) -> ModelStyle:
    """The look of what has no name of its own: the line at this place; it differs from all others far beyond eight."""
    return _style(PALETTE[index % len(PALETTE)], index % len(_DASHES), _MARKERS[index % len(_MARKERS)])


def level_markers(levels: Sequence[str]) -> dict[str, str]:
    """Where the colours are those of conditions. The last level is first: circles with it, triangles without (S1)."""
    return {level: _MARKERS[place % len(_MARKERS)] for place, level in enumerate(reversed(levels))}


def shade(colour: str, depth: float) -> str:
    """A colour for a layer: lightened for the first one (depth 0), a little darkened for the last one (depth 1)."""

    def channel(value: float) -> float:
        lightened, darkened = value + (1 - value) * 0.52, value * 0.78
        return lightened + (darkened - lightened) * depth

    red, green, blue = to_rgb(colour)
    return to_hex((channel(red), channel(green), channel(blue)))


def depth_of(layer: int, layers: Sequence[int]) -> float:
    """A layer's place among those shown: 0 for the first, 1 for the last; a single one keeps nearly its colour.

    By place and not by number, so that layers 0 and 1 of 48 can still be distinguished.
    """
    return 0.7 if len(layers) == 1 else layers.index(layer) / (len(layers) - 1)
