"""kill -9 at random moments, many of them inside a write: the same work done again completes, and gives what it gives
undisturbed; nothing half-written has a name that anybody reads."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from disturbed import Kill, Place, run
from killed_work import WORKS

from nearsight.lens import HeadTable
from nearsight.tensorfile import load_tensors

TALLIED = ("kills", "inside a write", "files looked at", "damaged files accepted")
PLACES: tuple[Place, ...] = ("half-way", "before the rename", "after the rename")
NUM_KILLS = {"atlas": 5, "train": 5, "study": 4, "measure": 3, "report": 2, "data cache": 3, "feature cache": 3}


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """Work that nothing came between."""

    ready: Path
    """The folder before it."""
    done: Path
    seconds: float
    writes: int


@pytest.fixture(scope="module")
def tallies() -> dict[str, int]:
    return dict.fromkeys(TALLIED, 0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """Filled as they are needed."""
    return {}


def in_peace(name: str, made: dict[str, Undisturbed], folder: Path) -> Undisturbed:
    if name not in made:
        work, ready = WORKS[name], folder / "ready"
        ready.mkdir(parents=True)
        if work.prepare is not None:
            assert not run(work.prepare, ready).failure
        ended = run(work.do, Path(shutil.copytree(ready, folder / "done")))
        assert not ended.failure
        made[name] = Undisturbed(ready=ready, done=folder / "done", seconds=ended.seconds, writes=ended.writes)
    return made[name]


def whole_csv(path: Path) -> None:
    if not path.read_bytes().endswith(b"\n"):
        raise ValueError("its last line has no end")
    pd.read_csv(path)


READERS: dict[str, Callable[[Path], object]] = {
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".csv": whole_csv,
    ".safetensors": load_tensors,
    ".npz": HeadTable.load,
}


def look_at(folder: Path, tallies: dict[str, int]) -> None:
    """Whatever has its name is whole."""
    for path in folder.rglob("[!.]*"):
        if path.suffix in READERS:
            tallies["files looked at"] += 1
            try:
                READERS[path.suffix](path)
            except ValueError:  # of which all that these readers raise are kinds
                tallies["damaged files accepted"] += 1


def check(name: str, kill: Kill, calm: Undisturbed, folder: Path, tallies: dict[str, int]) -> None:
    work, killed = WORKS[name], False
    while not killed:
        shutil.rmtree(folder, ignore_errors=True)
        ended = run(work.do, Path(shutil.copytree(calm.ready, folder)), kill=kill)
        assert not ended.failure
        killed = ended.killed
        kill = Kill(seconds=kill.seconds / 2) if kill.seconds else kill  # it was faster this time
    tallies["kills"] += 1
    tallies["inside a write"] += kill.write > 0
    look_at(folder, tallies)
    assert tallies["damaged files accepted"] == 0
    resumed = run(work.do, folder)
    assert not resumed.failure, f"after {kill}: {resumed.failure}"
    work.same(calm.done, folder)
    assert list(folder.rglob(".*.tmp*")) == [], f"after {kill}"


@pytest.mark.parametrize(
    ("name", "write", "place"),
    [("train", 4, "half-way"), ("train", 5, "after the rename"), ("data cache", 1, "before the rename")],
)
def test_work_that_was_killed_inside_a_write_is_completed(
    tmp_path: Path, undisturbed: dict[str, Undisturbed], name: str, write: int, place: Place
) -> None:
    calm = in_peace(name, undisturbed, tmp_path / "calm")
    tallies = dict.fromkeys(TALLIED, 0)
    check(name, Kill(write=write, place=place), calm, tmp_path / "killed", tallies)
    assert tallies["inside a write"] == 1


def moments(name: str, calm: Undisturbed) -> list[Kill]:
    """Half of them inside a write, half at any time."""
    draw = random.Random(f"{name} 2026")
    inside = [
        Kill(write=draw.randint(1, calm.writes), place=draw.choice(PLACES)) for _ in range((NUM_KILLS[name] + 1) // 2)
    ]
    outside = [Kill(seconds=draw.uniform(0, 0.9) * calm.seconds) for _ in range(NUM_KILLS[name] // 2)]
    return [*inside, *outside]


@pytest.mark.faults
@pytest.mark.parametrize("name", WORKS)
def test_kills_at_random_moments(
    tmp_path: Path, undisturbed: dict[str, Undisturbed], tallies: dict[str, int], name: str
) -> None:
    calm = in_peace(name, undisturbed, tmp_path / "calm")
    for number, kill in enumerate(moments(name, calm)):
        check(name, kill, calm, tmp_path / f"killed{number}", tallies)


@pytest.mark.faults
def test_how_many_there_were(tallies: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    """After all of the above."""
    told = ", ".join(f"{number} {what}" for what, number in tallies.items())
    with capsys.disabled():
        print(f"\n{told}", file=sys.stderr)  # which is seen from any process
    assert tallies["kills"] == sum(NUM_KILLS.values())
    assert tallies["inside a write"] >= tallies["kills"] / 4
