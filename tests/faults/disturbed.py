"""Processes that end in the middle of what they do: inside a write, through the hook in nearsight.files, or after a
while. They are forked from a server that has imported everything once, so each of them costs little."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from nearsight import files
from nearsight.study.lock import Locks

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["nearsight.commands.measure", "nearsight.study", "nearsight.probe"])
_NOBODY = 65534
LIMIT = 120.0
"""Seconds after which a process counts as hanging."""

Place = Literal["half-way", "before the rename", "after the rename"]
_MOMENTS: dict[Place, files.Moment] = {
    "half-way": "written",
    "before the rename": "flushed",
    "after the rename": "renamed",
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a process is to be killed."""

    seconds: float | None = None
    """After this time, wherever it is then."""
    write: int = 0
    """Or inside this one of its writes, from 1."""
    place: Place = "half-way"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process came to its end."""

    killed: bool
    seconds: float = 0.0
    writes: int = 0
    """How many files it wrote."""
    failure: str = ""
    """What it raised."""


def run(work: Callable[..., None], *arguments: Any, kill: Kill | None = None) -> Ended:
    """`work(*arguments)` in a process of its own."""
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_work, args=(sender, kill, work, arguments), daemon=True)
    process.start()
    sender.close()
    hangs = not receiver.poll(LIMIT)
    if hangs:
        process.kill()
    try:
        ended: Ended = receiver.recv()
    except EOFError:  # without a word
        ended = Ended(killed=True)
    process.join()
    assert not hangs
    assert process.exitcode == (-signal.SIGKILL if ended.killed else 0)
    return ended


def _work(sender: Connection, kill: Kill | None, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # how sums are divided among threads depends on how many cells train together
    hook = _Hook(kill)
    files.disturb = hook
    if kill is not None and kill.seconds is not None:
        threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began, failure = time.perf_counter(), ""
    try:
        work(*arguments)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    sender.send(Ended(killed=False, seconds=time.perf_counter() - began, writes=hook.writes, failure=failure))
    os._exit(0)  # without waiting for a timer that is too late


class _Hook:
    """Counts writes, and ends the process in one of them."""

    def __init__(self, kill: Kill | None) -> None:
        self._kill, self.writes = kill, 0

    def __call__(self, moment: files.Moment, path: Path) -> None:
        self.writes += moment == "written"
        if self._kill is None or self.writes != self._kill.write or _MOMENTS[self._kill.place] != moment:
            return
        if self._kill.place == "half-way":
            os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def as_nobody(work: Callable[..., Any], *arguments: Any) -> None:
    """Do it as a user who is not root; whoever is not root already does it as he is."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
        os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = "/tmp"
    work(*arguments)


def take_cell(folder: Path) -> None:
    """Try to take the lock that somebody else holds."""
    locks = Locks(folder)
    assert not locks.take("cell")
    holder = locks.holder("cell")
    assert holder is not None
    assert not holder.is_stale
