"""Tables that are damaged: said by name, before anything is written; what they would give might look like a run."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from study_records import text_of
from tiny_study import tiny_study

from nearsight.errors import InputError
from nearsight.study import is_simulation, run_study
from nearsight.study.results import COURSE
from nearsight.study.reusing import reusable_runs
from nearsight.train.integrity import PROVENANCE

RESULTS = Path(__file__).parents[2] / "results"
TINY = [cell.run for cell in tiny_study().cells]


def cut(name: str) -> Callable[[Path], None]:
    """Without its last line."""

    def damage(tables: Path) -> None:
        lines = text_of(tables / name).splitlines(keepends=True)
        rest = b"".join(lines[:-1])
        (tables / name).write_bytes(gzip.compress(rest) if name == COURSE else rest)

    return damage


def change(name: str, column: str, value: object) -> Callable[[Path], None]:
    def damage(tables: Path) -> None:
        frame = pd.read_csv(tables / name, dtype=str)
        frame.loc[frame.index[-1], column] = str(value)
        frame.to_csv(tables / name, index=False)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda tables: (tables / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def damage(tables: Path) -> None:
        (tables / name).write_text(text)

    return damage


def twice(tables: Path) -> None:
    lines = (tables / "runs.csv").read_text().splitlines(keepends=True)
    (tables / "runs.csv").write_text("".join([*lines, lines[-1]]))


def another_config(tables: Path) -> None:
    told = json.loads((tables / "study.json").read_text())
    told["cells"][0]["config"]["protocol"]["lr"] *= 2
    (tables / "study.json").write_text(json.dumps(told))


def unknown_setting(tables: Path) -> None:
    told = json.loads((tables / "study.json").read_text())
    told["cells"][0]["config"]["protocol"]["of_tomorrow"] = 1
    (tables / "study.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (another_config, r"study\.json is damaged: the config of run \w+ is that of run"),
        (unknown_setting, r"study\.json: the config of run \w+ cannot be read: .*of_tomorrow"),
        (twice, r"runs\.csv is damaged: it has run \w+ twice"),
        (change("runs.csv", "best_val_acc", 0.123), r"history\.csv is damaged: .* best epoch that runs\.csv states"),
        (change("runs.csv", "epochs", 7), r"history\.csv is damaged: .* the 7 epochs"),
        (change("runs.csv", "min_mad", "inf"), r"runs\.csv is damaged: its column min_mad holds an infinite number"),
        (change("runs.csv", "seed", "inf"), r"runs\.csv is damaged: its column seed holds .* not a whole number"),
        (
            change("runs.csv", "best_epoch", 1.5),
            r"runs\.csv is damaged: its column best_epoch .* not a whole number",
        ),
        (change("heads.csv", "head", 10**12), r"heads\.csv is damaged: its column head holds .* not from 0 to 4095"),
        (cut("history.csv"), r"history\.csv is damaged: .* epochs that runs\.csv states"),
        (change("history.csv", "val_acc", "many"), r"history\.csv is damaged"),
        (change("history.csv", "epoch", 5), r"history\.csv is damaged"),
        (cut("layers.csv"), r"heads\.csv is damaged: .* layers\.csv"),
        (change("heads.csv", "layer", 3), r"heads\.csv is damaged: .* layers\.csv"),
        (change("heads.csv", "mad", 0.123), rf"{COURSE} is damaged: .* best epoch that heads\.csv has"),
        (remove(COURSE), rf"{COURSE} is damaged or missing"),
        (remove("heads.csv"), r"heads\.csv is missing"),
        (remove(PROVENANCE), r"does not say how it was made: provenance\.json is missing"),
        (write(PROVENANCE, "{"), r"provenance\.json is damaged"),
    ],
)
def test_damaged_tables_are_refused_before_anything_is_written(
    damage: Callable[[Path], None], said: str, tables: Path, tmp_path: Path
) -> None:
    damage(tables)
    with pytest.raises(InputError, match=said):
        run_study(tiny_study(), tmp_path / "out", reuse=[tables])
    assert not (tmp_path / "out").exists()


def test_a_course_that_was_cut_short_is_refused(tables: Path) -> None:
    """The epochs that are missing may be any but the model's."""
    course = pd.read_csv(tables / COURSE, dtype=str)
    run = TINY[0]
    best = pd.read_csv(tables / "runs.csv", dtype=str).set_index("run").loc[run, "best_epoch"]
    course[(course["run"] != run) | (course["epoch"] == best)].to_csv(tables / COURSE, index=False)
    with pytest.raises(InputError, match=rf"{COURSE} is damaged or missing: .* of run {run}; put back"):
        reusable_runs([run], [tables])


def test_other_folders_are_not_results(tmp_path: Path) -> None:
    simulation = next(path.parent for path in RESULTS.rglob("study.json") if is_simulation(path.parent))
    with pytest.raises(InputError, match="is of a simulation"):
        reusable_runs(TINY, [simulation])
    (tmp_path / "runs.csv").write_text("run\n")
    with pytest.raises(InputError, match="no runs to reuse"):
        reusable_runs(TINY, [tmp_path])
