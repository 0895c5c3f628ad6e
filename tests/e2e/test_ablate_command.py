"""`nearsight ablate`: a small classifier on embedded images; its files, its words, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from nearsight.cli import main
from nearsight.models import create_model

TABLES = ("ablation-heads", "ablation-reach", "ablation-removal")
SMALL = ("--num-images", "24", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("tiny.py").write_text(
        "from nearsight.models import create_model\n"
        "def ten(**settings):\n"
        "    return create_model('compact_vit', depth=2, embed_dim=24, num_heads=2, num_classes=10)\n"
    )
    return tmp_path


def run(*arguments: str, code: int = 0) -> None:
    assert main(["ablate", *arguments, *SMALL]) == code


def test_tables_figures_page_and_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    run("tiny:ten", "--data", "shapes", "--image-size", "32", "--reach", "0,1.5", "--out", "out", "--orders", "2")
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("Unchanged: ")
    assert lines[0].endswith("% (accuracy, 24 images).")
    assert any(line.startswith("Removed one at a time, ") for line in lines)
    assert any(line.startswith("With all layers limited to 3×3 patches (r = 1.5), ") for line in lines)
    assert any(line.startswith("Heads removed most local first: ") for line in lines)
    assert "variants of the model, 24 images" in said.err
    heads, reaches, removals = (pd.read_csv(f"out/{name}.csv") for name in TABLES)
    assert heads.columns.tolist() == [
        *("plan", "layer", "layer_name", "head", "accuracy", "loss", "loss_low", "loss_high", "mad", "entropy")
    ]
    assert heads["plan"].value_counts().to_dict() == {"zero": 4, "identity": 4, "uniform": 4}
    assert set(reaches["layer"]) == {"0", "1", "all"}
    assert removals.groupby("order").size().to_dict() == {
        **dict.fromkeys(("most local first", "least local first", "random 0", "random 1"), 4)
    }
    measured = pd.read_csv("out/heads.csv").set_index(["layer", "head"])["mad"]
    ours = heads[heads["plan"] == "zero"].set_index(["layer", "head"])["mad"]
    pd.testing.assert_series_equal(ours, measured, check_dtype=False)
    for name in TABLES:
        assert all(Path(f"out/figures/{name}.{end}").exists() for end in ("png", "svg"))
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert 'id="ablation"' in page
    assert "Heads removed most local first: " in page
    record = json.loads(Path("out/ablation.json").read_text(encoding="utf-8"))
    assert record["sentences"] == lines[: len(record["sentences"])]
    assert json.loads(Path("out/measured.json").read_text(encoding="utf-8"))["command"].startswith("nearsight ablate")

    run("tiny:ten", "--data", "shapes", "--image-size", "32", "--what", "heads", "--plans", "zero", "--out", "out")
    assert not Path("out/ablation-reach.csv").exists()  # of another call
    assert not Path("out/figures/ablation-removal.png").exists()
    assert not Path("out/parts").exists()


def test_half_precision_at_whatever_fits_into_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(run: Callable[[int], torch.Tensor], *_: object) -> int:
        assert [run(num).shape for num in (1, 2)] == [(1, 10), (2, 10)]
        assert run(2).dtype == torch.bfloat16
        return 64

    monkeypatch.setattr("nearsight.commands.ablating.find_batch_size", found)
    given = ("--data", "shapes", "--image-size", "32", "--what", "heads", "--plans", "identity", "--out", "out")
    run("tiny:ten", *given, "--precision", "bfloat16")
    assert capsys.readouterr().out.startswith("Unchanged: ")


def test_a_study_is_asked_run_by_run_and_no_run_twice(capsys: pytest.CaptureFixture[str]) -> None:
    study = ("interventions-cifar100", "--scale", "small", "--seeds", "1", "--device", "cpu", "--out", "study")
    assert main(["study", "run", *study]) == 0
    capsys.readouterr()
    call = ("study", "--plans", "zero", "--reach", "1.5", "--orders", "1", "--out", "out")
    run(*call, "--what", "heads,reach")
    said = capsys.readouterr()
    assert "Baseline, seed 0 (1 of 4): heads, reach" in said.err
    assert "4 runs, 1 seed per condition" in said.out
    heads, reaches = (pd.read_csv(f"out/{name}.csv") for name in TABLES[:2])
    assert len(heads["run"].unique()) == 4
    assert set(reaches["layer"]) == {*map(str, range(reaches["layer"].nunique() - 1)), "all"}
    assert (heads["accuracy"] + heads["loss"]).round(6).eq(heads["base"].round(6)).all()

    run(*call)
    said = capsys.readouterr()
    assert "seed 0 (1 of 4): removal" in said.err
    assert pd.read_csv("out/ablation-heads.csv").equals(heads)
    run(*call, "--json")
    said = capsys.readouterr()
    assert said.err == ""
    rows = json.loads(said.out)["runs"]
    assert {row["condition"] for row in rows} == {"Baseline", "+CutMix", "Modern", "Modern + LocAt"}
    assert all(isinstance(row["area"], float) for row in rows)
    plan = json.loads(Path("out/plan.json").read_text(encoding="utf-8"))["plans"]
    assert [entry["finished"] for entry in plan] == [0]
    assert {"reach-cutmix", "removal-Baseline"} <= {claim["id"] for claim in plan[0]["claims"]}
    verdict = Path("out/verdict.md").read_text(encoding="utf-8")
    assert "Do layers of +CutMix need less reach than those of Baseline? (our question) | planned" in verdict
    assert set(json.loads(Path("out/provenance.json").read_text(encoding="utf-8"))["weights_sha256"]) == {*heads["run"]}
    assert 'id="claims"' in Path("out/report.html").read_text(encoding="utf-8")
    assert main(["report", "out", "--out", "page"]) == 0
    run("study", "--data", "voc", "--out", "other", code=2)


def test_knn_averages_and_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        *("tiny:ten", "--data", "shapes", "--image-size", "32", "--score", "knn", "--json", "--what", "heads"),
        *("--plans", "mean,drop-sinks", "--num-reference", "8"),
    )
    found = json.loads(capsys.readouterr().out)
    assert {row["plan"] for row in found["rows"]} == {"mean", "drop-sinks"}
    assert "k-NN among these images, k = 20" in found["sentences"][0]
    assert "mean and offsets are averages over 8 training images of shapes" in found["notes"]
    assert "runs/ablate-tiny-ten/ablation-heads.csv" in found["files"]
    assert all(Path(path).exists() for path in found["files"])


def test_masks_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    for kind in ("images", "masks"):
        Path("own", kind).mkdir(parents=True)
    for number in range(5):
        mask = generator.integers(0, 2, (4, 4), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(mask * 200).save(f"own/images/{number}.png")
        Image.fromarray(mask).save(f"own/masks/{number}.png")
    call = ("tiny:ten", "--data", "own", "--image-size", "32", "--what", "heads", "--plans", "zero", "--steps", "3")
    run(*call, code=2)
    assert "own/classes.json is not there" in capsys.readouterr().err
    assert not Path("runs").exists()
    Path("own/classes.json").write_text('["floor", "thing"]')
    run(*call, "--json")
    found = json.loads(capsys.readouterr().out)
    assert "mIoU of a head on the patches of the last block, 1 images" in found["sentences"][0]
    assert "training images of own" in found["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny:ten"], "--data"),
        (["tiny:ten", "--data", "no-such-set"], "no-such-set"),
        (["compact_vit", "--data", "shapes"], "--score knn"),
        (["tiny:ten", "--data", "shapes", "--plans", "zeros"], "zero"),
        (["tiny:ten", "--data", "shapes", "--what", "head"], "heads"),
        (["tiny:ten", "--data", "shapes", "--reach", "near"], "--reach near"),
        (["tiny:ten", "--data", "shapes", "--batch-size", "0"], "--batch-size"),
        (["tiny:ten", "--data", "shapes", "--variants-at-once", "0"], "--variants-at-once"),
        (["compact_vit.modern_cifar100", "--plans", "mean"], "no training images"),
        (["no_such_model", "--data", "shapes"], "no_such_model"),
        ([], "MODEL"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments, code=2)
    complaint = capsys.readouterr().err
    assert said in complaint
    assert len([line for line in complaint.splitlines() if line.startswith("nearsight: ")]) == 1
    assert not Path("runs").exists()


def test_an_interrupted_call_continues(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call = ("tiny:ten", "--data", "shapes", "--image-size", "32", "--what", "heads", "--batch-size", "8")
    model = create_model("compact_vit", depth=2, embed_dim=24, num_heads=2, num_classes=10)
    forward, seen = type(model).forward, []

    def interrupted(self: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        if len(seen) == stop:
            raise KeyboardInterrupt
        out: torch.Tensor = forward(self, *inputs)
        return out

    monkeypatch.setattr(type(model), "forward", interrupted)
    stop = 0
    run(*call, "--out", "whole")
    needed, stop = len(seen), len(seen) - 1
    seen.clear()
    run(*call, "--out", "out", code=130)
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["parts"]
    seen.clear()
    stop = 0
    run(*call, "--out", "out")
    assert len(seen) < needed
    assert Path("out/ablation-heads.csv").read_bytes() == Path("whole/ablation-heads.csv").read_bytes()
    assert not Path("out/parts").exists()
