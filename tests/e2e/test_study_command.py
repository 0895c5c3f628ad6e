"""`nearsight study` as a person types it, on the embedded data."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nearsight.cli import main
from nearsight.papers import SIMULATIONS, STUDIES, find_study_or_simulation
from nearsight.study import StudyFolder
from nearsight.study.lock import Locks

CONDITIONS = 8
SMALL = ("--scale", "small", "--device", "cpu")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says when it refuses."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nearsight: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ablation at small scale, once through; not to be changed."""
    path = tmp_path_factory.mktemp("ablation") / "study"
    assert main(["study", "run", "ablation-cifar100", *SMALL, "--seeds", "2", "--out", str(path)]) == 0
    return path


@pytest.fixture
def study(ablation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ablation, tmp_path / "study"))


def test_the_ablation_from_recipe_to_verdict(ablation: Path) -> None:
    stored = json.loads((ablation / "study.json").read_text())
    assert (stored["name"], stored["scale"], len(stored["cells"])) == ("ablation-cifar100", "small", 2 * CONDITIONS)
    runs = pd.read_csv(ablation / "runs.csv", dtype={"run": str})
    assert runs["condition"].value_counts().to_dict() == dict.fromkeys(runs["condition"], 2)
    assert len(set(runs["condition"])) == CONDITIONS
    heads = pd.read_csv(ablation / "heads.csv", dtype={"run": str})
    assert len(heads) == 2 * CONDITIONS * 64  # eight layers of eight heads, as in the paper
    assert heads.groupby("run")["mad"].min().to_dict() == runs.set_index("run")["min_mad"].to_dict()
    assert len(pd.read_csv(ablation / "history.csv")) == 2 * CONDITIONS * 2
    assert json.loads((ablation / "provenance.json").read_text())["runs"] == 2 * CONDITIONS
    assert list((ablation / "tables").glob("*.csv"))
    assert list((ablation / "tables").glob("*.md"))
    for number in range(1, 6):
        assert {path.suffix for path in (ablation / "figures").glob(f"figure-{number}-*")} == {".png", ".svg"}
    assert "small" in (ablation / "verdict.md").read_text()
    for table in (ablation / "tables").glob("*.md"):
        assert "small" in table.read_text(), f"{table.name} does not say its scale"
    (planned,) = json.loads((ablation / "plan.json").read_text())["plans"]
    assert (planned["finished"], planned["seeds"], len(planned["conditions"])) == (0, [0, 1], CONDITIONS)
    verdict = pd.read_csv(ablation / "tables" / "verdict.csv")
    assert [claim["text"] for claim in planned["claims"]] == verdict["claim"].tolist()
    assert set(verdict["asked"]) == {"planned"}


