"""The commands. Thin: parse, call, print. Results go to standard output, everything else to standard error."""

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import nearsight_command
from nearsight.errors import InputError, unknown_name
from nearsight.version import __version__
from nearsight_command import COMMANDS, answered


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    return nearsight_command.main(arguments)


def run(arguments: list[str]) -> int:
    """Run a command and print its expected errors; unexpected ones are raised."""
    try:
        _check_spelling(arguments)
        return _dispatch(arguments)
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


def _dispatch(arguments: list[str]) -> int:
    if (code := answered(arguments, __version__)) is not None:
        return code
    if arguments[0] not in COMMANDS:
        raise unknown_name("command", arguments[0], COMMANDS)
    # Pillow's own warning about pictures that are refused here with a reason. Library users still see it.
    warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
    import torch

    from nearsight.train import TrainingError
    from nearsight.train.planning import is_out_of_memory

    try:
        command = importlib.import_module(f"nearsight.commands.{arguments[0]}")
        return int(command.main(arguments[1:]))
    except TrainingError as error:
        return _complain(error, 1)
    except torch.AcceleratorError as error:  # after which this process can do nothing more there
        reason = str(error).splitlines()[0]
        return _complain(f"the device failed ({reason}); what was saved is kept, and the same command continues", 1)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _complain(
            f"there is not enough memory for this ({str(error) or 'MemoryError'}); ask for less at a time", 1
        )


def _complain(problem: object, code: int) -> int:
    print("nearsight: " + " ".join(str(problem).split()), file=sys.stderr)
    return code
