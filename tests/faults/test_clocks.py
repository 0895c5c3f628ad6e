"""Clocks that jump, or run ahead of another machine's, by libfaketime where it is installed: the tables are those of a
quiet run, every runner ends well, and no cell is finished twice."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import tiny_study as tiny
from study_records import table

from nearsight.study import StudyFolder, run_study

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed"),
]
SEEDS, EPOCHS = 1, 6


def runner(path: Path, clock: str) -> subprocess.Popen[str]:
    """Of the study, with a clock as faketime describes it: a shift, or a shift and a speed."""
    command = [sys.executable, tiny.__file__, str(path), str(SEEDS), str(EPOCHS)]
    environment = {**os.environ, "LD_PRELOAD": str(LIBRARIES[0]), "FAKETIME": clock, "FAKETIME_NO_CACHE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(tiny.unmeasured(seeds=SEEDS, epochs=EPOCHS), tmp_path_factory.mktemp("calm") / "study").path


@pytest.mark.parametrize(
    "clocks",
    [("-30d",), ("+3y",), ("+0 x5000",), ("+0", "+1d"), ("+0", "-1d"), ("+0 x2000", "+0", "-2h")],
    ids="; ".join,
)
def test_clocks_that_disagree(tmp_path: Path, calm: Path, clocks: tuple[str, ...]) -> None:
    path = tmp_path / "study"
    processes = [runner(path, clock) for clock in clocks]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    path.mkdir()
    finished: list[str] = []
    for process in processes:
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        finished += printed.split()
    cells = [cell.run for cell in tiny.unmeasured(seeds=SEEDS, epochs=EPOCHS).cells]
    assert sorted(finished) == sorted(cells), "a cell was finished twice, or not at all"
    study = StudyFolder(path)
    study.write_runs()
    assert all(study.is_done(run) for run in cells)
    pd.testing.assert_frame_equal(table(path), table(calm), check_exact=True)
