"""What the explorer is in a page: a place to be drawn at, its data, one script and one style sheet."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

from nearsight.errors import InputError
from nearsight.files import read_object, write_text

PLACE = "nearsight-explorer"
"""The id of the element the script draws in; that of the data is the same with "-data" behind it."""
FORMAT = 1
"""Of the data; raised whenever an older script would go wrong."""


@dataclass(frozen=True)
class Explorer:
    """Models, their maps on a few pictures, and what is to be said about them."""

    data: Mapping[str, Any]
    """JSON values: `colours`, `pictures`, `notes` and `models`, whose layers are as `packing` says."""

    def html(self) -> str:
        """The body fragment; the page also needs `explorer_style` and, after the fragment, `explorer_script`."""
        # No text may end the element it stands in.
        text = self._text().replace("<", "\\u003c")
        return (
            f'<div id="{PLACE}"><noscript><p>Looking into the heads needs JavaScript.</p></noscript></div>'
            f'<script type="application/json" id="{PLACE}-data">{text}</script>'
        )

    def write(self, path: Path) -> None:
        """To a file, for a page that is made when the model is no longer there."""
        write_text(path, self._text())

    @classmethod
    def read(cls, path: Path) -> Self:
        data = read_object(path, missing=f"{path.parent} has no attention maps", way_out="; measure the model again")
        if not isinstance(data.get("format"), int):
            raise InputError(f"{path} holds no maps of attention; measure the model again")
        if data["format"] > FORMAT:
            raise InputError(f"{path} was written by a newer nearsight (format {data['format']}); update it")
        explorer = cls(data)
        try:
            explorer._text()
        except ValueError as error:  # NaN and infinity, which Python reads and no page can hold
            raise InputError(f"{path} is damaged: {error}; measure the model again") from error
        return explorer

    def _text(self) -> str:
        return json.dumps(dict(self.data), allow_nan=False, separators=(",", ":"))


def explorer_style() -> str:
    return _file("explorer.css")


def explorer_script() -> str:
    return _file("explorer.js")


def _file(name: str) -> str:
    return resources.files("nearsight.report.explorer").joinpath(name).read_text(encoding="utf-8")
