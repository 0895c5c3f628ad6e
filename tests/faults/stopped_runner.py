"""Runners of a study in processes of their own, which stop themselves (SIGSTOP) inside a write."""

import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from disturbed import SERVER
from study_records import Recorder

from nearsight import files
from nearsight.study import Study, run_study
from nearsight.study import lock as locks_of_studies
from nearsight.train import RunConfig

STALE, BEAT = 1.5, 0.2
"""Seconds; short, so that a test need not wait for ten minutes."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A runner stops itself inside a write into a run folder."""

    name: str
    """Of the file."""
    moment: files.Moment
    which: int = 1
    """The first, second … such file that it writes."""


class Telling(Recorder):
    """Remembers what was lost, too."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_from_here: list[str] = []

    def taken_over(self, config: RunConfig) -> None:
        self.taken_from_here.append(config.identity)


def work(folder: Path, study: Study, pause: Pause | None, sender: Connection) -> None:
    torch.set_num_threads(1)
    locks_of_studies.SECONDS_UNTIL_STALE = STALE
    # What a beat would tell is what a guard has to know by itself.
    locks_of_studies.Locks.kept_alive.__wrapped__.__defaults__ = (BEAT,)
    left = pause.which if pause else 0

    def stop(moment: files.Moment, path: Path) -> None:
        nonlocal left
        if pause and left and moment == pause.moment and pause.name in path.name and path.parent.parent.name == "runs":
            left -= 1
            if left == 0:
                sender.send("stopping")
                os.kill(os.getpid(), signal.SIGSTOP)

    files.disturb = stop
    listener, failure = Telling(), ""
    try:
        run_study(study, folder, listener=listener, cells_per_stack=2)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    sender.send((listener.done, listener.taken_from_here, failure))
    os._exit(0)


def start(folder: Path, study: Study, pause: Pause | None = None) -> tuple[BaseProcess, Connection]:
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=work, args=(folder, study, pause, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def outcome(receiver: Connection) -> tuple[list[str], list[str]]:
    assert receiver.poll(60), "it hangs"
    done, lost, failure = receiver.recv()
    assert not failure
    return done, lost
