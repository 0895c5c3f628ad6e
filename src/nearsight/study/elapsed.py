"""How long a study took by the clock: the time in which at least one of its runs was at work.

Stacks train their runs together and processes share a device, so the seconds of runs and epochs cannot be added up. The
runs' events say what happened when; of runs that were taken from tables nobody knows.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise

from nearsight.train import RunFolder


def elapsed_seconds(runs: Iterable[RunFolder]) -> float:
    """The length of all spans from a start of a run to what it told last; where spans overlap it counts once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(span for run in runs for span in _spans(run)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _spans(run: RunFolder) -> Iterator[tuple[float, float]]:
    """When the run was at work, in seconds since 1970. One that was killed was so until its last event at least."""
    try:
        lines = run.events.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    starts = [number for number, line in enumerate(lines) if '"event": "started"' in line]
    for start, following in pairwise([*starts, len(lines)]):
        # A line may have been cut short by what killed the run; a log is not worth a complaint.
        moments = (_moment(line) for line in reversed(lines[start + 1 : following]))
        begin, end = _moment(lines[start]), next((moment for moment in moments if moment is not None), None)
        if begin is not None and end is not None:
            yield begin, end


def _moment(line: str) -> float | None:
    try:
        return datetime.fromisoformat(json.loads(line)["time"]).timestamp()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
