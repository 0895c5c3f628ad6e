"""Simulations: only what is missing is run, all seeds of a condition at once, and nothing is ever half-written."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from nearsight.errors import InputError
from nearsight.study import (
    Simulation,
    SimulationFolder,
    SimulationListener,
    SimulationResults,
    is_simulation,
    run_simulation,
)
from nearsight.study.lock import Locks
from nearsight.train import Stop, StoppedError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 3
    label: str = "a"
    inner: Inner = field(default_factory=Inner)


class Counted:
    """A simulation of sums that remembers what it was asked for."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self.fail_at = fail_at

    def __call__(
        self, config: Config, seeds: Sequence[int], device: torch.device, heard: Callable[[float], None]
    ) -> dict[str, pd.DataFrame]:
        self.asked.append((config.size, list(seeds)))
        for step in range(1, 5):
            heard(step / 4)
        if config.size == self.fail_at:
            raise RuntimeError("no")
        steps = [(seed, step) for seed in seeds for step in range(2)]
        return {
            "runs": pd.DataFrame({"seed": list(seeds), "total": [seed / 3 + config.size for seed in seeds]}),
            "curves": pd.DataFrame(
                {"seed": [s for s, _ in steps], "step": [t for _, t in steps], "x": [s * t / 7 for s, t in steps]}
            ),
        }


