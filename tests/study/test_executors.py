"""Other engines than this process: the same tables, whatever happens to the workers."""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_records import Recorder, events, table
from tiny_study import tiny_study

from nearsight.cli import main
from nearsight.study import OFF, Cell, Study, StudyFolder, run_study
from nearsight.study import worker as preparing
from nearsight.study.driver import StudyDriver, divide
from nearsight.study.executors import ProcessesExecutor, Retries, Work
from nearsight.study.lock import Locks
from nearsight.study.worker import CellsDone
from nearsight.train import DataConfig, HistoryRow, RunConfig, RunFolder, Stop, TrainingError
from nearsight.work.pool import Attempt, Ended, Event, Heard, Lost, Outcome

QUICKLY = Retries(first_wait=0.05, longest_wait=0.1)


class KillingOnce(Recorder):
    """Kills the worker that is at the first cell of which an epoch is heard."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.killed = path, 0

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        holder = StudyFolder(self.path).locks().holder(config.identity)
        if not self.killed and holder is not None and holder.owner is not None:
            self.killed = holder.owner.pid
            os.kill(self.killed, signal.SIGKILL)


def test_a_worker_process_gives_the_tables_of_this_one_though_it_is_killed(folder: Path, finished: Path) -> None:
    runs = [cell.run for cell in tiny_study().cells if cell.seed == 1]
    for run in runs:
        shutil.rmtree(folder / "runs" / run)
    listener = KillingOnce(folder)
    run_study(tiny_study(), folder, listener=listener, executor=ProcessesExecutor(workers=1, retries=QUICKLY))
    assert listener.lost == [(f"worker process {listener.killed} was killed by SIGKILL", QUICKLY.first_wait)]
    assert sorted(listener.done) == sorted(runs)
    pd.testing.assert_frame_equal(table(folder), table(finished), check_exact=True)
    for run in runs:
        for name in ("model.safetensors", "heads.csv", "result.json"):
            assert (folder / "runs" / run / name).read_bytes() == (finished / "runs" / run / name).read_bytes()
    told = events(folder)
    assert all(told[run, "finished"] == 1 for run in runs)
    assert list((folder / "locks").iterdir()) == []


class Poisoned:
    """Workers that do an attempt at once, by copying; but one cell ends every worker that takes it."""

    num_wanted = num_free = 2

    def __init__(self, finished: Path, folder: Path, poison: str) -> None:
        self.finished, self.folder, self.poison = finished, folder, poison
        self.given: list[Attempt[Cell]] = []
        self.waiting: list[Attempt[Cell]] = []

    def give(self, attempt: Attempt[Cell]) -> None:
        self.given.append(attempt)
        self.waiting.append(attempt)

    def listen(self, seconds: float) -> list[Event[CellsDone]]:
        told: list[Event[CellsDone]] = []
        for attempt in self.waiting:
            if self.poison in [cell.run for cell in attempt.items]:
                told.append(Lost(attempt.token, "of poison"))
                continue
            for cell in attempt.items:
                target = self.folder / "runs" / cell.run
                shutil.copytree(self.finished / "runs" / cell.run, target)
                told.append(Heard(attempt.token, ("finished", (cell.config, RunFolder(target)))))
            told.append(Ended(attempt.token, Outcome(result=CellsDone(failed={}, num_taken=len(attempt.items)))))
        self.waiting = []
        time.sleep(0.001)
        return told

    def stop(self, by: str) -> None:
        raise AssertionError


def test_a_cell_that_costs_every_worker_is_named_and_the_others_are_done(finished: Path, tmp_path: Path) -> None:
    study, listener = tiny_study(), Recorder()
    StudyFolder(tmp_path).claim(study)
    poison = study.cells[2]
    workers = Poisoned(finished, tmp_path, poison.run)
    work = Work(folder=tmp_path, cells=study.cells, cells_per_stack=4, data_dir=None, checkpoint_every=1)
    failed = StudyDriver(work, workers, Retries(most=3, first_wait=0.0), listener, Stop()).run()
    assert sorted(listener.done) == sorted(cell.run for cell in study.cells if cell is not poison)
    assert list(failed) == [poison.run]
    assert isinstance(failed[poison.run], TrainingError)
    assert str(failed[poison.run]) == (
        "4 workers were lost at +CutMix, seed 0, the last one because of poison; the same command tries again"
    )
    sizes = [len(each.items) for each in workers.given if poison in each.items]
    assert sizes == [4, 4, 2, 1]
    assert [len(each.lost_tokens) for each in workers.given if poison in each.items] == [0, 1, 2, 3]
    assert listener.lost == [("of poison", 0.0)] * 3 + [("of poison", None)]


@pytest.mark.parametrize(
    ("most", "least_parts", "sizes"),
    [
        (24, 1, [24]),
        (24, 3, [8, 8, 8]),
        (24, 4, [6] * 4),
        (24, 100, [1] * 24),
        (7, 1, [6] * 4),
        (10, 1, [8, 8, 8]),
    ],
)
def test_cells_are_divided_so_that_nobody_is_idle(most: int, least_parts: int, sizes: list[int]) -> None:
    cells = tiny_study(seeds=6).cells
    parts = divide(cells, most=most, least_parts=least_parts)
    assert [cell for part in parts for cell in part] == list(cells)
    assert [len(part) for part in parts] == sizes


def test_cells_that_stack_stay_together() -> None:
    """Two networks of three seeds each, seed by seed: two workers get a network each."""
    networks = {"one": OFF, "other": {"model.depth": 3}}
    study = Study(tiny_study().base, factors={"network": networks}, seeds=3, name="two networks")
    by_seed = sorted(study.cells, key=lambda cell: cell.seed)
    first, second = divide(by_seed, most=6, least_parts=2)
    assert len({cell.config.stack_key for cell in first}) == len({cell.config.stack_key for cell in second}) == 1
    assert [cell.seed for cell in first] == [cell.seed for cell in second] == [0, 1, 2]


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), workers=st.integers(1, 8), most=st.integers(1, 8))
def test_parts_are_of_one_kind_and_cut_only_where_they_must_be(sizes: list[int], workers: int, most: int) -> None:
    base = tiny_study().base
    networks = [
        dataclasses.replace(base, model=dataclasses.replace(base.model, depth=depth))
        for depth in range(1, len(sizes) + 1)
    ]
    cells = [
        Cell("any", {}, dataclasses.replace(config, seed=seed))
        for config, size in zip(networks, sizes, strict=True)
        for seed in range(size)
    ]
    parts = divide(sorted(cells, key=lambda cell: cell.seed), most=most, least_parts=workers)
    assert sorted(cell.run for part in parts for cell in part) == sorted(cell.run for cell in cells)
    allowed = min(most, math.ceil(len(cells) / workers))
    for config, size in zip(networks, sizes, strict=True):
        own = [part for part in parts if part[0].config.stack_key == config.stack_key]
        assert {cell.config.stack_key for part in own for cell in part} == {config.stack_key}
        assert len(own) == math.ceil(size / allowed)
        assert max(map(len, own)) - min(map(len, own)) <= 1


def test_a_lock_of_somebody_known_to_be_gone_holds_nothing(tmp_path: Path) -> None:
    """On another machine only its silence would show; the process that started the worker knows earlier."""
    assert Locks(tmp_path, token="lost").take("cell")
    content = json.loads((tmp_path / "cell.0").read_text())
    elsewhere = {**content, "owner": {**content["owner"], "host": "elsewhere"}}
    (tmp_path / "cell.0").write_text(json.dumps(elsewhere))
    assert not Locks(tmp_path).take("cell")
    assert not Locks(tmp_path, lost_tokens=("other",)).take("cell")
    assert Locks(tmp_path, lost_tokens=("other", "lost")).take("cell")


def test_a_data_set_is_prepared_by_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(preparing, "_SECONDS_BETWEEN_LOOKS", 0.01)
    at_it, most_at_once, prepared = 0, 0, []

    def load(config: DataConfig, data_dir: Path | None) -> None:
        nonlocal at_it, most_at_once
        at_it += 1
        most_at_once = max(most_at_once, at_it)
        time.sleep(0.05)
        prepared.append(config.name)
        at_it -= 1

    monkeypatch.setattr(preparing, "load_data", load)
    configs = [DataConfig(name="cifar10"), DataConfig(name="shapes"), DataConfig(name="cifar10")]
    threads = [threading.Thread(target=preparing.prepare_data, args=(configs, None, Stop())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most_at_once, prepared) == (1, ["cifar10"] * 4)
    assert list((tmp_path / "nearsight" / "decoded" / "locks").iterdir()) == []


def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    assert main(["study", "run", "ablation-cifar100", "--scale", "small", "--engine", "ray"]) == 2
    assert "install it with `pip install nearsight[ray]`" in capsys.readouterr().err
    assert main(["study", "run", "ablation-cifar100", "--scale", "small", "--workers", "2"]) == 2
    assert "--workers is for --engine processes, not for local" in capsys.readouterr().err
    assert main(["study", "run", "association", "--engine", "processes"]) == 2
    assert "leave out --engine" in capsys.readouterr().err
