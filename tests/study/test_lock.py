"""Locks between real processes: nothing is done twice, and what a dead process held is free at once."""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from nearsight import owner
from nearsight.study import lock
from nearsight.study.lock import SECONDS_UNTIL_STALE, Locks, Owner

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, which Windows cannot")
FORK = multiprocessing.get_context("fork") if sys.platform != "win32" else None
CELLS = [f"{number:016x}" for number in range(25)]
NUM_PROCESSES = 5


def in_processes(work: Callable[..., None], *arguments: Any, number: int = NUM_PROCESSES) -> None:
    """Run `work(barrier, …)` in several processes, and expect all of them to end well."""
    assert FORK is not None
    barrier = FORK.Barrier(number, timeout=30)  # if one of them fails, the others do too
    processes = [FORK.Process(target=work, args=(barrier, *arguments), daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * number


def mark(path: Path) -> None:
    """Fails if somebody else did it before."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def take_all(barrier: Barrier, locks_at: Path, marks: Path) -> None:
    locks = Locks(locks_at)
    barrier.wait()
    for cell in CELLS:
        if locks.take(cell):
            mark(marks / cell)
    barrier.wait()  # nobody ends, and so leaves its locks behind, before all are through


@pytest.mark.parametrize("left_behind", [False, True], ids=["new", "stale"])
def test_of_many_who_want_a_cell_one_gets_it(tmp_path: Path, left_behind: bool) -> None:
    """Also where all of them find it held by a process that has ended."""
    marks = tmp_path / "marks"
    marks.mkdir()
    if left_behind:
        in_processes(lambda _: [Locks(tmp_path / "locks").take(cell) for cell in CELLS], number=1)
        assert len(list((tmp_path / "locks").iterdir())) == len(CELLS)
    in_processes(take_all, tmp_path / "locks", marks)
    assert sorted(path.name for path in marks.iterdir()) == CELLS


@pytest.mark.parametrize("also_done", [False, True])
def test_somebody_is_faster_between_the_look_and_the_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, also_done: bool
) -> None:
    """The moment in which a slow one would throw away what a fast one has just made."""
    in_processes(lambda _: Locks(tmp_path).take("cell"), number=1)
    slow, fast = Locks(tmp_path), Locks(tmp_path)
    look = lock._read

    def looked(path: Path) -> lock.Holder | None:
        found = look(path)
        monkeypatch.setattr(lock, "_read", look)
        assert fast.take("cell")
        if also_done:
            fast.release("cell")
            assert fast.take("cell")
        return found

    monkeypatch.setattr(lock, "_read", looked)
    assert not slow.take("cell")
    fast.touch()
    assert not fast.lost


NUM_TURNS = 8


def take_and_let_go(barrier: Barrier, locks_at: Path, inside: Path) -> None:
    """Until it has had its turns."""
    locks, turns, deadline = Locks(locks_at), 0, time.monotonic() + 50
    barrier.wait()
    while turns < NUM_TURNS:
        assert time.monotonic() < deadline
        if locks.take("cell"):
            mark(inside)
            turns += 1
            inside.unlink()
            locks.release("cell")
        time.sleep(0.001)  # or the others would never have theirs
    barrier.wait()


def test_never_two_at_once(tmp_path: Path) -> None:
    in_processes(take_and_let_go, tmp_path / "locks", tmp_path / "inside")
    assert len(list((tmp_path / "locks").iterdir())) == NUM_PROCESSES * NUM_TURNS


def hold(locks_at: Path) -> None:
    assert Locks(locks_at).take("cell")
    time.sleep(600)


def test_a_killed_holder_is_gone_at_once(tmp_path: Path) -> None:
    assert FORK is not None
    process = FORK.Process(target=hold, args=(tmp_path,), daemon=True)
    process.start()
    locks = Locks(tmp_path)
    while (holder := locks.holder("cell")) is None or holder.owner is None:
        time.sleep(0.01)
    assert holder.owner.pid == process.pid
    assert not holder.is_stale
    assert not locks.take("cell")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not locks.take("cell"):  # a zombie until this process asks how it ended, which it does not
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.join()
    holder = locks.holder("cell")
    assert holder is not None
    assert holder.owner is not None
    assert holder.owner.pid == os.getpid()


def rewrite(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "owner": {**content["owner"], **changes}}))


def last_sign(path: Path, seconds_ago: float) -> None:
    os.utime(path, (time.time() - seconds_ago,) * 2)


def test_of_another_machine_only_silence_tells(tmp_path: Path) -> None:
    """Numbers of processes mean nothing there, nor in another container of this machine."""
    mine, other = Locks(tmp_path), Locks(tmp_path)
    for elsewhere in ({"host": "elsewhere"}, {"namespace": "pid:[1]"}):
        cell = next(iter(elsewhere))
        assert other.take(cell)
        path = tmp_path / f"{cell}.0"
        rewrite(path, **elsewhere, pid=2**22 + 1)
        assert not mine.take(cell)
        last_sign(path, SECONDS_UNTIL_STALE - 5)
        assert not mine.take(cell)
        last_sign(path, SECONDS_UNTIL_STALE + 5)
        assert mine.take(cell)


def test_a_process_with_the_same_number_is_another_one(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    assert locks.take("cell")
    started = Owner.here().started
    if started is None:
        pytest.skip("nobody tells when processes started here")
    rewrite(tmp_path / "cell.0", started=started - 1)
    assert Locks(tmp_path).take("cell")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"owner": 3}', '{"owner": {"host": "x"}}'])
def test_a_lock_that_does_not_say_whose_it_is(tmp_path: Path, content: str) -> None:
    """As one that is being written; if nobody goes on writing, it is stale after a while."""
    path = tmp_path / "cell.0"
    path.write_text(content)
    locks = Locks(tmp_path)
    assert not locks.take("cell")
    holder = locks.holder("cell")
    assert holder is not None
    assert holder.name == "somebody"
    last_sign(path, SECONDS_UNTIL_STALE + 5)
    assert locks.take("cell")


def test_released_and_cleared(tmp_path: Path) -> None:
    a, b = Locks(tmp_path), Locks(tmp_path)
    assert a.take("cell")
    assert not b.take("cell")
    a.release("cell")
    assert b.holder("cell") is None
    assert b.take("cell")
    assert not a.take("cell")
    a.release("cell")  # which it does not hold
    assert b.holder("cell") is not None
    b.clear("cell")
    assert list(tmp_path.iterdir()) == []
    assert a.take("cell")


def test_signs_of_life(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    with locks.kept_alive(seconds=0.01):
        assert locks.take("cell")
        path = tmp_path / "cell.0"
        last_sign(path, 1000)
        deadline = time.monotonic() + 10
        while time.time() - path.stat().st_mtime > 500:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not locks.lost
    assert Locks(tmp_path).holder("cell") is None


def test_one_who_was_silent_learns_that_it_was_taken_over(tmp_path: Path) -> None:
    """And what it does then does not touch what is not its own any more."""
    silent, other, third = Locks(tmp_path), Locks(tmp_path), Locks(tmp_path)
    assert silent.take("cell")
    last_sign(tmp_path / "cell.0", SECONDS_UNTIL_STALE + 5)
    assert other.take("cell")
    silent.touch()
    assert silent.lost == {"cell"}
    silent.release("cell")
    assert not third.take("cell")
    other.touch()
    assert not other.lost
    other.clear("cell")
    assert third.take("cell")  # makes the file that the silent one once had
    silent._held["cell"] = tmp_path / "cell.0"
    silent.touch()
    assert silent.lost == {"cell"}
    silent.release("cell")
    assert third.holder("cell") is not None
    assert silent.take("other")
    assert silent.lost == {"cell"}


def test_an_owner_is_gone_only_if_that_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Owner.here()
    assert not here.is_gone()
    assert dataclasses.replace(here, pid=2**22 + 1).is_gone()
    monkeypatch.setattr(owner, "_stat_of", lambda pid: [])  # where nobody tells
    assert not dataclasses.replace(here, started=None).is_gone()

    def forbidden(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert not dataclasses.replace(here, started=None).is_gone()
