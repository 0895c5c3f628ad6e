"""Arguments that nobody meant, to every command: one line or an answer; no traceback, no hang, no more memory."""

import sys
from pathlib import Path

import pytest
from disturbed import SERVER
from fuzzed_arguments import COMMANDS, GRACE, SECONDS, Tally, fuzz

NUMBER = 1200
NUM_PARTS = 4


@pytest.mark.faults
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_arguments_that_nobody_meant(tmp_path: Path, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    number = NUMBER // NUM_PARTS
    tally, finished = fuzz_elsewhere(tmp_path, number, part)
    with capsys.disabled():
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.outcomes.items()))
        print(f"\n{tally.outcomes.total()} calls of {len(COMMANDS)} commands: {told}", file=sys.stderr)
    assert finished, f"the process ended or hangs after {tally.outcomes.total()} of {number} calls"
    assert tally.lost == [], "\n".join(tally.lost)


def fuzz_elsewhere(folder: Path, number: int, seed: int) -> tuple[Tally, bool]:
    """In a process of its own; the last tally, and whether it is of all calls."""
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=fuzz, args=(folder, number, seed, sender.send))
    process.start()
    sender.close()
    tally = Tally()
    try:
        while tally.outcomes.total() < number and receiver.poll(60 + SECONDS + GRACE):
            tally = receiver.recv()
    except EOFError:
        pass
    process.kill()
    process.join()
    return tally, tally.outcomes.total() == number