def test_runs_out_of_committed_tables_go_all_the_way_to_the_page(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table 2 under other settings shares half of its runs with the ablation."""
    shutil.rmtree(study / "runs")
    out = tmp_path / "fitted"
    options = ["--seeds", "1", "--out", str(out), "--reuse", str(study), "--json"]
    assert main(["study", "run", "ablation-fitted-cifar100", *SMALL, *options]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == []
    runs = pd.read_csv(out / "runs.csv", dtype=str).set_index("run")
    taken = {run for run in runs.index if not (out / "runs" / run / "model.safetensors").exists()}
    assert set(runs.loc[list(taken), "cutmix"]) == {"off"}
    assert len(taken) == CONDITIONS // 2
    theirs = pd.read_csv(study / "runs.csv", dtype=str).set_index("run")
    same = ["epochs", "test_acc", "min_mad", "wall_seconds"]
    pd.testing.assert_frame_equal(runs.loc[sorted(taken), same], theirs.loc[sorted(taken), same])
    assert json.loads((out / "provenance.json").read_text())["taken_from"] == {"ablation-cifar100": CONDITIONS // 2}
    assert (out / "verdict.md").exists()
    assert "Modern" in (out / "report.html").read_text()
    # Half of its runs were there before it was planned.
    (planned,) = json.loads((out / "plan.json").read_text())["plans"]
    assert planned["finished"] == CONDITIONS // 2
    assert set(pd.read_csv(out / "tables" / "verdict.csv")["asked"]) == {"not known"}
    assert "taken from the tables" in complaint(["measure", str(out / "runs" / min(taken))], capsys)


def test_again_trains_nothing(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(study)
    assert main(["study", "run", "ablation-cifar100", *SMALL, "--out", str(study), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["folder"], printed["left"], printed["scale"]) == (str(study), [], "small")
    assert contents(study) == before


def test_show_tells_means_states_and_what_is_assumed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = StudyFolder(study).states()
    running, missing = states[3], states[12]
    for each in (running, missing):
        shutil.rmtree(study / "runs" / each.run)
    assert Locks(study / "locks").take(running.run)
    capsys.readouterr()
    assert main(["study", "show", str(study)]) == 0
    shown = capsys.readouterr().out
    assert "ablation-cifar100 at small scale, full factorial: 16 cells (14 done, 1 running, 1 missing)" in shown
    assert "These numbers are no result" in shown
    assert f"running: {running.condition}, seed 0: 0 epochs on disk, " in shown
    assert re.search(rf"process {os.getpid()}, last sign \d+ s ago", shown)
    assumed = shown.partition("Assumed, since the paper does not report it: ")[2].splitlines()[0]
    assert {"model.init = trunc_normal", "protocol.lr = 0.001"} <= set(assumed.split(", "))

    assert main(["study", "show", str(study), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    runs = pd.read_csv(study / "runs.csv", dtype={"run": str}).set_index("run").drop(index=[running.run, missing.run])
    for row in told["conditions"]:
        accuracies = runs.loc[runs["condition"] == row["condition"], "test_acc"]
        assert row["n"] == len(accuracies)
        assert row["test_acc"]["mean"] == pytest.approx(accuracies.mean())
        if row["n"] == 1:
            assert row["test_acc"]["low"] is None
        else:  # Student's t of two values is 12.706 of their standard errors wide
            half = 12.7062047 * accuracies.std() / 2**0.5
            assert row["test_acc"]["high"] - row["test_acc"]["mean"] == pytest.approx(half)
    cells = {cell["run"]: cell for cell in told["cells"]}
    assert cells[running.run]["state"] == "running"
    assert str(os.getpid()) in cells[running.run]["owner"]
    assert cells[missing.run]["state"] == "missing"


def test_show_finds_a_study_by_name_and_its_committed_tables(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(["study", "show", "ablation-cifar100"], capsys)
    assert "run it with `nearsight study run ablation-cifar100`" in said
    committed = tmp_path / "results" / "ablation-cifar100"
    shutil.copytree(study, committed, ignore=shutil.ignore_patterns("runs", "locks"))
    assert main(["study", "show", "ablation-cifar100"]) == 0
    assert "16 cells (16 done)" in capsys.readouterr().out


def test_list_shows_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "list"]) == 0
    shown = capsys.readouterr().out
    assert main(["study", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["studies"]
    assert [row["name"] for row in told] == sorted([*STUDIES, *SIMULATIONS])
    for row in told:
        assert row["cells"] == len(find_study_or_simulation(row["name"])().cells)
        assert row["name"] in shown
        assert row["about"] in shown
        assert row["about"] in (find_study_or_simulation(row["name"]).__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "ablation-cifr100"], "'ablation-cifr100' is not a known study; did you mean 'ablation-cifar100'?"),
        (["show", "ablation-cifr100"], "did you mean 'ablation-cifar100'?"),
        (["show", "no/such/folder"], "no/such/folder is not a folder"),
        (["show", "."], "is not the folder of a study: it has no study.json"),
        (["rnu"], "'rnu' is not a known action; did you mean 'run'?"),
        (["run"], "NAME"),
        (["run", "protocol-cifar10", "--seeds", "0"], "seeds is 0, but must be at least 1"),
        (["run", "protocol-cifar10", "--scale", "tiny"], "invalid choice 'tiny'"),
        (["run", "protocol-cifar10", "--checkpoint-every", "0"], "checkpoint_every is 0"),
        (["run", "protocol-cifar10", "--out", "file", "--scale", "small"], "file is a file, but a folder"),
        (["run", "protocol-cifar10", "--out", "results/x", "--scale", "small"], "a study at small scale has none"),
        (["run", "protocol-cifar10", "--data-dir", "empty"], "cifar10 is not in"),
        (["run", "protocol-cifar10", "--device", "cuda:99"], "device 'cuda:99' is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_in_one_line_and_writes_nothing(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    assert words in complaint(["study", *arguments], capsys)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write anywhere
    said = complaint(["study", "run", "protocol-cifar10", *SMALL, "--out", str(tmp_path / "study")], capsys)
    assert "permission denied" in said
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_another_study(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(study)
    said = complaint(["study", "run", "protocol-cifar10", *SMALL, "--out", str(study)], capsys)
    assert "holds another study (name: ablation-cifar100 there, protocol-cifar10 here)" in said
    assert contents(study) == before


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_ends_a_study_well_and_the_same_command_continues(
    tmp_path: Path, ablation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study"
    command = ["study", "run", "protocol-cifar100", *SMALL, "--out", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "nearsight", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(process, lambda: any(path.glob("runs/*/history.csv")))
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert printed == ""
    assert errors.splitlines()[0] == "protocol-cifar100: 0 of 4 cells done"
    assert errors.splitlines()[-1].startswith("nearsight: stopped by SIGTERM")
    assert "Traceback" not in errors
    assert not (path / "tables").exists()
    assert {state.state for state in StudyFolder(path).states()} <= {"started", "missing", "done"}
    assert main(command) == 0
    assert "4 cells (4 done)" in capsys.readouterr().out
    # Two conditions of the ablation are the same runs, and nothing came between those.
    ours, theirs = (
        pd.read_csv(folder / "runs.csv", dtype={"run": str}).set_index("run") for folder in (path, ablation)
    )
    numbers = ["condition", "seed", "best_epoch", "best_val_acc", "test_acc", "min_mad", "max_entropy"]
    pd.testing.assert_frame_equal(ours[numbers], theirs.loc[ours.index, numbers], check_exact=True)
