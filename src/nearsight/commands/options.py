"""What commands share: typed options, parsed with tyro, whose errors are one line; engines; and an orderly end at
SIGINT or SIGTERM. Handlers belong to commands: the library only offers a `Stop` to request."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

import tyro

from nearsight.errors import InputError, unknown_name
from nearsight.lazy import torch
from nearsight.train import Stop, StoppedError

T = TypeVar("T")
Engine = Literal["local", "processes", "ray"]
"""This process, several of this machine, or a Ray cluster."""
DEFAULT_ADDRESS = "auto"
"""Of Ray: the cluster that runs here."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"

_NUMBERS = {"INT": "a whole number", "FLOAT": "a number"}
_OPTIONAL_NUMBER = re.compile(
    r"Error parsing (?P<option>--[\w.-]+): no type matching \{None\}\|(?P<kind>INT|FLOAT) could be instantiated from "
    r"\[(?P<value>'.*?')\]"
)
"""The start of tyro's error for an option that takes a number or None, before it explains why neither fits."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command that computes something."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""
    data_dir: Path | None = None
    """Folder with the data sets; by default NEARSIGHT_DATA, or the user's cache folder."""
    json: bool = False
    """Print one machine-readable object instead of text."""

    @property
    def torch_device(self) -> torch.device:
        return find_device(self.device)


@dataclass(frozen=True, kw_only=True)
class Request(Common):
    """The options that say which models are measured on which images."""

    models: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]", help_behavior_hint="")
    ]
    """A timm name, hf:org/name or hf:FOLDER (transformers), torchvision:NAME, package.module:function, a run folder."""
    images: str | None = None
    """A folder of images, or a data set (nearsight data list), then its test images; by default the embedded set."""
    num_images: int | None = None
    """Images at most; for a run as many as its config says, otherwise 256."""
    pretrained: bool = False
    """Load the published weights of models of timm and torchvision; they are random otherwise."""
    checkpoint: Path | None = None
    """File with your own weights of the model: safetensors, or a state dict that torch.save wrote."""
    image_size: int | None = None
    """Side of the images in pixels, if not the model's own."""
    seed: int = 0
    """Seed of random weights."""


def listed(choices: Mapping[str, str]) -> str:
    """For helps: a line for each name with what it is for, one below the other."""
    width = max(map(len, choices))
    return "\n".join(f"  {name:<{width}}  {about}" for name, about in choices.items())


def asks_for_usage(arguments: Sequence[str]) -> bool:
    """Whether a command that needs one more word is given none, or asked for its help."""
    return not arguments or arguments[0] in ("-h", "--help")


def print_usage(command: str, usage: str, kind: str, arguments: Sequence[str]) -> int:
    """Print how a command is used: the exit code. It is an error if nobody asked; `kind` is what has to come next."""
    print(usage)
    if not arguments:
        raise InputError(f"no {kind} is named; see nearsight {command} --help")
    return 0


def dispatch(
    command: str,
    arguments: Sequence[str],
    actions: Mapping[str, Callable[[list[str]], int]],
    usage: str,
    kind: str = "action",
) -> int:
    """Run the action that the first argument names with the others; without one, print how the command is used."""
    if asks_for_usage(arguments):
        return print_usage(command, usage, kind, arguments)
    if arguments[0] not in actions:
        raise unknown_name(kind, arguments[0], actions)
    return actions[arguments[0]](list(arguments[1:]))


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


def folders_of(models: Sequence[str], out: Path) -> list[Path]:
    """A folder for each model, named after it; the whole for one alone."""
    names = [short_name(model) for model in models]
    if len(names) == 1:
        return [out]
    return [out / (name if names.count(name) == 1 else f"{name}-{place}") for place, name in enumerate(names, start=1)]


def short_name(text: str) -> str:
    """A model's name as part of a file name."""
    text = text.removesuffix("/")
    for prefix in ("", "hf:"):
        if text.startswith(prefix) and Path(text.removeprefix(prefix)).is_dir():
            text = prefix + Path(text.removeprefix(prefix)).resolve().name
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:80] or "model"


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


def check_engine(engine: Engine, *, workers: int | None, address: str) -> None:
    """Refuse an option that the engine does not use."""
    if workers is not None and engine != "processes":
        raise InputError(f"--workers is for --engine processes, not for {engine}")
    if address != DEFAULT_ADDRESS and engine != "ray":
        raise InputError(f"--address is for --engine ray, not for {engine}")


class _InterruptedError(BaseException):
    """A signal came while nothing checks for a stop, so the command ends here. Not for `except Exception` to catch."""

    def __init__(self, by: str) -> None:
        self.by = by
        super().__init__(f"stopped by {by}; the same command continues")


def stoppable(work: Callable[[Stop], int]) -> int:
    """The exit code of `work`, or 128 and the number of the signal that stopped it, with a line that says so.

    After the first signal the step ends and all whole epochs are kept; a second ends the command at once.
    """
    try:
        with _listening() as stop:
            return work(stop)
    except (StoppedError, _InterruptedError) as stopped:
        print(f"nearsight: {stopped}", file=sys.stderr)
        return 128 + signal.Signals[stopped.by]


@contextmanager
def _listening() -> Iterator[Stop]:
    """A stop that signals request. Outside the main thread there are no handlers, and so no requests."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            if sys.stderr.isatty():  # a progress bar hides it
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
            os._exit(128 + number)
        stop.request(signal.Signals(number).name)
        if not stop.is_listening:
            raise _InterruptedError(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            # Signals that are ignored (nohup, a shell's background jobs) or handled elsewhere stay so.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
