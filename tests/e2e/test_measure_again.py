"""`nearsight measure` into a folder that has been measured into before: nothing of the earlier call is left, and
nothing else is lost."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from nearsight import files as writing
from nearsight.cli import main
from nearsight.commands.measuring import ShardMeasuring
from nearsight.report import read_heads

OWN_MODELS = """
from nearsight.models import create_model

def two_layers():
    return create_model("compact_vit", depth=2, embed_dim=16, num_heads=2)

def three_layers():
    return create_model("compact_vit", depth=3, embed_dim=32, num_heads=4, patch_size=8)
"""
TWO, THREE = "own_models_of_again:two_layers", "own_models_of_again:three_layers"
TWO_FOLDER, THREE_FOLDER = "own_models_of_again-two_layers", "own_models_of_again-three_layers"
EVERYTHING = ("--what", "shares", "offsets", "features", "cka", "positions", "rollout")
ONE_MODEL = {"heads.csv", "heads.npz", "measured.json", "explorer.json", "report.html"}
NOT_OURS = {"notes.txt", "cka-mine.csv", "positions-mine.csv", "figures/mine.png", "figures/rollout-mine.svg"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With what a user may have put where is measured. The drawings, which take longer than all else, are made up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_of_again.py").write_text(OWN_MODELS)
    for name in NOT_OURS:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    monkeypatch.setattr("nearsight.commands.measured.write_figures", lambda *_, **__: ())
    monkeypatch.setattr("nearsight.commands.measured.write_page", lambda path, **_: path.write_text("page"))
    monkeypatch.setattr(
        "nearsight.commands.further.draw_measurement", lambda kind, *_, **__: Figure() if kind.picture else None
    )
    for name in ("position_maps", "rollout_overlays", "similarity_heatmap"):
        monkeypatch.setattr(f"nearsight.commands.further.{name}", lambda *_, **__: Figure())
    monkeypatch.setattr("nearsight.commands.further.figure_html", lambda *_, **__: "")
    monkeypatch.setattr("nearsight.commands.further.save_figure", made_up)
    yield tmp_path
    sys.modules.pop("own_models_of_again", None)


def made_up(_: None, folder: Path, name: str) -> list[Path]:
    files = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in files:
        path.write_text("figure")
    return files


def run(*arguments: str, out: str = "out") -> None:
    assert main(["measure", *arguments, "--num-images", "4", "--device", "cpu", "--out", out]) == 0


def found(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - NOT_OURS


def figures(*names: str) -> set[str]:
    return {f"figures/{name}.{kind}" for name in names for kind in ("png", "svg")}


def test_another_model_in_the_same_folder(folder: Path) -> None:
    out = folder / "out"
    run(TWO, *EVERYTHING)
    further = {"extra-heads.csv", "extra-layers.csv", "cka.csv", "positions.csv"}
    assert found(out) == {*ONE_MODEL, *further, *figures("cka", "features", "offsets", "positions", "rollout")}
    for name in figures("mad-profiles", "mad-entropy-plane", "heatmaps"):
        (out / name).write_text("of the first")
    run(THREE, "--what", "features")
    assert found(out) == {*ONE_MODEL, "extra-layers.csv", *figures("features")}
    assert len(pd.read_csv(out / "extra-layers.csv")) == 3
    assert all((out / name).read_text() == "mine" for name in NOT_OURS)


def test_several_models_and_one_in_turn(folder: Path) -> None:
    out = folder / "out"
    run(TWO, *EVERYTHING)
    run(TWO, THREE, *EVERYTHING)
    tables = {"heads.csv", "heads.npz", "measured.json", "extra-heads.csv", "extra-layers.csv"}
    of_each = {f"{name}/{table}" for name in (TWO_FOLDER, THREE_FOLDER) for table in tables}
    drawn = ("features", "offsets", "positions", "rollout")
    named = [f"{what}-{name}" for what in drawn for name in (TWO_FOLDER, THREE_FOLDER)]
    positions = {f"{name}.csv" for name in named if name.startswith("positions")}
    assert found(out) == {"report.html", "explorer.json", "cka.csv", *of_each, *positions, *figures("cka", *named)}
    run(TWO)
    assert found(out) == {*ONE_MODEL, *of_each}  # whose folders say themselves what they are
    run(TWO, THREE)
    assert found(out) == {"report.html", "explorer.json", *(path for path in of_each if "extra" not in path)}


def test_whatever_comes_between_leaves_no_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(moment: writing.Moment, path: Path) -> None:
        if (moment, path.name) == ("renamed", "heads.csv"):
            raise KeyboardInterrupt

    run(TWO, *EVERYTHING)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "disturb", stop)
        assert main(["measure", THREE, *EVERYTHING, "--num-images", "4", "--device", "cpu", "--out", "out"]) == 130
    assert found(folder / "out") == {"heads.csv"}
    assert len(read_heads(folder / "out" / "heads.csv")) == 12


def test_shards_stay_for_the_call_that_merges_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, sharded = folder / "out", (TWO, "--what", "shares", "--shards", "2")
    run(TWO, "--what", "features")
    before = found(out)
    run(*sharded, "--shard", "1")
    assert before < found(out)  # one job of many removes nothing
    run(*sharded)
    shards = {path for path in found(out) if path.startswith("shards/")}
    assert len(shards) == 4
    assert found(out) == {*ONE_MODEL, "extra-heads.csv", *shards}
    run(THREE)
    assert found(out) == {*ONE_MODEL, *shards}
    monkeypatch.setattr(ShardMeasuring, "_do", lambda *_: pytest.fail("all was done"))
    run(*sharded)
    assert found(out) == {*ONE_MODEL, "extra-heads.csv", *shards}


def test_a_run_keeps_what_is_its_own(folder: Path) -> None:
    tiny = [
        *("--model.depth", "1", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
        *(
            "--data.num-train",
            "50",
            "--data.num-test",
            "20",
            "--protocol.max-epochs",
            "1",
            "--protocol.batch-size",
            "40",
        ),
        *("--num-measured", "4"),
    ]
    assert main(["train", "compact-shapes", "--out", "a/run", "--device", "cpu", *tiny]) == 0
    home = folder / "a" / "run"
    trained, heads = found(home), (home / "heads.csv").read_bytes()
    assert main(["measure", "a/run", "--device", "cpu", *EVERYTHING]) == 0
    run(TWO, THREE, "--what", "shares", out="a/run")  # which has its own heads.csv, as no other comparison does
    assert {"heads.csv", "heads.npz"} <= found(home)
    assert main(["measure", "a/run", "--device", "cpu", "--what", "shares", "cka"]) == 0
    of_comparison = {path for path in found(home) if path.startswith("own_models")}
    at_home = {*trained, *of_comparison, "heads.npz", "report.html", "cka.csv", *figures("cka")}
    assert found(home) == {*at_home, "extra-heads.csv"}
    run("a/run", TWO, out="a")  # into the run's own folder, and one beside it
    assert found(home) == at_home
    assert (home / "heads.csv").read_bytes() == heads
    shutil.copytree(home, folder / "b" / "run")
    run("a/run", "b/run", "--what", "positions", out="c")  # of one name, with files for each
    assert {path for path in found(folder / "c") if path.endswith("csv")} == {
        *("positions-run-1.csv", "positions-run-2.csv", "run-1/heads.csv", "run-2/heads.csv")
    }


def test_the_first_layer_that_was_measured_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(THREE, "--layers", "1", "-1", "--what", "features", "shares")
    said = capsys.readouterr().out
    assert f"The most local head of “{THREE}” (from layer 1 on)" in said
    assert "Averaged over the heads of layer 1, the distance is" in said
    assert "after layer 1, " in said.splitlines()[-2]
    assert said.splitlines()[-2].endswith(" after layer 2.")
    for name in ("heads", "extra-heads", "extra-layers"):
        assert sorted(set(pd.read_csv(folder / "out" / f"{name}.csv")["layer"])) == [1, 2]
