"""Runs on streamed pictures: the same numbers after a kill in the middle of an epoch, in a stack, on two processes.

Run as a script, this file is the second of two processes, or one that is killed: python test_streamed_training.py ROOT
{second,killed}.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed
from PIL import Image

from nearsight.augment import CutMix, HorizontalFlip, ResizedCrop
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.tensorfile import load_tensors
from nearsight.train import DataConfig, Listener, RunConfig, RunFolder, baseline, train_run, train_runs

STEPS = 2


def config(**changes: object) -> RunConfig:
    """A batch that two processes do not divide evenly."""
    augment = (ResizedCrop(min_area=0.2), HorizontalFlip(), CutMix(p=0.7))
    protocol = dataclasses.replace(baseline(), max_epochs=3, warmup_epochs=1, batch_size=15, lr=2e-3, augment=augment)
    run = RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="image-folder", image_size=32, stream=True, crop_pct=0.8),
        protocol=protocol,
        num_measured=8,
    )
    return dataclasses.replace(run, **changes)


def configs() -> list[RunConfig]:
    """Cells that crop in different ways; one has no random crop."""
    other = config().protocol.with_(ResizedCrop(p=0.6, min_area=0.5))
    none = dataclasses.replace(config().protocol, augment=(HorizontalFlip(),))
    return [config(), config(seed=1, protocol=other), config(seed=2, protocol=none)]


def write_pictures(root: Path) -> None:
    generator = np.random.default_rng(0)
    for part, num in (("train", 40), ("val", 8)):
        for number in range(num):
            path = root / "data" / part / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(generator.integers(0, 256, (3, 3, 3), dtype=np.uint8))
            coarse.resize((40 + number, 60), Image.Resampling.BICUBIC).save(path, quality=90)


class KillAt(Listener):
    """Ends its process in the middle of an epoch, as nothing can be done about."""

    def __init__(self, step: int) -> None:
        self._left = step

    def step(self, step: int) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def together(root: Path, rank: int) -> None:
    """One of two processes that train the same run."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root / 'meeting'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        folders = [RunFolder(root / f"together{rank}" / str(k)) for k in range(2)]
        train_runs(configs()[:2], folders, data_dir=root / "data")
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and each run alone, that nothing came between."""
    root = tmp_path_factory.mktemp("streamed")
    write_pictures(root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for number, one in enumerate(configs()):
            train_run(one, root / f"alone{number}", data_dir=root / "data")
    return root


@pytest.fixture(autouse=True)
def cache_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))


def assert_same_run(one: Path, other: Path) -> None:
    """Equal to the bit."""
    ours, theirs = (pd.read_csv(path / "history.csv").drop(columns="seconds") for path in (one, other))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert RunFolder(one).read_result() == RunFolder(other).read_result()


def script(root: Path, part: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, __file__, str(root), part], stderr=subprocess.PIPE, text=True)


def test_killed_in_the_middle_of_an_epoch_it_ends_as_if_nothing_had_happened(root: Path) -> None:
    process = script(root, "killed")
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, complaint
    assert len(pd.read_csv(root / "killed" / "history.csv")) == 1
    train_run(config(), root / "killed", data_dir=root / "data")
    assert_same_run(root / "killed", root / "alone0")


def test_a_stack_is_its_cells(root: Path) -> None:
    folders = [RunFolder(root / f"stacked{number}") for number in range(3)]
    train_runs(configs(), folders, data_dir=root / "data")
    for number, folder in enumerate(folders):
        alone = root / f"alone{number}"
        ours, theirs = (pd.read_csv(path / "history.csv").drop(columns="seconds") for path in (folder.path, alone))
        pd.testing.assert_frame_equal(ours, theirs, rtol=0, atol=1e-5)


def test_two_processes_are_one(root: Path) -> None:
    second = script(root, "second")
    try:
        together(root, 0)
        _, complaint = second.communicate(timeout=60)
    finally:
        second.kill()
    assert second.returncode == 0, complaint
    for number in range(2):
        folder, alone = root / "together0" / str(number), root / f"alone{number}"
        assert RunFolder(folder).read_provenance()["processes"] == 2
        ours, theirs = (pd.read_csv(path / "history.csv").drop(columns="seconds") for path in (folder, alone))
        pd.testing.assert_frame_equal(ours, theirs, rtol=0, atol=1e-5)
        expected = load_tensors(alone / "model.safetensors")[0]
        for name, weight in load_tensors(folder / "model.safetensors")[0].items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4, msg=name)


def test_what_streams_is_part_of_a_run_and_what_does_not_is_the_run_it_was() -> None:
    plain = DataConfig(name="image-folder", image_size=32)
    streamed = dataclasses.replace(plain, stream=True)
    others = (dataclasses.replace(streamed, crop_pct=0.875), dataclasses.replace(streamed, window=64))
    assert len({config(data=data).identity for data in (plain, streamed, *others)}) == 4
    assert RunConfig().identity == "142647aea0aba225"


def test_other_pictures_are_refused(root: Path, tmp_path: Path) -> None:
    one = config(protocol=dataclasses.replace(config().protocol, max_epochs=1))
    train_run(one, tmp_path / "run", data_dir=root / "data")
    other = tmp_path / "other"
    for path in (root / "data").rglob("*.jpg"):
        copy = other / path.relative_to(root / "data")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    train_run(one, tmp_path / "run", data_dir=other)  # the same under another name
    (other / "train" / "a" / "0.jpg").unlink()
    with pytest.raises(InputError, match="holds a run on other images than those in the data folder now"):
        train_run(one, tmp_path / "run", data_dir=other)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"crop_pct": 0.875, "stream": False}, "crop_pct is 0.875, but pictures that are decoded once"),
        ({"crop_pct": 0.0, "stream": True}, "crop_pct is 0.0, but must be greater than 0 and at most 1"),
        ({"window": 10}, "window is 10, but must be at least 64"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        dataclasses.replace(config().data, **changes)


def test_a_crop_of_another_size_than_the_images_is_refused(root: Path, tmp_path: Path) -> None:
    other = config().protocol.with_(ResizedCrop(size=40))
    with pytest.raises(InputError, match=r"resizedcrop.size is 40, but the model takes images of 32×32 pixels"):
        train_run(config(protocol=other), tmp_path / "run", data_dir=root / "data")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "second":
        together(Path(sys.argv[1]), 1)
    else:
        path = Path(sys.argv[1])
        train_run(config(), path / "killed", data_dir=path / "data", listener=KillAt(STEPS + 1))
