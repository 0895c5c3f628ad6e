"""The `nearsight` command until it is known which: help and the version come at once.

Not part of the package `nearsight`, because whoever imports that has torch and timm loaded, among whose models it puts
its own. That takes seconds, which someone who only asks what there is should not have to wait.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from nearsight_command.usages import MISSING, USAGES, listed

COMMANDS = {
    "demo": "train a small ViT with and without CutMix and show what changes",
    "measure": "how far and how selectively each head of a model looks",
    "train": "train a model from a recipe",
    "study": "which part of a recipe makes attention local, and how sure that is",
    "probe": "what the features of a frozen model are worth",
    "report": "one page of a run, a study or a measured model, or of several side by side",
    "data": "which data sets are here, getting one, and whether it is intact",
    "bench": "this project and its peers on the same work",
}
"""Name → what it is for. Each is a module of `nearsight.commands`, imported only when it is called."""


def help_text() -> str:
    """What `nearsight --help` prints."""
    return (
        "nearsight: see, measure and induce spatial locality in Vision Transformers\n\n"
        f"usage: nearsight COMMAND [OPTIONS]\n\n{listed(COMMANDS)}\n\n"
        "nearsight COMMAND --help shows a command's options; nearsight --version the version."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code (see `nearsight.cli`)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_what_can_be_shown()
    try:
        code = answered(arguments, _installed_version())
        if code is not None:
            sys.stdout.flush()  # what cannot be written is known here, not when Python ends
            return code
        from nearsight.cli import main as run  # here, because it takes seconds
    except KeyboardInterrupt:
        print("nearsight: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return reader_gone()
    except OSError as error:
        return output_failed(error)
    return run(arguments)


def show_what_can_be_shown() -> None:
    """A terminal without our quotes and dashes shows something else; an output that was closed (`>&-`) nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python's way to say so
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def reader_gone() -> int:
    """The exit code when nobody reads our output any more, as in `nearsight … | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def output_failed(error: OSError) -> int:
    """Say that our output cannot be written, if that is the error, and else raise it: the exit code."""
    # Files that cannot be written are named where they are written: this is the output itself.
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
        raise error
    reader_gone()
    print(f"nearsight: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def answered(arguments: Sequence[str], known_version: str | None) -> int | None:
    """Print help or the version, if that is what is asked for and known: the exit code, else None."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0 if arguments else nothing_named("command")
    if arguments[0] in USAGES and arguments[1:] in ([], ["-h"], ["--help"]):
        return told_usage(arguments[0], arguments[1:])
    if arguments[0] == "--version" and known_version is not None:
        print(known_version)
        return 0
    return None


def told_usage(command: str, arguments: Sequence[str]) -> int:
    """Print how a command is used, which was asked for, or nothing was said: the exit code."""
    print(USAGES[command])
    return 0 if arguments else nothing_named(MISSING[command], f" {command}")


def nothing_named(what: str, command: str = "") -> int:
    """Say that a command lacks its first word: the exit code."""
    print(f"nearsight: no {what} is named; see nearsight{command} --help", file=sys.stderr)
    return 2


def _installed_version() -> str | None:
    """None where the package is not installed, but found by its path."""
    try:
        return version("nearsight")
    except PackageNotFoundError:
        return None
