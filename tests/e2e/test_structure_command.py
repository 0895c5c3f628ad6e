"""`nearsight study` on simulations, as a person types it, at small scale."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from nearsight.cli import main
from nearsight.papers import SIMULATIONS, STUDIES
from nearsight.study.design import MOST_SEEDS

SMALL = ("--scale", "small", "--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors of small runs are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says when it refuses."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(scope="module")
def association(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study of association at small scale, once through; not to be changed."""
    path = tmp_path_factory.mktemp("association") / "study"
    assert main(["study", "run", "association", *SMALL, "--out", str(path)]) == 0
    return path


def test_from_recipe_to_verdict(association: Path) -> None:
    told = json.loads((association / "study.json").read_text())
    assert (told["name"], told["scale"], len(told["cells"])) == ("association", "small", 4)
    runs = pd.read_csv(association / "runs.csv")
    assert runs.groupby("condition", sort=False)["seed"].apply(list).to_dict() == {
        "fixed sample": [0, 1],
        "fresh samples": [0, 1],
    }
    curves = pd.read_csv(association / "curves.csv")
    last = curves.groupby(["condition", "seed"])["test_acc"].last()
    assert last.to_dict() == runs.set_index(["condition", "seed"])["test_acc"].to_dict()
    assert json.loads((association / "provenance.json").read_text())["runs"] == 4
    assert "Small scale" in (association / "verdict.md").read_text()
    for figure in ("attention", "phases"):
        assert {path.suffix for path in (association / "figures").glob(f"{figure}.*")} == {".png", ".svg"}
    assert not (association / "locks").exists()


def test_more_seeds_continue_and_json_tells_all(
    association: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(association, tmp_path / "study"))
    runs = pd.read_csv(path / "runs.csv", dtype={"run": str})
    runs[runs["seed"] == 0].to_csv(path / "runs.csv", index=False)
    capsys.readouterr()
    assert main(["study", "run", "association", *SMALL, "--out", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    told: dict[str, Any] = json.loads(captured.out)
    assert "association: 2 of 4 cells done" in captured.err
    assert "fixed sample: 1 seed in" in captured.err
    assert {cell["state"] for cell in told["cells"]} == {"done"}
    again = pd.read_csv(path / "runs.csv", dtype={"run": str})
    numbers = ["run", "condition", "seed", "test_acc", "associated", "gamma"]
    # A seed alone rounds otherwise than beside another.
    pd.testing.assert_frame_equal(again[numbers], runs[numbers], rtol=1e-4, atol=1e-5)
    means = again.groupby("condition")["test_acc"].mean()
    for row in told["conditions"]:
        assert row["test_acc"]["mean"] == pytest.approx(means[row["condition"]])


def test_show_says_what_there_is(association: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["study", "show", str(association)]) == 0
    shown = capsys.readouterr().out
    assert "association at small scale: 4 cells (4 done)" in shown
    assert "These numbers are no result" in shown
    assert "fresh samples" in shown
    assert "model.power = 5" in shown.partition("Assumed, since the paper does not report it: ")[2]
    path = Path(shutil.copytree(association, tmp_path / "study"))
    (path / "runs.csv").unlink()
    assert main(["study", "show", str(path)]) == 0
    assert "No cell is done yet" in capsys.readouterr().out


def test_show_leaves_out_what_diverged_and_says_so(
    association: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(association, tmp_path / "study"))
    runs = pd.read_csv(path / "runs.csv", dtype={"run": str})
    runs.loc[1, "test_acc"] = float("nan")
    runs.to_csv(path / "runs.csv", index=False)
    capsys.readouterr()
    assert main(["study", "show", str(path)]) == 0
    lines = {line.split("  ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  f")}
    assert lines["fixed sample"].endswith(f" {runs['test_acc'][0]:.3f}  test accuracy of 1 seed")
    assert "of" not in lines["fresh samples"]
    assert main(["study", "show", str(path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["conditions"][0]
    assert (first["n"], first["exact"]["n"], first["test_acc"]["n"]) == (2, 2, 1)


@pytest.mark.parametrize("name", ["runs", "curves"])
def test_a_table_that_was_cut_short_is_not_believed(
    name: str, association: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(association, tmp_path / "study"))
    table = path / f"{name}.csv"
    table.write_bytes(table.read_bytes()[:-60])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for command in (["study", "run", "association", *SMALL, "--out"], ["study", "show"], ["report"]):
        assert f"{table} is damaged: " in complaint([*command, str(path)], capsys)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_help_and_table_say_how_many_seeds_small_runs_have(
    association: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["study", "run", "--help"])
    told = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert f"At small scale, at most {MOST_SEEDS} are run." in told
    assert main(["study", "show", str(association)]) == 0
    assert f"at most {MOST_SEEDS} seeds. These numbers are no result." in capsys.readouterr().out


def test_show_finds_committed_results_by_name(
    association: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "run it with `nearsight study run association`" in complaint(["study", "show", "association"], capsys)
    shutil.copytree(association, tmp_path / "results" / "spatial-structure" / "association")
    assert main(["study", "show", "association", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == "results/spatial-structure/association"


def test_list_shows_simulations_beside_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "list", "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)["studies"]}
    assert set(told) == {*STUDIES, *SIMULATIONS}
    assert told["association"]["cells"] == 20


@pytest.mark.parametrize("name", list(SIMULATIONS))
def test_every_recipe_says_its_command_its_cost_and_its_result(name: str) -> None:
    recipe = SIMULATIONS[name]
    text = " ".join((recipe.__doc__ or "").split())
    study = recipe()
    assert "(S3" in (recipe.__doc__ or "").splitlines()[0]
    assert f"Run nearsight study run {name}" in text
    assert f"Cost {len(study.cells)} cells" in text
    assert f"results/spatial-structure/{name}" in text
    assert study.name == name
    assert len(recipe(seeds=3).cells) * 10 == len(study.cells) * 3
    assert {cell.condition for cell in study.small().cells} == set(study.conditions)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "asociation"], "'asociation' is not a known study; did you mean 'association'?"),
        (["run", "association", "--seeds", "0"], "seeds is 0, but must be at least 1"),
        (["run", "association", "--out", "file", "--scale", "small"], "file is a file, but a folder"),
        (["run", "association", "--out", "results/x", "--scale", "small"], "a study at small scale has none"),
        (["run", "association", "--out", "s3://a/b"], "written to a folder; s3://a/b is not one"),
        *(
            (["run", "association", *option], f"for one device; leave out {option[0]}")
            for option in (
                *(["--engine", "ray"], ["--reuse", "runs/x"], ["--workers", "2"]),
                *(["--cells-per-stack", "3"], ["--checkpoint-every", "5"], ["--address", "local"]),
            )
        ),
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
    (tmp_path / "file").write_text("precious")
    assert words in complaint(["study", *arguments], capsys)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "condition", "least", "most"),
    [("association", "fixed sample", 9, 10), ("association-control", "independent", 0, 0)],
)
def test_structure_is_found_where_it_is(name: str, condition: str, least: int, most: int) -> None:
    """The condition at full scale: all patches associated in nine seeds of ten, and in none of the control."""
    study = SIMULATIONS[name]()
    found = study.simulate(study.conditions[condition], study.seed_list, torch.device("cpu"), lambda share: None)
    assert least <= int(found["runs"]["exact"].sum()) <= most
