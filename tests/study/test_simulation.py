"""Simulations: only what is missing is run, all seeds of a condition at once, and nothing is ever half-written."""

import json
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


def test_a_wish_to_stop_is_heeded_and_the_rest_continues(tmp_path: Path) -> None:
    stop = Stop()

    class Impatient(SimulationListener):
        def heard(self, condition: str, share: float) -> None:
            if condition == "size 4" and share == 0.5:
                assert stop.is_heeded
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
