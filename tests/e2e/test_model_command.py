"""`nearsight model`: what it prints of models of all sources, side by side, and what it writes of LocAt's Gaussians."""

import json
from pathlib import Path

import pandas as pd
import pytest

from nearsight.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_models.py").write_text(
        "import nearsight, torch\n"
        "def small():\n"
        "    return nearsight.create_model('compact_vit', depth=2, embed_dim=24, num_heads=2)\n"
        "def locat():\n"
        "    return nearsight.add_locat(small())\n"
    )
    return tmp_path


def described(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["model", *arguments, "--device", "cpu", "--json"]) == 0
    models: list[dict[str, object]] = json.loads(capsys.readouterr().out)["models"]
    return models


def test_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["vit_tiny_patch16_224", "locat_vit_tiny_patch16_224"]
    assert main(["model", *names, "--device", "cpu"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    head, *rows = [[word.strip() for word in line if word.strip()] for line in lines]
    shown = {name: values for name, *values in rows}
    assert " ".join(head).split() == names
    assert shown["parameters"] == ["5,717,416", "5,719,756"]
    assert shown["of them LocAt's"] == ["–", "2,340, and PRR"]
    assert shown["multiply-adds"] == ["1.26 G", "1.27 G"]
    assert shown["layers × heads"] == ["12 × 3"] * 2
    assert shown["grid"] == ["14×14"] * 2
    assert shown["tokens"] == ["196 patches + 1"] * 2
    assert shown["weights"][0] == "22.9 MB"
    assert not list(Path().glob("runs*"))


def test_sources_windows_and_what_is_no_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["swin_tiny_patch4_window7_224", "torchvision:vit_b_16", "own_models:small", "resnet18"]
    swin, vision, own, convolutions = described(capsys, *names)
    assert [layer["heads"] for layer in swin["layers"]] == [3] * 2 + [6] * 2 + [12] * 6 + [24] * 2  # type: ignore[attr-defined]
    assert (swin["grid"], swin["patch_size"], swin["prefix_tokens"]) == ([56, 56], [4, 4], 0)
    assert swin["layers"][0]["window"] == 49  # type: ignore[index]
    assert round(int(vision["multiply_adds"]) / 1e9, 2) == 17.58  # type: ignore[call-overload]
    assert (own["patches"], own["locat_parameters"]) == (64, None)
    assert (convolutions["layers"], convolutions["grid"]) == ([], None)
    assert "no attention was seen" in convolutions["notes"][0]  # type: ignore[index]
    (zoo,) = described(capsys, "compact_vit.modern_cifar100")
    assert (zoo["parameters"], zoo["patches"]) == (2_417_956, 64)


def test_the_gaussians_of_locat_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["locat_compact_vit.modern_cifar100", "own_models:small", "--num-images", "3", "--out", "out"]
    described(capsys, *command)
    assert {path.name for path in Path("out").iterdir()} == {
        *("models.csv", "models.json", "locat_compact_vit.modern_cifar100")
    }
    table = pd.read_csv("out/models.csv")
    assert table["locat_parameters"].tolist()[0] == 600
    folder = Path("out/locat_compact_vit.modern_cifar100")
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["widths.png", "widths.svg"]
    widths = pd.read_csv(folder / "widths.csv")
    assert widths.groupby("what").size().to_dict() == dict.fromkeys(("alpha", "sigma_columns", "sigma_rows"), 8)
    held = json.loads(Path("out/models.json").read_text(encoding="utf-8"))
    assert held["command"].startswith("nearsight model locat_compact_vit.modern_cifar100")
    assert main(["model", "own_models:locat", "--num-images", "2", "--out", "one"]) == 0
    assert "one/figures/widths.png" in capsys.readouterr().out
    refused = ["model", "own_models:locat", "--num-images", "2", "--images", "no-such-set", "--out", "none"]
    assert main(refused) == 2
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no model is named"),
        (["vit_tny_patch16_224"], "did you mean 'vit_tiny_patch16_224'"),
        (["own_models:small", "--image-size", "30"], "fails on an image of 30×30 pixels"),
        (["vit_tiny_patch16_224", "--images", "shapes"], "say where with --out"),
        (["vit_tiny_patch16_224", "vit_tiny_patch16_224"], "is named twice"),
        (["vit_tiny_patch16_224", "--num-images", "0"], "--num-images is 0"),
        (["./nowhere"], "is not a folder"),
        (["vit_tiny_patch16_224", "--out", "own_models.py"], "is a file"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
