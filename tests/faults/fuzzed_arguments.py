"""Calls of every command with arguments that nobody meant, in one process, each for a few seconds at the most."""

import contextlib
import functools
import io
import os
import random
import re
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nearsight.cli import main
from nearsight.commands.bench import BENCHES
from nearsight.commands.probe import PROBES
from nearsight.train.dino.recipes import PRETRAININGS
from nearsight.train.recipes import RUNS

SECONDS = 4.0
"""For a call; one that goes on is at work, and is interrupted as by Ctrl-C."""
GRACE = 20.0
"""Seconds that it then has to end: a file may be being written."""
MEMORY = 2 * 2**30
"""That all calls together may take beside what is there at first."""
COMMANDS = (
    *(("demo",), ("measure",), ("maps",), ("atlas",), ("report",)),
    *(("study", action) for action in ("list", "run", "show")),
    *(("data", action) for action in ("list", "fetch", "check")),
    *(("train", recipe) for recipe in (*RUNS, *PRETRAININGS)),
    *(("probe", probe) for probe in PROBES),
    *(("bench", bench) for bench in BENCHES),
)
VALUES = (
    *("0", "-1", "1", "2", "7", "3.5", "1e9", "1e400", "nan", "-inf", "9" * 30, str(2**31), str(2**63), "0x10", "١"),
    *("", " ", "none", "None", "auto", "cpu", "cuda:99", "meta", "baseline", "λ", "😀", "a b", "-", "--", "x" * 5000),
    *("\udcff", "a\nb", "%s%n", "$(id)", "../../..", "~root", "*", "[", "{}", "a=b", "\\", ";"),
    *("/", "/dev/null", "/dev/zero", "/proc/self/mem", "/proc/1/x", "nowhere/at/all", "folder", "folder/file", "pipe"),
    *("compact_vit", "compact_vi", "vit_tiny_patch16_224", "resnet18", "hf:nobody/nothing", "os:getcwd"),
    *("run", "study", "cifar100", "shapes", "ablation-cifar100", "association"),
    *("file:///dev/null", "memory://x", "s3:x", "::", "zip://a::memory://b"),
)


@dataclass
class Tally:
    """What became of the calls."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Calls that ended in any way but a good one, with what was said."""


def calls(number: int, seed: int) -> Iterator[list[str]]:
    """Each command in turn, with some values of its own and some options, known to it or not."""
    draw = random.Random(seed)
    for place in range(number):
        command = COMMANDS[place % len(COMMANDS)]
        words = [draw.choice(VALUES) for _ in range(draw.choice((0, 1, 1, 1, 2)))]
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            option = draw.choice(options_of(command)) if draw.random() < 0.95 else f"--{draw.choice(VALUES)}"
            words += [option, *(draw.choice(VALUES) for _ in range(draw.choice((0, 1, 1, 1, 2))))]
        if draw.random() < 0.1:
            draw.shuffle(words)
        yield [*command, *words]


@functools.cache
def options_of(command: tuple[str, ...]) -> tuple[str, ...]:
    """As its help names them."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return tuple(sorted(set(re.findall(r"--[a-z][\w.-]*", printed.getvalue()))))


def fuzz(folder: Path, number: int, seed: int, tell: Callable[[Tally], None]) -> None:
    """Make the calls in a folder; the tally is told after each of them."""
    _make_places(folder)
    os.chdir(folder)
    torch.set_num_threads(1)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    _without_network()
    _limit_memory()
    tally = Tally()
    for arguments in calls(number, seed):
        outcome, said = _outcome(arguments)
        tally.outcomes[outcome] += 1
        if outcome == "lost":
            tally.lost.append(f"nearsight {' '.join(map(ascii, arguments))[:500]}\n    {said[-1500:]}")
        tell(tally)


def _outcome(arguments: list[str]) -> tuple[str, str]:
    """refused (2 and one line), answered (0), failed (1 and one line), interrupted, or lost: all else."""
    began = time.monotonic()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as complaint,
        _limited(SECONDS),
    ):
        try:
            code: object = main(arguments)
        except SystemExit as end:  # of a help
            code = end.code or 0
        except KeyboardInterrupt:  # between two lines of the command's own handler
            code = 130
        except BaseException as error:
            return "lost", f"{type(error).__name__}: {error}"
    said = complaint.getvalue()
    if code == 130:  # what torch's destructors then say of objects that were never finished
        said = said.partition("Exception ignored in")[0]
    complaints = [line for line in said.splitlines() if line.startswith("nearsight: ")]
    outcomes = {0: "answered", 1: "failed", 2: "refused", 130: "interrupted"}
    seconds = time.monotonic() - began
    is_good = (
        code in outcomes and "unexpected error" not in said and "Traceback" not in said and seconds < SECONDS + GRACE
    )
    if not is_good or (code in (1, 2) and len(complaints) != 1):
        return "lost", f"exit code {code} after {seconds:.0f} s: {said}"
    return outcomes[int(str(code))], said


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again and again: a first one may be taken for a polite wish
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _make_places(folder: Path) -> None:
    (folder / "folder").mkdir(parents=True)
    (folder / "folder" / "file").write_text("text")
    for name in ("run", "study"):
        (folder / name).mkdir()
        (folder / name / {"run": "config.json", "study": "study.json"}[name]).write_text("{}")
    os.mkfifo(folder / "pipe")


def _without_network() -> None:
    connect = socket.socket.connect

    def connected(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:  # by which workers of one machine talk to each other
            raise ConnectionRefusedError("there is no network here")
        connect(self, address)

    socket.socket.connect = connected


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    now = 1024 * int(re.findall(r"VmData:\s+(\d+) kB", status)[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, now + MEMORY))
