"""A folder is that of one run, labelled or not: neither kind takes the other's for its own."""

import json
from pathlib import Path

import pytest

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, RunFolder, train_run
from nearsight.train.dino import CropsConfig, DinoConfig, DinoFolder, ImagesConfig, pretrain

MODEL = ModelConfig(patch_size=8, depth=1, width=16, num_heads=2, mlp_width=16)
PRETRAINED = DinoConfig(
    model=MODEL, data=ImagesConfig(num_train=64, num_test=64), crops=CropsConfig(num_local=0), seed=3
)
LABELLED = RunConfig(model=MODEL, data=DataConfig(num_train=64, num_test=64), seed=3)
"""All that the two have in common is the same."""


def pretrained(folder: Path, *, is_complete: bool) -> Path:
    DinoFolder(folder).claim(PRETRAINED)
    if is_complete:
        (folder / "result.json").write_text('{"loss": 1.0}')
        (folder / "provenance.json").write_text("{}")
    return folder


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_labelled_run_keeps_away_from_pretraining(tmp_path: Path, is_complete: bool) -> None:
    folder = pretrained(tmp_path / "run", is_complete=is_complete)
    assert RunFolder(folder).read_config() == LABELLED  # which is all that others look at
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InputError, match=f"holds another run .{PRETRAINED.identity}, not {LABELLED.identity}"):
        train_run(LABELLED, folder)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("is_complete", [False, True])
def test_pretraining_keeps_away_from_a_labelled_run(tmp_path: Path, is_complete: bool) -> None:
    RunFolder(tmp_path / "run").claim(LABELLED)
    if is_complete:
        (tmp_path / "run" / "provenance.json").write_text("{}")
    with pytest.raises(InputError, match=f"holds another run .{LABELLED.identity}, not {PRETRAINED.identity}"):
        pretrain(PRETRAINED, tmp_path / "run")


def test_the_command_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pretrained(tmp_path / "run", is_complete=True)
    assert main(["train", "compact-shapes", "--out", str(folder), "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert f"holds another run ({PRETRAINED.identity}, not" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("identity", ["0123456789abcdef", None])
def test_runs_of_other_versions_are_refused(tmp_path: Path, identity: str | None) -> None:
    """Its identity is not what these settings have here, so its numbers may not be either."""
    config = pretrained(tmp_path / "run", is_complete=True) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "identity": identity}))
    with pytest.raises(InputError, match="was begun by another version of nearsight"):
        pretrain(PRETRAINED, tmp_path / "run")
