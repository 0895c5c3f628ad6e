"""What grows with a study grows with its number of runs: files opened and rows read are counted, not seconds."""

import csv
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nearsight.bench.study import SimulatedExecutor, SimulatedTraining, simulated_study
from nearsight.errors import InputError
from nearsight.study import StudyFolder, StudyResults, driver, run_study, run_tables
from nearsight.study.run_tables import read_columns
from nearsight.study.statistics import permutation, separation

_counting: list[tuple[str, Counter[str]]] = []


def _count_opens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _counting:
        folder, counts = _counting[-1]
        counts["opened"] += str(arguments[0]).startswith(folder)


sys.addaudithook(_count_opens)  # stays for ever, and does nothing unless somebody counts


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Counts files opened below a folder, and rows that are parsed."""

    @contextmanager
    def counting(folder: Path) -> Iterator[Counter[str]]:
        counts: Counter[str] = Counter()

        def reader(*arguments: Any, **options: Any) -> Iterator[list[str]]:
            for row in csv.reader(*arguments, **options):
                counts["rows"] += 1
                yield row

        with monkeypatch.context() as patch:
            patch.setattr(run_tables, "csv", type("csv", (), {"reader": staticmethod(reader), "Error": csv.Error}))
            _counting.append((str(folder), counts))
            try:
                yield counts
            finally:
                _counting.pop()

    return counting


STEPS: dict[str, Callable[[int, Path], object]] = {
    "plan": lambda number, folder: StudyFolder(folder).claim(simulated_study(number, "ablation-cifar100")),
    "run": lambda number, folder: run_study(
        simulated_study(number, "ablation-cifar100"),
        folder,
        executor=SimulatedExecutor(training=SimulatedTraining(num_epochs=3)),
    ),
    "show": lambda _, folder: StudyFolder(folder).states(),
    "tables": lambda _, folder: StudyFolder(folder).write_tables(),
    "read what is kept": lambda _, folder: StudyResults.read(folder),
}


def test_cost_grows_with_the_number_of_cells(tmp_path: Path, counted: Callable[[Path], Any]) -> None:
    sizes = (8, 16, 32)
    found: dict[str, list[Counter[str]]] = {}
    for number in sizes:
        folder = tmp_path / str(number)
        for step, do in {**STEPS, "resume": STEPS["run"]}.items():
            with counted(folder) as counts:
                do(number, folder)
            found.setdefault(step, []).append(counts)
    for step, counts in found.items():
        for what in ("opened", "rows"):
            small, middle, large = (each[what] for each in counts)
            assert large - middle == 2 * (middle - small), f"{step}: {what} {small}, {middle}, {large}"
    # And none of it is read again and again: a run has 13 files that its reader opens, and 76 rows.
    per_run = {step: (counts[2]["opened"] - counts[1]["opened"]) / 16 for step, counts in found.items()}
    assert per_run["plan"] == 0
    assert max(per_run["resume"], per_run["tables"]) <= 26, per_run
    assert found["tables"][2]["rows"] == 32 * (64 + 8 + 3 + 3)  # heads, layers and epochs, each with a header


def test_many_runs_are_dealt_in_little_memory_as_normal_theory_says() -> None:
    num_runs = 4000
    random = np.random.default_rng(3)
    runs = pd.DataFrame(
        {
            "cutmix": np.tile(["off", "on"], num_runs // 2),
            "seed": np.arange(num_runs) // 2,
            "min_mad": random.random(num_runs),
        }
    )
    runs.loc[runs["cutmix"] == "on", "min_mad"] -= 0.012
    tracemalloc.start()
    try:
        found = [separation(runs, "cutmix", ["off", "on"], "min_mad", blocks=blocks) for blocks in ((), ("seed",))]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 150e6  # all keys at once would be 320 MB, and their order as much again
    on, off = (runs.loc[runs["cutmix"] == label, "min_mad"].to_numpy() for label in ("on", "off"))
    expected = stats.ttest_ind(on, off).pvalue, stats.ttest_rel(on, off).pvalue
    for each, p in zip(found, expected, strict=True):
        assert each.num_dealings == permutation.FEWEST_DRAWN + 1
        assert not each.exact
        assert each.p == pytest.approx(p, abs=6 * np.sqrt(p / permutation.FEWEST_DRAWN))


def test_dealings_serve_every_response_and_stay_those_of_their_blocks() -> None:
    first = permutation._dealings(((6, 2), (3, 0), (4, 4), (2, 1)), 500)
    bits = np.unpackbits(first, axis=1, count=15)
    shares = {2: slice(0, 6), 0: slice(6, 9), 4: slice(9, 13), 1: slice(13, 15)}
    for size, block in shares.items():
        assert (bits[:, block].sum(1) == size).all()
    # All of a block's subsets come up equally often: 15 pairs of 6.
    _, counts = np.unique(bits[:, :6], axis=0, return_counts=True)
    assert len(counts) == 15
    assert stats.chisquare(counts).pvalue > 1e-3
    keys = np.random.default_rng(0).random((500, 6))  # and they are those that sorting would choose
    order = keys.argsort(axis=1)[:, :2]
    assert (np.sort(order, axis=1) == np.stack([np.flatnonzero(row) for row in bits[:, :6]])).all()


def test_columns_are_those_that_pandas_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tables, "_ROWS_AT_ONCE", 7)
    random = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "whole": random.integers(-9, 9, 40),
            "real": random.random(40) * 10.0 ** random.integers(-30, 30, 40),
            "gaps": np.where(random.random(40) < 0.3, np.nan, random.random(40)),
            "mixed": [3.0] * 20 + [0.5] * 20,  # whole numbers at first, and then not
            "text": [["a,b", 'say "so"', "none", "007", "ü"][place] for place in random.integers(0, 5, 40)],
        }
    )
    path = tmp_path / "table.csv"
    path.write_text(frame.to_csv(index=False), encoding="utf-8")
    columns = read_columns(path, ("text", "whole", "real", "gaps", "mixed"), text=("text",))
    pd.testing.assert_frame_equal(pd.DataFrame(columns)[list(frame)], frame, check_exact=True)
    assert columns["whole"].dtype == np.int64
    path.write_text("whole,text\n", encoding="utf-8")
    empty = read_columns(path, ("whole", "text"), text=("text",))
    assert [len(values) for values in empty.values()] == [0, 0]
    assert empty["whole"].dtype == np.int64


DAMAGED = {
    "empty": b"",
    "no such column": b"a,c\n1,2\n",
    "short row": b"a,b\n1\n",
    "long row": b"a,b\n1,2,3\n",
    "no number": b"a,b\n1,x\n",
    "not UTF-8": b"a,b\n1,\xff\n",
    "open quote": b'a,b\n1,"2\n',
    "zero byte": b"a,b\n1,2\0\n",
    "too large": b"a,b\n1," + b"9" * 40 + b"\n",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_table_that_is_damaged_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"table\.csv is damaged"):
        read_columns(path, ("a", "b"))


def test_the_table_of_runs_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However often runs are done, and however long a large table takes."""
    now = [0.0]
    written: list[float] = []

    class Folder(StudyFolder):
        def write_runs(self) -> None:
            written.append(now[0])
            now[0] += 2.0

    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    table = driver.RunsTable(Folder(tmp_path))
    told = []
    for _ in range(400):
        told.append(table.refresh())
        now[0] += 0.5
    assert told[0]
    assert sum(told) == len(written)
    assert 2.0 * len(written) <= 0.06 * now[0]
    assert all(later - earlier < 43.0 for earlier, later in pairwise(written))