def sums(counted: Counted, *, seeds: int | Sequence[int] = 3, sizes: Sequence[int] = (3, 4)) -> Simulation:
    return Simulation(
        name="sums",
        conditions={f"size {size}": Config(size=size) for size in sizes},
        simulate=counted,
        shrink=lambda config: replace(config, inner=Inner(rate=0.1)),
        responses={"total": "the total"},
        seeds=seeds,
        assumed=("inner.rate",),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_all_seeds_of_a_condition_run_at_once_and_are_stored(tmp_path: Path) -> None:
    counted, path = Counted(), tmp_path / "study"
    run_simulation(sums(counted), path)
    assert counted.asked == [(3, [0, 1, 2]), (4, [0, 1, 2])]
    assert sorted(contents(path)) == ["curves.csv", "provenance.json", "runs.csv", "study.json"]
    runs = pd.read_csv(path / "runs.csv", dtype={"run": str})
    assert list(runs.columns) == ["run", "condition", "size", "seed", "total", "wall_seconds"]
    assert runs["condition"].tolist() == ["size 3"] * 3 + ["size 4"] * 3
    assert runs["size"].tolist() == [3] * 3 + [4] * 3
    assert runs["total"].tolist() == pytest.approx([3, 3 + 1 / 3, 3 + 2 / 3, 4, 4 + 1 / 3, 4 + 2 / 3], abs=1e-6)
    assert len(set(runs["run"])) == 6
    curves = pd.read_csv(path / "curves.csv")
    assert list(curves.columns) == ["condition", "seed", "step", "x"]
    assert len(curves) == 12
    told = json.loads((path / "study.json").read_text())
    assert (told["kind"], told["name"], told["scale"]) == ("simulation", "sums", "full")
    assert told["settings"] == {"label": "a", "inner.rate": 0.5}
    assert told["levels"] == {"size 3": {"size": 3}, "size 4": {"size": 4}}
    assert told["conditions"]["size 4"] == {"size": 4, "label": "a", "inner": {"rate": 0.5}}
    provenance = json.loads((path / "provenance.json").read_text())
    assert provenance["runs"] == 6
    assert {"commit", "versions", "hardware", "wall_seconds"} <= set(provenance)
    assert is_simulation(path)
    assert not is_simulation(tmp_path)


def test_again_runs_nothing_and_changes_no_byte(tmp_path: Path) -> None:
    run_simulation(sums(Counted()), tmp_path)
    before, counted = contents(tmp_path), Counted()
    run_simulation(sums(counted), tmp_path)
    assert counted.asked == []
    assert contents(tmp_path) == before


def test_more_seeds_are_added_beside_those_there(tmp_path: Path) -> None:
    run_simulation(sums(Counted(), seeds=[1, 4]), tmp_path)
    counted = Counted()
    run_simulation(sums(counted, seeds=[0, 1, 2]), tmp_path)
    assert counted.asked == [(3, [0, 2]), (4, [0, 2])]
    results = SimulationResults.read(tmp_path)
    assert results.runs["seed"].tolist() == [0, 1, 2, 4] * 2
    assert results.tables["curves"]["seed"].tolist() == [0, 0, 1, 1, 2, 2, 4, 4] * 2
    assert len(results.cells) == 8
    run_simulation(sums(Counted(), seeds=[0, 1, 2, 4]), tmp_path / "at once")
    at_once = SimulationResults.read(tmp_path / "at once")
    for name in ("runs", "curves"):
        pd.testing.assert_frame_equal(
            results.tables[name].drop(columns="wall_seconds", errors="ignore"),
            at_once.tables[name].drop(columns="wall_seconds", errors="ignore"),
        )


def test_what_is_done_stays_when_a_later_condition_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_simulation(sums(Counted(fail_at=4)), tmp_path)
    assert SimulationFolder(tmp_path).done() == {cell.run for cell in sums(Counted()).cells[:3]}
    assert not (tmp_path / "locks").exists()
    counted = Counted()
    run_simulation(sums(counted), tmp_path)
    assert counted.asked == [(4, [0, 1, 2])]


def test_curves_without_their_runs_are_done_again(tmp_path: Path) -> None:
    """A crash between the two files: runs.csv is written last, and says what is done."""
    run_simulation(sums(Counted()), tmp_path)
    whole = contents(tmp_path)
    runs = pd.read_csv(tmp_path / "runs.csv", dtype={"run": str})
    runs[runs["condition"] == "size 3"].to_csv(tmp_path / "runs.csv", index=False)
    counted = Counted()
    run_simulation(sums(counted), tmp_path)
    assert counted.asked == [(4, [0, 1, 2])]
    assert contents(tmp_path)["curves.csv"] == whole["curves.csv"]


def test_rows_of_seeds_that_are_not_done_are_none_of_the_results(tmp_path: Path) -> None:
    """A crash between the two files while seeds are added: those that are done are seen alone."""
    run_simulation(sums(Counted(), seeds=4), tmp_path)
    whole = contents(tmp_path)
    runs = pd.read_csv(tmp_path / "runs.csv", dtype={"run": str})
    runs[runs["seed"] != 3].to_csv(tmp_path / "runs.csv", index=False)
    assert set(SimulationResults.read(tmp_path).tables["curves"]["seed"]) == {0, 1, 2}
    counted = Counted()
    run_simulation(sums(counted, seeds=4), tmp_path)
    assert counted.asked == [(3, [3]), (4, [3])]
    assert contents(tmp_path)["curves.csv"] == whole["curves.csv"]
    (tmp_path / "runs.csv").unlink()
    results = SimulationResults.read(tmp_path)
    assert results.runs.empty
    assert results.tables["curves"].empty
    assert "step" in results.tables["curves"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"responses": {"totl": "the total"}},
            "has the response 'totl', .* no column 'totl' of 'runs', but seed, total",
        ),
        ({"simulate": lambda *_: {}}, "returns no table 'runs'"),
        (
            {"simulate": lambda _, seeds, *__: {"runs": pd.DataFrame({"seed": seeds, "total": "much"})}},
            "'total' of study 'sums' holds no numbers",
        ),
    ],
)
def test_what_a_function_does_not_return_is_said_before_anything_is_kept(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        run_simulation(replace(sums(Counted()), **changes), tmp_path)  # type: ignore[arg-type]
    assert sorted(contents(tmp_path)) == ["study.json"]


def test_a_requested_stop_ends_it_and_the_rest_continues(tmp_path: Path) -> None:
    stop = Stop()

    class Impatient(SimulationListener):
        def heard(self, condition: str, share: float) -> None:
            if condition == "size 4" and share == 0.5:
                assert stop.is_listening
                stop.request("SIGINT")

    with pytest.raises(StoppedError, match="stopped by SIGINT; whole conditions are kept") as told:
        run_simulation(sums(Counted()), tmp_path, listener=Impatient(), stop=stop)
    assert told.value.by == "SIGINT"
    counted = Counted()
    run_simulation(sums(counted), tmp_path)
    assert counted.asked == [(4, [0, 1, 2])]


def test_a_folder_is_one_study_and_one_runner_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "study"
    run_simulation(sums(Counted()), path)
    before = contents(path)
    with pytest.raises(InputError, match=r"other settings \(size 5.size: None there, 5 here\)"):
        run_simulation(sums(Counted(), sizes=(3, 4, 5)), path)
    with pytest.raises(InputError, match="another study \\(name: sums there, others here\\)"):
        run_simulation(replace(sums(Counted()), name="others"), path)
    with pytest.raises(InputError, match="another study \\(scale: full there, small here\\)"):
        run_simulation(sums(Counted()).small(), path)
    with pytest.raises(InputError, match="is for results"):
        run_simulation(sums(Counted()).small(), tmp_path / "results" / "sums")
    assert contents(path) == before
    other = Locks(path / "locks")
    assert other.take("simulation")
    with pytest.raises(InputError, match=r"is being written to by .*, process"):
        run_simulation(sums(Counted(), seeds=9), path)
    assert SimulationResults.read(path).runs["seed"].nunique() == 3


def test_identity_is_that_of_settings_and_seed() -> None:
    first, second = sums(Counted()), replace(sums(Counted()), name="renamed", conditions={"other": Config(size=4)})
    runs = {(cell.condition, cell.seed): cell.run for cell in first.cells}
    assert {cell.run for cell in second.cells} == {runs["size 4", seed] for seed in range(3)}
    assert {cell.run for cell in first.cells}.isdisjoint(cell.run for cell in first.small().cells)
    assert first.small().seed_list == (0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conditions": {}}, "has no conditions"),
        ({"conditions": {"a": Config(), "b": Config()}}, "have the same settings"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": [1, 1]}, "must be some different numbers"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(sums(Counted()), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "study"}', '{"kind": "simulation", "schema": 9}'])
def test_a_damaged_description_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(InputError, match=r"simulation|schema"):
        SimulationResults.read(tmp_path)


CUT = "is damaged: (its last row is cut short|it has a row that is not as long)"


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        *((name, lambda text, cut=cut: text[:-cut], CUT) for name in ("runs", "curves") for cut in (2, 3, 9, 25)),
        ("runs", lambda text: text + "x\n", "not as long as the first"),
        ("runs", lambda text: text.replace(",2,", ",2.5,"), "a seed that is not a whole number"),
        ("runs", lambda text: text.replace(",2,", ",7,"), "size 3, seed 7, which is not a cell of the study"),
        ("curves", lambda text: text.replace("size 4", "size 5"), "size 5, seed 0, which is not a cell of the study"),
        ("runs", lambda text: text + text.splitlines()[-1] + "\n", "two rows of one cell"),
        ("runs", lambda text: text.replace("size 4,4", "size 3,4"), "two rows of one cell"),
        (
            "runs",
            lambda text: re.sub("size ([34])", lambda found: f"size {7 - int(found[1])}", text),
            "run .* which is",
        ),
        ("runs", lambda text: text.replace("3.333333", "3.3x3333"), "total holds '3.3x3333' among numbers"),
        ("runs", lambda text: text.replace("total", "totals"), "no column total"),
        ("curves", lambda text: "".join(text.splitlines(keepends=True)[:-1]), "it has 1 rows of size 4, seed 2, but 2"),
        ("curves", lambda text: "".join(text.splitlines(keepends=True)[:7]), "0 rows of size 4, seed 0, but some"),
        ("curves", lambda text: "", "damaged"),
    ],
)
def test_no_damaged_table_is_believed(
    file: str, damage: Callable[[str], str], words: str, tmp_path: Path, whole: Path
) -> None:
    shutil.copytree(whole, tmp_path / "study")
    path = tmp_path / "study" / f"{file}.csv"
    path.write_text(damage(path.read_text()))
    before = contents(tmp_path / "study")
    for read in (SimulationResults.read, lambda folder: run_simulation(sums(Counted()), folder)):
        with pytest.raises(InputError, match=words) as told:
            read(tmp_path / "study")
        assert str(path) in str(told.value)
    assert contents(tmp_path / "study") == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulation that is done; not to be changed."""
    return run_simulation(sums(Counted()), tmp_path_factory.mktemp("whole") / "study").path


@pytest.mark.parametrize("text", ["{", "[]", '{"commit": 3}', "["])
def test_a_damaged_certificate_is_named_before_anything_is_run(text: str, tmp_path: Path) -> None:
    run_simulation(sums(Counted()), tmp_path)
    (tmp_path / "provenance.json").write_text(text)
    counted = Counted()
    with pytest.raises(InputError, match=r"provenance\.json is damaged.*; remove it"):
        run_simulation(sums(counted, seeds=4), tmp_path)
    assert counted.asked == []


def test_a_condition_may_be_called_as_no_number(tmp_path: Path) -> None:
    """In folders of earlier versions; new ones are refused."""
    study = replace(sums(Counted()), conditions={"na": Config(), "none": Config(size=4)})
    run_simulation(study, tmp_path)
    for name in ("study.json", "runs.csv", "curves.csv"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace('"na"', '"NA"').replace("na,", "NA,"))
    assert SimulationResults.read(tmp_path).runs["condition"].tolist() == ["NA"] * 3 + ["none"] * 3


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("cells", [{"condition": "size 3", "seed": "0", "run": "a"}], "cell 0 does not say its seed"),
        ("cells", [{"condition": "size 9", "seed": 0, "run": "a"}], "'size 9', which is not a condition"),
        ("levels", {"size 3": {}}, "the levels of size 4"),
        ("responses", 3, "does not say its responses"),
    ],
)
def test_a_description_without_its_parts_is_named(what: str, value: object, words: str, tmp_path: Path) -> None:
    run_simulation(sums(Counted()), tmp_path)
    told = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps({**told, what: value}))
    with pytest.raises(InputError, match=rf"study\.json is damaged: .*{words}"):
        SimulationResults.read(tmp_path)
