"""`nearsight train dino-…` as a person types it, and what can be done with its folder."""

import json
from pathlib import Path

import pandas as pd
import pytest

from nearsight.cli import main

SMALL = [
    *("--model.depth", "2", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
    *("--data.num-train", "64", "--data.num-test", "20", "--protocol.batch-size", "16", "--protocol.epochs", "2"),
    *("--protocol.num-prototypes", "32", "--protocol.hidden", "16", "--device", "cpu"),
]


def test_a_recipe_trains_and_its_folder_can_be_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = ["train", "dino-shapes", *SMALL, "--model.gaug", "--model.prr", "--out", str(run)]
    assert main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["epochs"] == 2
    assert "epoch 2/2: loss" in shown.err
    history = pd.read_csv(run / "history.csv")
    assert list(history["epoch"]) == [1, 2]
    assert {"loss", "lr", "weight_decay", "momentum", "teacher_entropy", "centre_norm", "seconds"} <= set(history)
    assert main(arguments) == 0  # nothing is left to do
    assert "prototypes in use" in capsys.readouterr().out
    probe = ["probe", "knn", str(run), "--ks", "5", "--device", "cpu", "--out", str(tmp_path / "knn"), "--json"]
    assert main(probe) == 0
    probed = json.loads(capsys.readouterr().out)
    assert (probed["data"]["name"], probed["data"]["num_train"]) == ("shapes", 64)
    assert main(["measure", str(run), "--device", "cpu", "--out", str(tmp_path / "measured")]) == 0
    assert "num_prototypes" in (tmp_path / "measured" / "report.html").read_text()


def test_wrong_options_and_names_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dino-shape"]) == 2
    assert "did you mean 'dino-shapes'" in capsys.readouterr().err
    local = ["--crops.local-size", "20", "--out", str(tmp_path / "none")]
    assert main(["train", "dino-shapes", *SMALL, *local]) == 2
    assert "does not divide local crops of 20 pixels" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert main(["train", "--help"]) == 0
    assert "dino-tiny-imagenet" in capsys.readouterr().out
