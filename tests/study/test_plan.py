"""What was to be found out is written down before the first cell trains, once, and never changed."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from test_lock import FORK, in_processes, pytestmark
from tiny_study import tiny_study

from nearsight import files
from nearsight.errors import InputError
from nearsight.report.writing import write_results
from nearsight.study import (
    Simulation,
    SimulationResults,
    StudyFolder,
    StudyListener,
    StudyResults,
    run_simulation,
    run_study,
)
from nearsight.study.executors import Work
from nearsight.study.location import DamagedError, StudyPublisher, scratch_folder
from nearsight.study.plan import AFTERWARDS, NOT_KNOWN, PLANNED, Entry, Plan, hash_of, joined, mark_of, write_plan
from nearsight.train import RunName, Stop

__all__ = ["pytestmark"]  # processes are forked


def claim(id: str = "nearer", rule: str = "*Sign.*", text: str = "Is it nearer?") -> dict[str, Any]:
    return {"id": id, "text": text, "paper": "–", "rule": rule, "readings": None}


CLAIMS = [claim(), claim("order", "*Every seed.*") | {"readings": ["all", "most"]}]
MORE = [*CLAIMS, claim("farther")]


def write(folder: Path, claims: list[dict[str, Any]] = CLAIMS, *, finished: int = 0, **options: Any) -> Plan:
    return write_plan(folder, claims, conditions=["a", "b"], seeds=[0, 1], finished=lambda: finished, **options)


def entry(claims: list[dict[str, Any]], *, minute: int = 0, finished: int | None = 0) -> Entry:
    time = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)).isoformat()
    about = {"time": time, "finished": finished, "conditions": [], "seeds": []}
    return {**about, "hash": hash_of(claims), "claims": claims}


# What is written


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    written = write(tmp_path)
    assert Plan.read(tmp_path) == written
    stored = json.loads((tmp_path / "plan.json").read_text())
    (only,) = stored["plans"]
    assert before - timedelta(seconds=1) <= datetime.fromisoformat(only["time"]) <= datetime.now(UTC)
    assert (only["finished"], only["conditions"], only["seeds"], only["claims"]) == (0, ["a", "b"], [0, 1], CLAIMS)
    canonical = json.dumps(CLAIMS, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert only["hash"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_same_claims_change_no_byte(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    write_plan(tmp_path, CLAIMS, conditions=["a"], seeds=range(9), finished=lambda: 7)
    assert (tmp_path / "plan.json").read_bytes() == before


def test_other_claims_are_added_and_leave_the_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path)
    first = json.loads((tmp_path / "plan.json").read_text())["plans"]
    plan = write(tmp_path, MORE, finished=3)
    assert json.loads((tmp_path / "plan.json").read_text())["plans"][:1] == first
    assert [each["finished"] for each in plan.entries] == [0, 3]
    write(tmp_path, CLAIMS, finished=5)  # which are there
    assert Plan.read(tmp_path) == plan


def test_marks(tmp_path: Path) -> None:
    assert mark_of(None, "nearer", "*Sign.*") == NOT_KNOWN
    write(tmp_path)
    write(tmp_path, [*MORE, claim("order", "*Another.*")][1:], finished=3)
    plan = Plan.read(tmp_path)
    assert plan is not None
    assert plan.mark("nearer", "*Sign.*") == PLANNED
    assert plan.mark("order", "*Every seed.*") == PLANNED
    assert plan.mark("order", "*Another.*") == AFTERWARDS  # the rule was changed when runs were finished
    assert plan.mark("farther", "*Sign.*") == AFTERWARDS
    assert plan.mark("nobody asked", "*Sign.*") == AFTERWARDS
    # More claims while nothing is finished are planned as well.
    write(tmp_path / "early")
    assert write(tmp_path / "early", MORE).is_planned("farther", "*Sign.*")


def test_what_was_planned_before_a_late_plan_is_not_known(tmp_path: Path) -> None:
    write(tmp_path, finished=4)
    plan = write(tmp_path, MORE, finished=4)
    assert [plan.mark(each["id"], each["rule"]) for each in MORE] == [NOT_KNOWN, NOT_KNOWN, AFTERWARDS]
    unclear = Plan((entry([]), entry(CLAIMS, minute=1, finished=None)))
    assert unclear.mark("nearer", "*Sign.*") == NOT_KNOWN


@given(order=st.permutations(range(6)), split=st.integers(0, 6))
def test_entries_join_to_the_same_whatever_the_order(order: list[int], split: int) -> None:
    kinds = [CLAIMS, MORE, []]
    entries = [entry(kinds[number % 3], minute=number) for number in range(6)]
    shuffled = [entries[place] for place in order]
    assert joined(*shuffled) == entries[:3]
    assert joined(*joined(*shuffled[:split]), *shuffled[split:]) == entries[:3]


# Damage


DAMAGE: Mapping[str, Any] = {
    "not JSON": "{",
    "a list": [],
    "it does not hold plans": {"schema": 1},
    "it does not hold plans ": {"schema": 1, "plans": []},
    "entry 0 is no object": {"schema": 1, "plans": ["x"]},
    "entry 0 does not say its time": {"schema": 1, "plans": [{**entry(CLAIMS), "time": 3}]},
    "entry 0 was written at 'noon', which is no time": {"schema": 1, "plans": [{**entry(CLAIMS), "time": "noon"}]},
    "entry 0 was written at '2026-01-01', which": {"schema": 1, "plans": [{**entry(CLAIMS), "time": "2026-01-01"}]},
    "entry 1 does not say how many": {"schema": 1, "plans": [entry(CLAIMS), {**entry(MORE), "finished": "0"}]},
    "entry 0 has a claim without its id": {"schema": 1, "plans": [{**entry([]), "claims": [{"id": "a"}]}]},
    "entry 0 has a claim without its ": {"schema": 1, "plans": [{**entry([]), "claims": [claim() | {"readings": 1}]}]},
    "entry 0 has other claims than those of its hash": {"schema": 1, "plans": [{**entry(CLAIMS), "claims": MORE}]},
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_plan_is_named(words: str, tmp_path: Path) -> None:
    content = DAMAGE[words]
    (tmp_path / "plan.json").write_text(content if isinstance(content, str) else json.dumps(content))
    expected = words.strip() if words.startswith(("entry", "it ")) else ""
    with pytest.raises(InputError, match=rf"plan\.json is damaged: .*{expected}.*; put back a whole one, or remove it"):
        Plan.read(tmp_path)
    with pytest.raises(InputError, match=r"plan\.json is damaged"):
        write(tmp_path)


def test_a_plan_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": 2, "plans": 3}')
    with pytest.raises(InputError, match="has schema 2, but this nearsight reads up to 1; update nearsight"):
        Plan.read(tmp_path)


def test_results_with_a_damaged_plan_are_refused(tables: Path) -> None:
    (tables / "plan.json").write_text("{")
    with pytest.raises(InputError, match=r"plan\.json is damaged"):
        StudyResults.read(tables)


# Several runners, and kills


def plan_something(barrier: Barrier, folder: Path) -> None:
    """Each process has claims that others have, too, in a random order."""
    sets = [[claim(f"of {number}")] for number in range(4)]
    random.Random(os.getpid()).shuffle(sets)
    barrier.wait()
    for claims in sets:
        write(folder, claims)
    barrier.wait()


def test_runners_that_begin_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    in_processes(plan_something, tmp_path)
    plan = Plan.read(tmp_path)
    assert plan is not None
    assert sorted(each["claims"][0]["id"] for each in plan.entries) == [f"of {number}" for number in range(4)]


def die_at(moment: str, folder: Path, claims: list[dict[str, Any]]) -> None:
    def disturb(here: files.Moment, path: Path) -> None:
        if here == moment and "plan.json" in path.name:
            os._exit(9)

    files.disturb = disturb
    write(folder, claims)


@pytest.mark.parametrize("moment", ["written", "flushed", "renamed"])
def test_a_kill_leaves_the_old_plan_or_the_new_one(moment: str, tmp_path: Path) -> None:
    assert FORK is not None
    old = write(tmp_path)
    process = FORK.Process(target=die_at, args=(moment, tmp_path, MORE))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    left = Plan.read(tmp_path)
    assert left is not None
    assert left.entries[: len(old.entries)] == old.entries
    assert len(left.entries) == (2 if moment == "renamed" else 1)
    again = write(tmp_path, MORE, finished=1)  # the lock of a process that has ended is no hindrance
    assert [each["finished"] for each in again.entries] == [0, 0 if moment == "renamed" else 1]


# Studies


class Watching:
    """An executor that looks at the plan when the first cell is to be trained, and trains nothing."""

    def __init__(self) -> None:
        self.seen: list[Plan | None] = []

    def check(self) -> None:
        """Nothing to check."""

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        self.seen.append(Plan.read(work.folder))
        return {}


def test_the_plan_is_there_before_the_first_cell_trains(tmp_path: Path) -> None:
    watching = Watching()
    run_study(tiny_study(), tmp_path, executor=watching, claims=CLAIMS)
    (plan,) = watching.seen
    assert plan is not None
    (only,) = plan.entries
    assert (only["finished"], only["claims"]) == (0, CLAIMS)
    assert only["conditions"] == [cell.condition for cell in tiny_study().cells if cell.seed == 0]
    assert only["seeds"] == [0, 1]


def test_without_claims_nothing_is_planned(tmp_path: Path) -> None:
    run_study(tiny_study(), tmp_path, executor=Watching())
    assert not (tmp_path / "plan.json").exists()
    # A study of which nothing is claimed has a plan that says so.
    run_study(tiny_study(), tmp_path, executor=Watching(), claims=[])
    plan = Plan.read(tmp_path)
    assert plan is not None
    assert plan.mark("nearer", "*Sign.*") == AFTERWARDS


def test_runs_that_are_finished_count(folder: Path) -> None:
    """Of a folder of an earlier version, and with more seeds and other claims later."""
    (folder / "runs" / tiny_study().cells[0].run / "provenance.json").unlink()
    run_study(tiny_study(), folder, executor=Watching(), claims=CLAIMS)
    before = (folder / "plan.json").read_bytes()
    run_study(tiny_study(seeds=3), folder, executor=Watching(), claims=CLAIMS)
    assert (folder / "plan.json").read_bytes() == before
    run_study(tiny_study(seeds=3), folder, executor=Watching(), claims=MORE)
    plan = StudyResults.read(folder).plan
    assert plan is not None
    assert [each["finished"] for each in plan.entries] == [7, 7]
    assert plan.mark("nearer", "*Sign.*") == NOT_KNOWN
    assert plan.mark("farther", "*Sign.*") == AFTERWARDS


def test_runs_that_are_reused_count_unless_their_plan_comes_with_them(finished: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(finished, theirs)
    run_study(tiny_study(), tmp_path / "a", executor=Watching(), claims=CLAIMS, reuse=[theirs])
    late = Plan.read(tmp_path / "a")
    assert late is not None
    assert [each["finished"] for each in late.entries] == [8]
    (theirs / "plan.json").write_text(json.dumps({"schema": 1, "plans": [entry(CLAIMS)]}))
    run_study(tiny_study(), tmp_path / "b", executor=Watching(), claims=MORE, reuse=[theirs])
    plan = Plan.read(tmp_path / "b")
    assert plan is not None
    assert plan.mark("nearer", "*Sign.*") == PLANNED
    assert plan.mark("farther", "*Sign.*") == AFTERWARDS


def test_a_damaged_plan_stops_a_study_before_it_trains(tmp_path: Path) -> None:
    watching = Watching()
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(InputError, match=r"plan\.json is damaged"):
        run_study(tiny_study(), tmp_path, executor=watching, claims=CLAIMS)
    assert watching.seen == []


def test_a_plan_is_kept_with_the_results(finished: Path, tmp_path: Path) -> None:
    study, kept = tmp_path / "study", tmp_path / "kept"
    shutil.copytree(finished, study)
    write(study)
    assert kept / "plan.json" in write_results(study, kept)
    assert (kept / "plan.json").read_bytes() == (study / "plan.json").read_bytes()
    assert StudyResults.read(kept).plan == Plan.read(study)


# Elsewhere


def test_runners_on_several_machines_share_their_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a folder of its own to work in, and all publish to one place."""
    location = StudyPublisher("memory://there/planned", first_wait=0.0)
    try:
        for name, claims in {"one": CLAIMS, "two": MORE, "three": CLAIMS}.items():
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
            folder = scratch_folder(location.url)
            run_study(tiny_study(), folder, executor=Watching(), location=location, claims=claims)
        assert [each["claims"] for each in joined(*location.fetch_plans())] == [CLAIMS, MORE]
        published = json.loads(MemoryFileSystem().cat_file("/there/planned/plan.json"))
        assert [each["claims"] for each in published["plans"]] == [CLAIMS, MORE]
        MemoryFileSystem().pipe_file(f"/there/planned/plans/{hash_of(CLAIMS)}.json", b'{"time": 3}')
        with pytest.raises(DamagedError, match="is damaged: this plan does not say its time"):
            location.fetch_plans()
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


