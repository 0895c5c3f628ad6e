"""The commands. Thin: parse, call, print. Results go to standard output, everything else to standard error."""

import importlib
import os
import sys
from collections.abc import Sequence

from nearsight.errors import InputError, unknown_name
from nearsight.version import __version__
from nearsight_command import COMMANDS, answered


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(arguments)
    except InputError as error:
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain("interrupted; the same command continues where it was", 130)
    except BrokenPipeError:  # the reader of our output has gone, as in `nearsight … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: list[str]) -> int:
    if (code := answered(arguments, __version__)) is not None:
        return code
    if arguments[0] not in COMMANDS:
        raise unknown_name("command", arguments[0], COMMANDS)
    import torch

    from nearsight.train import TrainingError

    try:
        command = importlib.import_module(f"nearsight.commands.{arguments[0]}")
        return int(command.main(arguments[1:]))
    except TrainingError as error:
        return _complain(error, 1)
    except torch.AcceleratorError as error:  # after which this process can do nothing more there
        reason = str(error).splitlines()[0]
        return _complain(f"the device failed ({reason}); what was saved is kept, and the same command continues", 1)


def _complain(problem: object, code: int) -> int:
    print("nearsight: " + " ".join(str(problem).split()), file=sys.stderr)
    return code
