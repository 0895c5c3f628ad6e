"""Typed options: parsing with tyro, errors on one line, and the options that many commands share."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro

from nearsight.errors import InputError

T = TypeVar("T")

_NUMBERS = {"INT": "a whole number", "FLOAT": "a number"}
_OPTIONAL_NUMBER = re.compile(
    r"Error parsing (?P<option>--[\w.-]+): no type matching \{None\}\|(?P<kind>INT|FLOAT) could be instantiated from "
    r"\[(?P<value>'.*?')\]"
)
"""What tyro says of an option that is a number or not given, before it tells of each of the two why not."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command that computes something."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""
    data_dir: Path | None = None
    """Folder with the data sets; else NEARSIGHT_DATA, else the user's cache folder."""
    json: bool = False
    """Print one machine-readable object instead of text."""

    @property
    def torch_device(self) -> torch.device:
        return find_device(self.device)


def parse(options: type[T], arguments: Sequence[str], *, prog: str, default: Any = None, description: str = "") -> T:
    """The options in `arguments`; help is printed, and a mistake becomes an `InputError` of one line."""
    complaint = io.StringIO()
    settings: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: T = tyro.cli(
                options,
                args=list(arguments),
                prog=prog,
                description=description or None,
                config=(tyro.conf.FlagCreatePairsOff,),
                **settings,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(f"{_one_line(complaint.getvalue())}; see {prog} --help") from None
    sys.stderr.write(complaint.getvalue())
    return parsed


def _one_line(box: str) -> str:
    """The message in tyro's error, with the option it suggests, if any.

    On a UTF-8 stream the error is a box whose upper edge holds the title; elsewhere the title is its first section.
    """
    inner = "\n".join(line.strip(" │") for line in box.splitlines() if not line.startswith(("╭", "╰")))
    sections = [" ".join(section.split()) for section in re.split(r"^[─-]{5,}$", inner, flags=re.MULTILINE)]
    message, *others = sections if box.startswith("╭") else sections[1:]
    suggestion = next((section for section in others if section.startswith("Perhaps you meant")), "")
    option = re.search(r"--[\w.-]+", suggestion)
    if number := _OPTIONAL_NUMBER.match(message):
        message = f"{number['option']} is {number['value']}, but {_NUMBERS[number['kind']]} is needed"
    return message.rstrip(".") + (f"; did you mean {option.group()}?" if option else "")


def find_device(name: str) -> torch.device:
    """The device of this name, if it is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{name!r} is not a device; use auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda":
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= seen:
            raise InputError(f"device {name!r} is not there: torch sees {seen} CUDA devices; use --device cpu")
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("device 'mps' is not there; use --device cpu")
    elif device.type != "cpu":
        raise InputError(f"device {name!r} is not one nearsight computes on; use auto, cpu, cuda, cuda:N or mps")
    return device