def test_two_machines_that_begin_at_once_lose_nothing(tmp_path: Path) -> None:
    """Both find nothing there, and then both publish."""
    location = StudyPublisher(f"file://{tmp_path}/there", first_wait=0.0)
    one, two = write(tmp_path / "one"), write(tmp_path / "two", MORE)
    location.publish_plans(one.entries)
    location.publish_plans(two.entries)
    location.publish_plans(write(tmp_path / "three", finished=4).entries)  # the same claims, later: not replaced
    assert joined(*location.fetch_plans()) == [*one.entries, *two.entries]


# Simulations


@dataclass(frozen=True, kw_only=True)
class Size:
    size: int = 3


def test_the_plan_of_a_simulation_is_there_before_it_runs(tmp_path: Path) -> None:
    seen = []

    def simulate(config: Size, seeds: Any, *_: Any) -> dict[str, pd.DataFrame]:
        seen.append(Plan.read(tmp_path))
        return {"runs": pd.DataFrame({"seed": list(seeds), "total": config.size})}

    study = Simulation(
        name="sizes",
        conditions={"small": Size(), "large": Size(size=4)},
        simulate=simulate,
        shrink=lambda config: config,
        responses={"total": "total"},
        seeds=2,
    )
    run_simulation(study, tmp_path, claims=CLAIMS)
    assert seen[0] is not None
    assert [(each["finished"], each["claims"], each["conditions"]) for each in seen[0].entries] == [
        (0, CLAIMS, ["small", "large"])
    ]
    assert not (tmp_path / "locks").exists()
    run_simulation(study, tmp_path, claims=MORE)
    plan = SimulationResults.read(tmp_path).plan
    assert plan is not None
    assert [each["finished"] for each in plan.entries] == [0, 4]
    assert plan.mark("farther", "*Sign.*") == AFTERWARDS


def test_folders_know_their_cells(finished: Path) -> None:
    assert [cell["run"] for cell in StudyFolder(finished).cells()] == [cell.run for cell in tiny_study().cells]
