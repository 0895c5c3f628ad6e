"""SIGINT and SIGTERM while a command trains: the first lets the step end and keeps all whole epochs, a second ends now.

Handlers belong to commands: the library only offers a `Stop` to wish with.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from nearsight.train import Stop, StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


class _InterruptedError(BaseException):
    """A signal came while nobody asks for it, so whatever runs ends here. Not for `except Exception` to catch."""

    def __init__(self, by: str) -> None:
        self.by = by
        super().__init__(f"stopped by {by}; the same command continues")


def stoppable(work: Callable[[Stop], int]) -> int:
    """The exit code of `work`, or 128 and the number of the signal that stopped it, with a line that says so."""
    try:
        with _listening() as stop:
            return work(stop)
    except (StoppedError, _InterruptedError) as stopped:
        print(f"nearsight: {stopped}", file=sys.stderr)
        return 128 + signal.Signals[stopped.by]


@contextmanager
def _listening() -> Iterator[Stop]:
    """A stop that signals wish for. Elsewhere than in the main thread, where there are no handlers, nobody does."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            if sys.stderr.isatty():  # a progress bar hides it
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
            os._exit(128 + number)
        stop.request(signal.Signals(number).name)
        if not stop.is_heeded:
            raise _InterruptedError(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            # What somebody chose to ignore (nohup, a shell's background jobs) or handles elsewhere stays so.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
