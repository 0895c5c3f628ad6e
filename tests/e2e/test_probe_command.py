"""`nearsight probe`: knn and linear of a model, alone and side by side, and what is said when something is wrong."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearsight.cli import main
from nearsight.models import ModelConfig, save_model

SETTINGS = ["--data", "shapes", "--num-train", "120", "--num-test", "40", "--device", "cpu"]


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Two small models in a module of the current folder, one of them with a weight that differs."""
    lines = [
        "import torch, nearsight",
        "def build(seed):",
        "    torch.manual_seed(seed)",
        "    return nearsight.create_model('compact_vit', depth=1, embed_dim=24, num_heads=3)",
        "def one(): return build(0)",
        "def other(): return build(1)",
    ]
    (tmp_path / "probed_models.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return ["probed_models:one", "probed_models:other"]


def run(arguments, capsys):
    code = main(["probe", *arguments])
    return code, capsys.readouterr()


def test_knn_of_two_models(factory, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["knn", *factory, *SETTINGS, "--ks", "5", "100", "--out", str(out), "--cache-dir", str(tmp_path / "c")]
    code, printed = run([*command, "--json"], capsys)
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert [set(model["accuracy"]) for model in result["models"]] == [{"5", "100"}] * 2
    assert result["models"][0]["weights"] != result["models"][1]["weights"]
    assert (result["models"][0]["place"], result["models"][0]["tokens"]) == ("norm", "cls")
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [float(row["accuracy_k5"]) for row in rows] == [model["accuracy"]["5"] for model in result["models"]]
    assert {path.name for path in out.iterdir()} == {"result.json", "table.csv", "table.md", "provenance.json"}
    assert len(list((tmp_path / "c").iterdir())) == 4  # train and test of each
    _, again = run(command, capsys)  # from the cache, as text
    for row in rows:
        assert f"{100 * float(row['accuracy_k5']):.2f}" in again.out


def test_linear_with_and_without_random_crops(factory, tmp_path, capsys):
    for extra in ([], ["--random-crops"]):
        command = ["linear", factory[0], *SETTINGS, "--num-epochs", "2", "--head-batch-size", "50", *extra]
        code, printed = run([*command, "--out", "out", "--cache-dir", str(tmp_path / "c"), "--json"], capsys)
        assert code == 0, printed.err
        (model,) = json.loads(printed.out)["models"]
        assert len(model["heads"]) == 7
        assert 0 <= model["test_accuracy"] <= 1
        assert model["best"] in model["heads"]


def test_retrieval_on_a_small_voc(factory, tmp_path, capsys):
    voc = tmp_path / "data" / "voc-small"
    generator = np.random.default_rng(0)
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (voc / folder).mkdir(parents=True)
    for part in ("train", "val"):
        names = [f"{part}{number}" for number in range(3)]
        (voc / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            Image.fromarray(generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(
                voc / f"JPEGImages/{name}.jpg"
            )
            Image.fromarray(generator.integers(0, 3, (40, 48), dtype=np.uint8)).save(
                voc / f"SegmentationClass/{name}.png"
            )
    command = ["retrieve", factory[0], "--data-dir", str(tmp_path / "data"), "--memory-size", "60", "--out", "out"]
    code, printed = run([*command, "--device", "cpu", "--json"], capsys)
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert result["models"][0]["memory_patches"] == 60
    assert 0 <= result["models"][0]["mean_iou"] <= 1
    assert "aeroplane" not in result["models"][0]["unseen"]  # class 1
    assert "person" in result["models"][0]["unseen"]
    assert "person" in result["notes"][0]
    assert len(Path("out/per_class.csv").read_text().splitlines()) == 1 + 21
    code, printed = run([*command, "--k", "61"], capsys)
    assert (code, "60 patches in the memory, but 61" in printed.err) == (2, True)


def test_bad_input_is_one_line(factory, tmp_path, capsys):
    run_folder = tmp_path / "run"
    save_model(run_folder / "model.safetensors", {}, ModelConfig(), (32, 32), 10)
    cases = [
        (["nn", factory[0]], "'nn' is not a known probe"),
        (["knn", *SETTINGS], "no model is named"),
        (["knn", factory[0], *SETTINGS], "120 training images of shapes, but 200 neighbours"),
        (["knn", factory[0], *SETTINGS, "--ks", "5", "--block", "3"], "no block 3"),
        (["knn", factory[0], *SETTINGS, "--ks", "5", "--place", "prr"], "does not refine its patches"),
        (["knn", str(run_folder)], "not a complete run folder"),
        (["linear", factory[0], *SETTINGS, "--num-epochs", "0"], "num_epochs is 0"),
        (["linear", factory[0], *SETTINGS, "--crop-pct", "0"], "crop_pct is 0"),
    ]
    for arguments, message in cases:
        code, printed = run([*arguments, *(["--cache-dir", str(tmp_path / "c")] if len(arguments) > 3 else [])], capsys)
        assert (code, message in printed.err, printed.err.count("\n")) == (2, True, 1), printed.err
    assert not (tmp_path / "runs").exists()
    assert main(["probe", "--help"]) == 0
