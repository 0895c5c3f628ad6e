"""Whose a folder is, and where its code comes from.

The name of one's own images does not say which they are: a folder is that of one run on one set.
"""

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nearsight
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.study import Study, run_study
from nearsight.train import DataConfig, HistoryRow, Listener, RunConfig, Stop, StoppedError, baseline, train_run
from nearsight.train.dino import CropsConfig, DinoConfig, ImagesConfig, pretrain
from nearsight.train.integrity import COMMIT, provenance

MODEL = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8)
RUN = RunConfig(
    model=MODEL,
    data=DataConfig(name="image-folder", image_size=32),
    protocol=dataclasses.replace(baseline(), max_epochs=2, warmup_epochs=1, batch_size=4),
    num_measured=2,
)
OTHERS = "holds a run on other images than those in the data folder now: choose another --out"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pictures(folder: Path, *classes: str) -> Path:
    """As many for each class as for any other, so that nothing but the images tells two folders apart."""
    for seed, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = np.random.default_rng([len(folder.name), seed, number]).integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


class StopAfterOne(Listener):
    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.stop.request("the test")


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_run_is_not_taken_for_that_of_other_images(tmp_path: Path, is_complete: bool) -> None:
    pets, vehicles = pictures(tmp_path / "pets", "cat", "dog"), pictures(tmp_path / "vehicles", "bus", "car")
    stop, out = Stop(), tmp_path / "run"
    if is_complete:
        train_run(RUN, out, data_dir=pets)
    else:
        with pytest.raises(StoppedError):
            train_run(RUN, out, data_dir=pets, stop=stop, listener=StopAfterOne(stop))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InputError, match=OTHERS):
        train_run(RUN, out, data_dir=vehicles)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert train_run(RUN, out, data_dir=pets).read_result()["epochs"] == 2
    assert json.loads((out / "config.json").read_text())["identity"] == RUN.identity


def test_a_complete_run_needs_its_images_no_more(tmp_path: Path) -> None:
    pets, out = pictures(tmp_path / "pets", "cat", "dog"), tmp_path / "run"
    result = train_run(RUN, out, data_dir=pets).read_result()
    assert train_run(RUN, out, data_dir=tmp_path / "nowhere").read_result() == result


def test_a_study_is_not_done_on_two_sets_of_images(tmp_path: Path) -> None:
    """Nor does it take over runs on others: their configs are the same."""
    pets, vehicles = pictures(tmp_path / "pets", "cat", "dog"), pictures(tmp_path / "vehicles", "bus", "car")
    study = Study(RUN, factors={"smoothing": (0.0, 0.1)}, seeds=1, name="own")
    folder = run_study(study, tmp_path / "study", data_dir=pets)
    more = dataclasses.replace(study, seeds=2)
    for again in (study, more):
        with pytest.raises(InputError, match=OTHERS):
            run_study(again, folder.path, data_dir=vehicles)
    with pytest.raises(InputError, match=OTHERS):
        run_study(study, tmp_path / "another", data_dir=vehicles, reuse=[folder.path])
    assert not (tmp_path / "another").exists()
    run_study(study, folder.path, data_dir=tmp_path / "nowhere")  # which needs no images
    run_study(more, folder.path, data_dir=pets)
    assert len(list((folder.path / "runs").iterdir())) == 4


def test_pretraining_is_not_taken_for_that_of_other_images(tmp_path: Path) -> None:
    pets, vehicles = pictures(tmp_path / "pets", "cat", "dog"), pictures(tmp_path / "vehicles", "bus", "car")
    start = DinoConfig()
    config = dataclasses.replace(
        start,
        model=MODEL,
        data=ImagesConfig(name="image-folder", image_size=32),
        crops=CropsConfig(num_local=0),
        protocol=dataclasses.replace(start.protocol, epochs=1, warmup_epochs=0, batch_size=4),
    )
    pretrain(config, tmp_path / "run", data_dir=pets)
    pretrain(config, tmp_path / "run", data_dir=pets)
    with pytest.raises(InputError, match=OTHERS):
        pretrain(config, tmp_path / "run", data_dir=vehicles)


@pytest.mark.parametrize(("told", "expected"), [("0123abc", "0123abc"), ("", None)])
def test_without_a_checkout_the_environment_speaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, expected: str | None
) -> None:
    monkeypatch.setattr("nearsight.train.integrity.__file__", str(tmp_path / "provenance.py"))
    monkeypatch.setenv(COMMIT, told)
    assert provenance(torch.device("cpu"))["commit"] == expected


def test_a_checkout_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["git", "-C", str(Path(nearsight.__file__).parent), "rev-parse", "HEAD"]
    try:
        head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("not in a checkout")
    monkeypatch.setenv(COMMIT, "another")
    assert str(provenance(torch.device("cpu"))["commit"]).removesuffix("+changes") == head
