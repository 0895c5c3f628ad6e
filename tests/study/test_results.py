"""What is read from a study's folders, against the files read one by one; with and without the run folders."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from tiny_study import tiny_study, unmeasured

from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.study import StudyFolder, StudyResults, run_study
from nearsight.study.folder import elapsed_seconds
from nearsight.study.results import HEAD_COLUMNS, HISTORY_COLUMNS, run_columns
from nearsight.study.run_tables import read_row
from nearsight.train import RunFolder
from nearsight.train.integrity import changing

FRAMES = ("runs", "heads", "layers", "history", "course")


def test_runs_heads_and_history_are_those_of_the_run_folders(finished: Path) -> None:
    results = StudyResults.read(finished)
    assert tuple(results.runs.columns) == run_columns(("cutmix", "smoothing"))
    assert tuple(results.heads.columns) == HEAD_COLUMNS
    assert tuple(results.history.columns) == HISTORY_COLUMNS
    assert (results.name, results.scale) == ("tiny", "full")
    assert results.factors == {"cutmix": ("off", "p=0.5"), "smoothing": ("0", "0.1")}
    cells = {cell.run: cell for cell in tiny_study().cells}
    assert list(results.runs["run"]) == list(cells)
    for row in results.runs.to_dict("records"):
        folder, cell = finished / "runs" / row["run"], cells[row["run"]]
        assert (row["condition"], row["seed"]) == (cell.condition, cell.seed)
        assert {name: row[name] for name in ("cutmix", "smoothing")} == cell.levels
        result, made = (json.loads((folder / name).read_text()) for name in ("result.json", "provenance.json"))
        assert {name: row[name] for name in ("test_acc", "min_mad", "max_entropy", "epochs", "best_epoch")} == {
            name: result[name] for name in ("test_acc", "min_mad", "max_entropy", "epochs", "best_epoch")
        }
        assert row["best_val_acc"] == result["val_acc"]
        assert row["wall_seconds"] == made["wall_seconds"]
        with (folder / "history.csv").open() as file:
            history = list(csv.DictReader(file))
        mine = results.history[results.history["run"] == row["run"]]
        assert list(mine["val_acc"]) == [float(epoch["val_acc"]) for epoch in history]


def test_what_earlier_versions_did_not_measure_is_missing(finished: Path, tmp_path: Path) -> None:
    """In tables without such columns, and in runs whose results do not say it."""
    results = StudyResults.read(finished)
    assert results.runs["max_share_near"].between(0, 1).all()
    results.write_tables(tmp_path)
    shutil.copy(finished / "study.json", tmp_path)
    results.runs.drop(columns=["max_share_self", "max_share_near"]).to_csv(tmp_path / "runs.csv", index=False)
    earlier = StudyResults.read(tmp_path)
    assert tuple(earlier.runs.columns) == run_columns(("cutmix", "smoothing"))
    assert earlier.runs["max_share_near"].isna().all()
    assert list(earlier.runs["min_mad"]) == list(results.runs["min_mad"])
    written = (tmp_path / "runs.csv").read_bytes()
    earlier.write_tables(tmp_path)
    assert (tmp_path / "runs.csv").read_bytes() == written
    folder = RunFolder(shutil.copytree(finished / "runs" / results.runs["run"][0], tmp_path / "run"))
    told = {name: value for name, value in folder.read_result().items() if not name.startswith("max_share")}
    with changing(folder.path / "result.json"):
        write_json(folder.path / "result.json", told)
    assert math.isnan(read_row(folder)["max_share_self"])


def test_final_heads_are_told_from_those_during_training(finished: Path) -> None:
    results = StudyResults.read(finished)
    assert set(results.heads["num_images"]) == {20}  # during training, 10 were measured
    for row in results.runs.to_dict("records"):
        heads = results.heads[results.heads["run"] == row["run"]]
        assert len(heads) == 2
        assert heads["mad"].min() == row["min_mad"]
        assert heads["entropy"].max() == row["max_entropy"]
        every = pd.read_csv(finished / "runs" / row["run"] / "heads.csv")
        assert len(every) == 6  # of the initial weights and after each of two epochs
        course = results.course[results.course["run"] == row["run"]]
        assert list(course["mad"]) == list(every["mad"])
        layers = pd.read_csv(finished / "runs" / row["run"] / "layers.csv")
        mine = results.layers[results.layers["run"] == row["run"]]
        assert list(mine["locality_score"]) == list(layers["locality_score"])


def test_a_course_is_the_same_file_each_time_and_damage_is_named(finished: Path, tmp_path: Path) -> None:
    results = StudyResults.read(finished)
    first, second = (results.write_tables(tmp_path / name)[-1] for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    shutil.copy(finished / "study.json", tmp_path / "first")
    pd.testing.assert_frame_equal(StudyResults.read(tmp_path / "first").course, results.course, check_exact=True)
    whole = first.read_bytes()
    for damaged in (whole[:-20], whole[:40] + bytes(20) + whole[60:], b"no gzip"):
        first.write_bytes(damaged)
        with pytest.raises(InputError, match=re.escape(str(first))):
            StudyResults.read(tmp_path / "first")


def test_runs_that_were_measured_at_the_end_alone_have_no_course(tmp_path: Path) -> None:
    folder = run_study(unmeasured(seeds=1, epochs=1), tmp_path)
    assert folder.write_tables().course.empty
    assert not (tmp_path / "course.csv.gz").exists()
    shutil.rmtree(tmp_path / "runs")
    assert StudyResults.read(tmp_path).course.empty


def test_time_by_the_clock_counts_once(finished: Path) -> None:
    results = StudyResults.read(finished)
    assert results.images_trained == 8 * 2 * 96
    folders = [RunFolder(finished / "runs" / run) for run in results.runs["run"]]
    elapsed = elapsed_seconds(folders)
    one_stack = pd.read_csv(folders[0].path / "history.csv")["seconds"].sum()
    assert one_stack - 0.01 < elapsed < sum(elapsed_seconds([folder]) for folder in folders)  # stacks: side by side
    assert elapsed_seconds(folders + folders) == elapsed


def test_time_by_the_clock_of_known_events(tmp_path: Path) -> None:
    def run(name: str, *events: tuple[str, str]) -> RunFolder:
        (tmp_path / name).mkdir()
        lines = [json.dumps({"time": f"2026-01-01T{clock}+00:00", "event": event}) for clock, event in events]
        (tmp_path / name / "events.jsonl").write_text("".join(line + "\n" for line in lines))
        return RunFolder(tmp_path / name)

    # 10 s, killed, then 20 s; another beside it, the last 5 s alone; one in another zone within the first.
    paused = run(
        "a",
        *(("10:00:00", "started"), ("10:00:10", "epoch"), ("11:00:00", "started"), ("11:00:20", "finished")),
    )
    beside = run("b", ("11:00:05.500", "started"), ("11:00:25", "epoch"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "events.jsonl").write_text(
        '{"time": "2026-01-01T12:00:01+0200", "event": "started"}\n'
        '{"time": "2026-01-01T12:00:02+0200", "event": "epoch"}\n'
    )
    none = RunFolder(tmp_path / "d")
    assert elapsed_seconds([beside, RunFolder(tmp_path / "c"), paused, none]) == pytest.approx(35)
    assert elapsed_seconds([none]) == 0
    with (tmp_path / "b" / "events.jsonl").open("a") as log:
        log.write('{"time": "2026-01-01T11:00')  # cut short: killed while it was written
    assert elapsed_seconds([beside]) == pytest.approx(19.5)


def test_tables_without_run_folders_say_the_same(folder: Path, tmp_path: Path) -> None:
    StudyFolder(folder).write_tables()
    before = StudyResults.read(folder)
    shutil.rmtree(folder / "runs")
    after = StudyResults.read(folder)
    for name in FRAMES:
        pd.testing.assert_frame_equal(getattr(before, name), getattr(after, name), check_exact=True)
    assert (before.factors, before.settings, before.assumed) == (after.factors, after.settings, after.assumed)
    assert {state.state for state in StudyFolder(folder).states()} == {"done"}
    assert (after.planned, after.seeds, after.design) == (before.planned, (0, 1), "full factorial")
    with pytest.raises(InputError, match="holds the tables of this study, whose runs are elsewhere"):
        run_study(tiny_study(), folder)
    made = json.loads((folder / "provenance.json").read_text())
    assert made["runs"] == 8
    assert made["images_per_second"] == pytest.approx(made["images"] / made["elapsed_seconds"])
    assert len(made["versions"]) == len(made["hardware"]) == 1


NUMBERLIKE = [f"{number:016}" for number in range(5)] + [
    "1234567812345678",
    "000000000000001e5"[1:],
    "00000000000000e0",
]
"""Names of runs that a reader of tables may take for numbers."""


def test_text_that_looks_like_a_number_or_like_nothing_stays_text(folder: Path, tmp_path: Path) -> None:
    results = StudyResults.read(folder)
    names = dict(zip(results.runs["run"], NUMBERLIKE, strict=True))
    changed = StudyResults(
        **{
            **vars(results),
            **{name: getattr(results, name).replace({"run": names}) for name in FRAMES},
            "heads": results.heads.replace({"run": names}).assign(layer_name=""),
        }
    )
    changed.write_tables(tmp_path / "out")
    shutil.copy(folder / "study.json", tmp_path / "out")
    again = StudyResults.read(tmp_path / "out")
    for name in FRAMES:
        pd.testing.assert_frame_equal(getattr(changed, name), getattr(again, name), check_exact=True)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("study.json", None, "is not the folder of a study: it has no study.json"),
        ("study.json", "", "study.json is damaged"),
        ("study.json", "[]", "does not describe a study"),
        ("study.json", '{"schema": 99}', "has schema 99, but this nearsight reads up to 1; update nearsight"),
        ("study.json", '{"schema": 1, "name": "x"}', "does not say its assumed, cells, design, factors"),
        (
            "study.json",
            json.dumps(
                {"schema": 1, "name": "", "scale": "", "design": "", "factors": {}, "settings": {}, "assumed": []}
                | {"cells": [{"run": ""}]}
            ),
            "cell 0 does not say its condition, config, levels, seed",
        ),
        ("runs.csv", None, "runs.csv is missing"),
        ("heads.csv", "a,b\n1,2\n", "heads.csv is damaged"),
        ("history.csv", "", "history.csv is damaged"),
        (
            "history.csv",
            "run,epoch,train_loss,val_loss,val_acc,lr,seconds\na,1,x,1,1,1,1\n",
            "could not convert",
        ),
    ],
)
def test_tables_that_cannot_be_read(folder: Path, name: str, change: str | None, words: str) -> None:
    StudyFolder(folder).write_tables()
    shutil.rmtree(folder / "runs")
    (folder / name).unlink()
    if change is not None:
        (folder / name).write_text(change)
    with pytest.raises(InputError) as error:
        StudyResults.read(folder)
    assert words in str(error.value)


def test_tables_that_lack_the_heads_of_a_run_are_not_believed(folder: Path) -> None:
    StudyFolder(folder).write_tables()
    whole = StudyResults.read(folder)
    shutil.rmtree(folder / "runs")
    kept = set(whole.runs["run"][:2])
    whole.heads[whole.heads["run"].isin(kept)].to_csv(folder / "heads.csv", index=False)
    lacking = whole.runs.iloc[2]
    with pytest.raises(InputError, match=r"heads\.csv is damaged: it has no heads of .* and 3 more; put back") as error:
        StudyResults.read(folder)
    assert f"{lacking['condition']}, seed {lacking['seed']} ({lacking['run']})" in str(error.value)
    # Networks without heads have none, and no most local one.
    without = whole.runs.assign(min_mad=whole.runs["min_mad"].where(whole.runs["run"].isin(kept)))
    without.to_csv(folder / "runs.csv", index=False)
    assert len(StudyResults.read(folder).runs) == 8


def test_a_study_without_a_complete_run_has_empty_tables(tmp_path: Path) -> None:
    StudyFolder(tmp_path).claim(tiny_study())
    results = StudyResults.read(tmp_path)
    assert results.runs.empty
    assert list(results.heads.columns) == list(HEAD_COLUMNS)
    assert {state.state for state in StudyFolder(tmp_path).states()} == {"missing"}
