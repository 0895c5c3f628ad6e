"""Clocks that jump, or are ahead of another machine's, by libfaketime where it is installed: the tables are those of a
quiet run, every runner ends well, and no cell is finished twice."""

import os
import subprocess
import sys
import time
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


def runner(path: Path, clock: Path) -> subprocess.Popen[str]:
    """Of the study, with a clock that is off by what stands in a file."""
    command = [sys.executable, tiny.__file__, str(path), str(SEEDS), str(EPOCHS)]
    faked = {"LD_PRELOAD": str(LIBRARIES[0]), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    environment = {**os.environ, **faked}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(tiny.unmeasured(seeds=SEEDS, epochs=EPOCHS), tmp_path_factory.mktemp("calm") / "study").path


@pytest.mark.parametrize(
    "clocks",
    [("-30d",), ("+3y",), ("+0", "+1d"), ("+0", "-1d", "+2h"), ("+0 → +1d",), ("+0 → -1d",), ("+0 → +1d", "+0 → -2h")],
    ids="; ".join,
)
def test_clocks_that_disagree(tmp_path: Path, calm: Path, clocks: tuple[str, ...]) -> None:
    """Those with an arrow jump when the first run has an epoch."""
    path, files = tmp_path / "study", [tmp_path / f"clock{number}" for number in range(len(clocks))]
    for file, clock in zip(files, clocks, strict=True):
        file.write_text(clock.split(" → ")[0])
    processes = [runner(path, file) for file in files]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    path.mkdir()
    deadline = time.monotonic() + 60
    while not list(path.glob("runs/*/history.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for file, clock in zip(files, clocks, strict=True):
        file.write_text(clock.split(" → ")[-1])
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
