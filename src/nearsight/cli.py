"""The commands. Thin: parse, call, print. Results go to standard output, everything else to standard error."""

import errno
import importlib
import io
import os
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence

from nearsight.errors import InputError, unknown_name
from nearsight.version import __version__

COMMANDS = {
    "demo": "see, induce and understand locality in three minutes, on one page",
    "measure": "how far and how selectively each head of a model looks",
    "maps": "where every head looks on each image, as a file of attention maps",
    "ablate": "what each head is worth to a classifier, and how far heads have to reach",
    "atlas": "many models on the same pictures: one table, one page",
    "train": "train a model from a recipe",
    "finetune": "a trained model made local by further training, measured before and after",
    "study": "which part of a recipe makes attention local, with confidence intervals",
    "model": "what a model is, and what a forward of it costs",
    "probe": "what the features of a frozen model are worth",
    "report": "one page of a run, a study or a measured model, or of several side by side",
    "share": "a run as others can load it, in a folder or on the Hugging Face Hub",
    "data": "which data sets are here, getting one, and whether it is intact",
    "bench": "this project and its peers on the same work",
}
"""Name → what it is for. Each is a module of `nearsight.commands`, imported only when it is called."""

DEBUG = "--debug"
GOES_ON = "what was finished is kept, and the same command does only what is missing"
_MOST_SAID = 300
"""Characters of an error's own words."""


def help_text() -> str:
    """What `nearsight --help` prints."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {about}" for name, about in COMMANDS.items())
    return (
        "nearsight: see, measure and induce spatial locality in Vision Transformers\n\n"
        f"usage: nearsight COMMAND [OPTIONS]\n\n{listed}\n\n"
        "nearsight COMMAND --help shows a command's options; nearsight --version the version.\n"
        "With --debug, an unexpected error shows its traceback."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in arguments
    arguments = [argument for argument in arguments if argument != DEBUG]
    _show_what_can_be_shown()
    try:
        code = _run(arguments)
        sys.stdout.flush()  # what cannot be written is known here, not when Python ends
        return code
    except KeyboardInterrupt:
        print(f"nearsight: interrupted; {GOES_ON}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
            # Of our output: files that cannot be written are named where that is.
            _reader_gone()
            return _complain(f"the output cannot be written: {error.strerror}", 1)
        if debug:
            raise
        return _unexpected(error, arguments)


def _run(arguments: list[str]) -> int:
    """Run a command and print its expected errors; unexpected ones are raised."""
    try:
        _check_spelling(arguments)
        if not arguments or arguments[0] in ("-h", "--help"):
            print(help_text())
            return 0 if arguments else _complain("no command is named; see nearsight --help", 2)
        if arguments[0] == "--version":
            print(__version__)
            return 0
        if arguments[0] not in COMMANDS:
            raise unknown_name("command", arguments[0], COMMANDS)
        return _dispatch(*arguments)
    except InputError as error:
        return _complain(error, 2)
    except OSError as error:
        if error.filename is None:  # of the output, or of nothing that can be named
            raise
        return _complain(f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}", 2)


def _check_spelling(arguments: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8: they end up in files, which are."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InputError(f"{argument!r} is not valid UTF-8; rename it, or link to it by another name") from None
        if argument == "":
            raise InputError("an argument is empty; is it a variable that is not set?")


def _dispatch(name: str, *arguments: str) -> int:
    # Pillow's own warning about pictures that are refused here with a reason. Library users still see it.
    warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
    from nearsight.train.stopping import TrainingError

    try:
        command = importlib.import_module(f"nearsight.commands.{name}")
        return int(command.main(list(arguments)))
    except TrainingError as error:
        return _complain(error, 1)
    except (MemoryError, RuntimeError) as error:
        return _failed(error)


def _failed(error: MemoryError | RuntimeError) -> int:
    """Say so if a device failed or memory was too small: the exit code. Other errors are raised."""
    import torch

    from nearsight.train.planning import is_out_of_memory

    if isinstance(error, torch.AcceleratorError):  # after which this process can do nothing more there
        reason = str(error).splitlines()[0]
        return _complain(f"the device failed ({reason}); what was saved is kept, and the same command continues", 1)
    if not is_out_of_memory(error):
        raise error
    return _complain(f"there is not enough memory for this ({str(error) or 'MemoryError'}); ask for less at a time", 1)


def _complain(problem: object, code: int) -> int:
    print("nearsight: " + " ".join(str(problem).split()), file=sys.stderr)
    return code


def _show_what_can_be_shown() -> None:
    """Replace characters that the terminal cannot show, and discard output to a stream that was closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python's way to say so
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _reader_gone() -> int:
    """The exit code when our output is no longer read, as in `nearsight … | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _unexpected(error: Exception, arguments: Sequence[str]) -> int:
    """Print an unexpected error in one line, with the file that has its traceback: the exit code."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_SAID]
    trace = "".join(traceback.format_exception(error))
    try:
        # Only the user can read it, since paths and arguments are in it, and no link can have been put there.
        descriptor, path = tempfile.mkstemp(prefix="nearsight-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(f"nearsight {__version__} {shlex.join(arguments)}\n\n{trace}")
        place = f"the whole error is in {path}"
    except OSError:
        place = "--debug shows the whole error"
    return _complain(f"an unexpected error: {said}; {GOES_ON}; {place}", 1)
