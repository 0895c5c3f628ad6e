"""Several processes give what one gives with the same batches, whatever they are resumed on and whoever is lost.

Run as a script, this file is the second process: python test_distributed.py FOLDER.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed

from nearsight.augment import CutMix, Mixup
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.tensorfile import load_tensors
from nearsight.train import (
    DataConfig,
    LostProcessError,
    RunConfig,
    RunFolder,
    Stop,
    StoppedError,
    baseline,
    load_data,
    modern,
    train_run,
    train_runs,
    train_stack,
)
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol, ImagesConfig, pretrain
from nearsight.train.processes import Processes

MODEL = ModelConfig(depth=2, width=16, num_heads=2, mlp_width=32, patch_size=8)
STEPS = 4


def config(**changes: object) -> RunConfig:
    """A batch that two processes do not divide evenly, and everything that draws numbers."""
    protocol = modern().with_(CutMix(p=0.8))
    settings = {"max_epochs": 2, "warmup_epochs": 1, "batch_size": 31, "lr": 2e-3, "drop_path": 0.2, "clip_norm": 0.5}
    return RunConfig(
        model=MODEL,
        data=DataConfig(name="shapes", num_train=160, num_test=30),
        protocol=dataclasses.replace(protocol, **settings | changes),
        num_measured=20,
        measure_every=1,
        num_measured_during=10,
    )


def configs() -> list[RunConfig]:
    """Two cells; the pipeline of both mixes twice."""
    mixed = config().protocol.with_(Mixup(p=0.5))
    return [config(), dataclasses.replace(config(), seed=1, protocol=mixed)]


DINO = DinoConfig(
    model=MODEL,
    data=ImagesConfig(name="shapes", num_train=32, num_test=10),
    crops=CropsConfig(num_local=1, local_size=16),
    protocol=DinoProtocol(
        epochs=2, batch_size=8, warmup_epochs=1, num_prototypes=12, hidden=16, bottleneck=8, momentum=0.9
    ),
)


class AfterAsked(Stop):
    """Wishes when training has asked so many times: it does so before every epoch and after every step."""

    def __init__(self, num: int, word: str) -> None:
        self._left, self._word = num, word
        super().__init__()

    @property
    def by(self) -> str | None:
        self._left -= 1
        return self._answer() if self._left < 0 else None

    @by.setter
    def by(self, word: str | None) -> None: ...

    def _answer(self) -> str:
        return self._word


class KillAt(AfterAsked):
    """Answers with the end of its process."""

    def __init__(self, num: int) -> None:
        super().__init__(num, "")

    def _answer(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


@contextmanager
def joined(root: Path, rank: int) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root / 'meeting'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def play(root: Path, rank: int) -> None:
    """One of two processes: whole runs, side by side and in turn, runs that the second stops after an epoch, runs that
    one process began, and in the end a run in whose second epoch the second is killed."""
    is_second = rank == 1
    # The second one has other folders, as on another machine.
    place = root / "elsewhere" if is_second else root
    with joined(root, rank):
        train_runs(configs(), [RunFolder(place / f"together{k}") for k in range(2)])
        in_turn = [RunFolder(place / f"in turn{k}") for k in range(2)]
        train_stack(configs(), in_turn, load_data(config().data), torch.device("cpu"), slots=1)
        with pytest.raises(StoppedError, match="stopped by SIGTERM after epoch 1"):
            train_run(config(), place / "begun by two", stop=AfterAsked(1 + STEPS, "SIGTERM") if is_second else None)
        with pytest.raises(StoppedError, match="stopped by SIGINT after epoch 1"):
            pretrain(DINO, place / "dino begun by two", stop=AfterAsked(1 + STEPS, "SIGINT") if is_second else None)
        train_run(config(), place / "begun by one")
        pretrain(DINO, place / "dino begun by one")
        with pytest.raises(InputError, match="holds another run"):  # which the first alone can see
            train_run(config(lr=1.0), place / "together0")
        with pytest.raises(LostProcessError, match=r"another of 2 processes was lost .* continues"):
            train_run(config(), place / "lost", stop=KillAt(1 + STEPS + 2) if is_second else None, checkpoint_every=10)


def assert_same_numbers(one: Path, other: Path) -> None:
    """Losses within 1e-5, accuracies exactly, weights within 1e-4: after 8 steps of 2e-3, of which rounding decides
    the direction where a gradient is 0."""
    ours, theirs = (pd.read_csv(path / "history.csv").drop(columns="seconds") for path in (one, other))
    pd.testing.assert_frame_equal(ours, theirs, rtol=0, atol=1e-5)
    if "val_acc" in ours:
        assert list(ours["val_acc"]) == list(theirs["val_acc"])
        results = [RunFolder(path).read_result() for path in (one, other)]
        assert results[0]["test_acc"] == results[1]["test_acc"]
        heads = [pd.read_csv(path / "heads.csv") for path in (one, other)]
        pd.testing.assert_frame_equal(*heads, rtol=0, atol=1e-5)
    expected = load_tensors(other / "model.safetensors")[0]
    for name, weight in load_tensors(one / "model.safetensors")[0].items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs in one process."""
    root = tmp_path_factory.mktemp("alone")
    train_runs(configs(), [RunFolder(root / f"run{k}") for k in range(2)])
    pretrain(DINO, root / "dino")
    return root


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `play` left behind. One second process for all tests: it takes seconds to start."""
    root = tmp_path_factory.mktemp("played")
    with pytest.raises(StoppedError):
        train_run(config(), root / "begun by one", stop=AfterAsked(1 + STEPS, "SIGTERM"))
    with pytest.raises(StoppedError):
        pretrain(DINO, root / "dino begun by one", stop=AfterAsked(1 + STEPS, "SIGTERM"))
    second = subprocess.Popen([sys.executable, __file__, str(root)], stderr=subprocess.PIPE, text=True)
    try:
        play(root, 0)
        _, complaint = second.communicate(timeout=60)
    finally:
        second.kill()
    assert second.returncode == -signal.SIGKILL, complaint
    return root


def test_two_processes_are_one_with_the_same_batches(played: Path, alone: Path) -> None:
    for k in range(2):
        for name in (f"together{k}", f"in turn{k}"):  # side by side, and one after the other in a slot
            assert_same_numbers(played / name, alone / f"run{k}")
            assert RunFolder(played / name).read_provenance()["processes"] == 2
    assert not (played / "elsewhere").exists()


def test_runs_resume_on_another_number_of_processes(played: Path, alone: Path) -> None:
    for begun in ("begun by two", "lost"):
        assert len(pd.read_csv(played / begun / "history.csv")) == 1  # no whole epoch was lost
        train_run(config(), played / begun)
    pretrain(DINO, played / "dino begun by two")
    for begun in ("begun by one", "begun by two", "lost"):
        assert_same_numbers(played / begun, alone / "run0")
    for begun in ("dino begun by one", "dino begun by two"):
        assert_same_numbers(played / begun, alone / "dino")


def test_what_cannot_be_shared_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(asked: RunConfig, num: int, match: str) -> None:
        monkeypatch.setattr(Processes, "joined", lambda: Processes(0, num))
        monkeypatch.setattr(Processes, "from_first", lambda self, work: work())
        with pytest.raises(InputError, match=match):
            train_run(asked, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refused(config(batch_size=3), 4, "4 processes cannot share a batch of 3 images; start fewer")
    refused(config(batch_size=64), 33, "33 processes cannot share 32 validation images")
    resnet = ModelConfig(name="compact_resnet18", channels=2)
    plain = dataclasses.replace(config(drop_path=0.0, augment=baseline().augment), model=resnet)
    refused(plain, 2, "compact_resnet18 has batch norms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    play(Path(sys.argv[1]), 1)
