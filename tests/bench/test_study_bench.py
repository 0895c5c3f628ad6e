"""The study benchmark: simulated runs pass for real ones, and the table says what was measured."""

import dataclasses
import json
from pathlib import Path

import pytest

from nearsight.bench import study as bench
from nearsight.bench.study import NUM_EPOCHS, STEPS, SimulatedTraining, StudyRow, bench_study, simulated_study, table
from nearsight.commands import bench as command
from nearsight.errors import InputError
from nearsight.study import StudyResults
from nearsight.study.run_tables import read_run
from nearsight.train import RunFolder


@pytest.mark.parametrize(("num_cells", "num_conditions"), [(3, 3), (8, 8), (10, 5), (16, 8), (1000, 8)])
def test_a_study_of_any_size_is_made_of_whole_seeds(num_cells: int, num_conditions: int) -> None:
    study = simulated_study(num_cells, "ablation-cifar100")
    assert len(study.cells) == num_cells
    assert len({cell.condition for cell in study.cells}) == num_conditions
    assert len(study.seed_list) == num_cells // num_conditions


def test_a_simulated_run_reads_as_a_finished_one_and_is_the_same_every_time(tmp_path: Path) -> None:
    config, training = simulated_study(8, "ablation-cifar100").cells[0].config, SimulatedTraining()
    folders = [RunFolder(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        training.write(config, folder)
    one, other = map(read_run, folders)
    assert folders[0].is_complete
    assert folders[0].read_config() == config
    assert len(one.history) == NUM_EPOCHS == one.row["epochs"]
    assert len(one.heads) == config.model.depth * config.model.num_heads
    assert one.row["min_mad"] == one.heads["mad"].min()
    assert one.history["val_acc"][one.row["best_epoch"] - 1] == one.history["val_acc"].max()
    assert one.row == other.row
    assert one.heads.equals(other.heads)


def test_every_step_is_measured_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []

    def write_report(results: StudyResults, folder: Path) -> None:  # figures take seconds, and have their own tests
        reported.append(len(results.runs))
        (folder / "verdict.md").write_text("so")

    monkeypatch.setattr("nearsight.bench.study.write_study_report", write_report)
    monkeypatch.setattr("nearsight.bench.study.write_folder_page", lambda folder: (folder / "page").write_text("so"))
    rows = bench_study(num_cells=(2,), folder=tmp_path)
    assert [row.step for row in rows] == list(STEPS)
    assert all(row.num_cells == 2 and row.seconds > 0 for row in rows)
    sizes = {row.step: row.disk_bytes for row in rows}
    assert 0 < sizes["plan"] < sizes["run"] < sizes["tables"] < sizes["report"] < sizes["page"]
    assert reported == [2]
    assert not list(tmp_path.iterdir())
    for wrong, message in (((0,), "num_cells is 0"), ((), "num_cells is empty")):
        with pytest.raises(InputError, match=message):
            bench_study(num_cells=wrong)
    with pytest.raises(InputError, match="is not a folder"):
        bench_study(num_cells=(2,), folder=tmp_path / "nowhere")


@pytest.fixture
def rows() -> list[StudyRow]:
    return [
        StudyRow(
            num_cells=size,
            num_conditions=8,
            step=step,
            seconds=1.25,
            cpu_seconds=0.5,
            extra_bytes=None if step == "page" else 2_000_000,
            disk_bytes=3_000_000,
        )
        for size in (100, 1000)
        for step in STEPS
    ]


def test_the_table_has_a_line_per_size_in_each_part(rows: list[StudyRow]) -> None:
    lines = table(rows).splitlines()
    assert sum(line.split()[:2] == ["1,000", "8"] for line in lines) == 4
    assert sum("1.25" in line for line in lines) == 2
    assert sum(line.endswith("-") for line in lines) == 2


def test_command(
    rows: list[StudyRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {}
    monkeypatch.setattr(bench, "bench_study", lambda **options: given.update(options) or rows)
    options = ["--num-cells", "100", "1000", "--study", "mixing-cifar100", "--folder", str(tmp_path)]
    assert command.main(["study", *options]) == 0
    assert given == {"num_cells": (100, 1000), "study": "mixing-cifar100", "folder": tmp_path}
    assert capsys.readouterr().out == table(rows) + "\n"
    assert command.main(["study", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bench": "study", "rows": [dataclasses.asdict(row) for row in rows]}
