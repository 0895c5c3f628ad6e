"""What can come between a run and its end: a wish to stop, too little memory, a neighbour whose loss is not finite, and
checkpoints that are rare. None of it changes a number."""

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch

from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.tensorfile import load_tensors
from nearsight.train import (
    DataConfig,
    HistoryRow,
    Listener,
    RunConfig,
    RunFolder,
    Stop,
    StoppedError,
    TrainingError,
    baseline,
    train_run,
    train_runs,
    train_stack,
)
from nearsight.train.engine import EpochResult, Stack

CPU = torch.device("cpu")


def config(**changes: object) -> RunConfig:
    protocol = dataclasses.replace(baseline(), max_epochs=4, warmup_epochs=1, batch_size=32, lr=2e-3)
    base = RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=120, num_test=20),
        protocol=protocol,
        num_measured=20,
        measure_every=3,
        num_measured_during=10,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=120, num_test=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing came between."""
    return train_run(config(), tmp_path_factory.mktemp("whole") / "run")


def assert_same_run(a: RunFolder, b: RunFolder) -> None:
    """Equal to the bit."""
    ours, theirs = (pd.read_csv(folder.path / "history.csv").drop(columns="seconds") for folder in (a, b))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    assert a.model.read_bytes() == b.model.read_bytes()
    assert a.heads.read_bytes() == b.heads.read_bytes()
    assert a.read_result() == b.read_result()


def epochs_on_disk(folder: RunFolder) -> int:
    return len(load_tensors(folder.checkpoint)[1]["history"]) if folder.checkpoint.exists() else 0


def events(folder: RunFolder) -> list[str]:
    return [json.loads(line)["event"] for line in (folder.path / "events.jsonl").read_text().splitlines()]


class StopAt(Listener):
    """Wishes for a stop in a step of an epoch (0: after its end)."""

    def __init__(self, epoch: int, step: int) -> None:
        self.stop, self.at, self.epochs_done = Stop(), (epoch, step), 0

    def step(self, step: int) -> None:
        if (self.epochs_done + 1, step) == self.at:
            assert self.stop.is_listening
            self.stop.request("SIGTERM")

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epochs_done = row.epoch
        if (row.epoch, 0) == self.at:
            self.stop.request("SIGTERM")


@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.parametrize(("epoch", "step", "kept"), [(1, 1, 0), (3, 2, 2), (2, 0, 2), (4, 0, 4)])
def test_a_stop_keeps_every_whole_epoch(
    tmp_path: Path, whole: RunFolder, checkpoint_every: int, epoch: int, step: int, kept: int
) -> None:
    listener = StopAt(epoch, step)
    folder = RunFolder(tmp_path / "run")
    where = f"after epoch {kept}" if kept else "before the first epoch was over"
    with pytest.raises(StoppedError, match=f"stopped by SIGTERM {where}; the same command continues"):
        train_run(config(), folder.path, listener=listener, stop=listener.stop, checkpoint_every=checkpoint_every)
    assert not listener.stop.is_listening
    assert epochs_on_disk(folder) == kept
    assert events(folder)[-1] == "stopped"
    assert not folder.is_complete
    assert_same_run(train_run(config(), folder.path, checkpoint_every=checkpoint_every), whole)


def test_another_thread_may_wish_for_a_stop(tmp_path: Path) -> None:
    stop = Stop()
    threading.Timer(0.05, stop.request, ["the scheduler"]).start()
    protocol = dataclasses.replace(config().protocol, max_epochs=10_000, patience=10_000)
    with pytest.raises(StoppedError, match="stopped by the scheduler"):
        train_run(config(protocol=protocol, measure_every=0), tmp_path / "run", stop=stop)


class KillError(BaseException):
    """Stands for a kill: nothing may be saved on its way out."""


class KillAt(Listener):
    def __init__(self, epoch: int, step: int) -> None:
        self.at, self.epochs_done = (epoch, step), 0

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self.epochs_done = epochs_done

    def step(self, step: int) -> None:
        if (self.epochs_done + 1, step) == self.at:
            raise KillError

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epochs_done = row.epoch


def test_rare_checkpoints_cost_epochs_but_no_number(tmp_path: Path, whole: RunFolder) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KillError):
        train_run(config(), folder.path, listener=KillAt(2, 1), checkpoint_every=2)
    assert epochs_on_disk(folder) == 0
    with pytest.raises(KillError):
        train_run(config(), folder.path, listener=KillAt(4, 2), checkpoint_every=2)
    assert epochs_on_disk(folder) == 2
    assert len(pd.read_csv(folder.path / "history.csv")) == 2
    assert_same_run(train_run(config(), folder.path, checkpoint_every=100), whole)
    assert epochs_on_disk(folder) == 4  # the end is always written
    with pytest.raises(InputError, match="checkpoint_every is 0, but must be at least 1"):
        train_run(config(), tmp_path / "other", checkpoint_every=0)


def run_epoch_with(monkeypatch: pytest.MonkeyPatch, in_step: Callable[[Stack, int, int], None]) -> None:
    """`in_step(stack, epoch, step)` is called after every step of every stack."""
    run_epoch = Stack.run_epoch

    def disturbed(stack: Stack, on_step: Callable[[int], None]) -> list[EpochResult]:
        epoch = stack.epochs_done[0] + 1

        def after(step: int) -> None:
            on_step(step)
            in_step(stack, epoch, step)

        return run_epoch(stack, after)

    monkeypatch.setattr(Stack, "run_epoch", disturbed)


class Splits(Listener):
    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []

    def split(self, sizes: Sequence[int]) -> None:
        self.sizes.append(tuple(sizes))


CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
CPU_ERROR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried …"
)


@pytest.mark.parametrize(("error", "checkpoint_every"), [(CUDA_ERROR, 1), (CPU_ERROR, 3)], ids=["cuda", "cpu"])
def test_a_stack_that_does_not_fit_goes_on_in_halves(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, error: Exception, checkpoint_every: int
) -> None:
    """Equal to the bit to going on in halves from the same epoch, of which nothing failed; and to what cells give
    alone."""
    configs = [config(seed=seed) for seed in range(3)]
    halves = [RunFolder(tmp_path / f"halves{k}") for k in range(3)]
    with pytest.raises(KillError):
        train_stack(configs, halves, dataset, CPU, KillAt(3, 1))
    train_stack(configs[:2], halves[:2], dataset, CPU)
    train_stack(configs[2:], halves[2:], dataset, CPU)

    def fail(stack: Stack, epoch: int, step: int) -> None:
        if len(stack.configs) > 2 and (epoch, step) == (3, 2):
            raise error

    run_epoch_with(monkeypatch, fail)
    folders, listener = [RunFolder(tmp_path / f"split{k}") for k in range(3)], Splits()
    train_stack(configs, folders, dataset, CPU, listener, checkpoint_every=checkpoint_every)
    assert listener.sizes == [(2, 1)]
    for one, folder, half in zip(configs, folders, halves, strict=True):
        assert_same_run(folder, half)
        assert events(folder).count("out of memory") == 1
        assert events(folder).count("epoch") == 4  # none twice
        alone = train_run(one, tmp_path / f"alone{one.seed}")
        ours, theirs = (pd.read_csv(each.path / "history.csv").drop(columns="seconds") for each in (folder, alone))
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-4, atol=1e-5)


def test_halves_are_halved_until_they_fit(tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stack: Stack, epoch: int, step: int) -> None:
        if len(stack.configs) > 1:
            raise MemoryError

    run_epoch_with(monkeypatch, fail)
    folders, listener = [RunFolder(tmp_path / f"{k}") for k in range(4)], Splits()
    configs = [config(seed=seed, protocol=dataclasses.replace(config().protocol, max_epochs=1)) for seed in range(4)]
    train_stack(configs, folders, dataset, CPU, listener)
    assert listener.sizes == [(2, 2), (1, 1)]  # and then one after the other
    assert all(folder.is_complete for folder in folders)


def test_one_run_that_does_not_fit_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stack: Stack, epoch: int, step: int) -> None:
        if epoch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run_epoch_with(monkeypatch, fail)
    with pytest.raises(TrainingError, match=r"a step of 32 images does not fit .* smaller --protocol\.batch-size"):
        train_run(config(), tmp_path / "run")
    assert epochs_on_disk(RunFolder(tmp_path / "run")) == 1


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stack: Stack, epoch: int, step: int) -> None:
        raise RuntimeError("shapes do not fit")

    run_epoch_with(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train_stack([config(), config(seed=1)], [RunFolder(tmp_path / name) for name in "ab"], dataset, CPU)


def test_a_neighbour_whose_loss_is_not_finite_changes_nothing(
    tmp_path: Path, dataset: Dataset, whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the epoch is left at once then, so the others have not finished theirs."""

    def poison(stack: Stack, epoch: int, step: int) -> None:
        if (epoch, step) == (2, 1) and len(stack.configs) == 3:
            stack.weights["head.weight"].detach()[1].fill_(math.nan)

    run_epoch_with(monkeypatch, poison)
    folders = [RunFolder(tmp_path / f"{k}") for k in range(3)]
    with pytest.raises(TrainingError, match="became nan in epoch 2; the checkpoint of epoch 1 is kept"):
        train_stack([config(seed=seed) for seed in range(3)], folders, dataset, CPU)
    assert [folder.is_complete for folder in folders] == [True, False, True]
    assert epochs_on_disk(folders[1]) == 1
    ours, theirs = (pd.read_csv(each.path / "history.csv").drop(columns="seconds") for each in (folders[0], whole))
    pd.testing.assert_frame_equal(ours, theirs, rtol=1e-4, atol=1e-5)


def test_runs_of_any_shapes_train_in_the_stacks_that_fit_them(tmp_path: Path, dataset: Dataset) -> None:
    short = dataclasses.replace(config().protocol, max_epochs=1)
    configs = [
        config(protocol=short),
        config(protocol=dataclasses.replace(short, batch_size=16)),
        config(protocol=short, seed=1),
        config(protocol=short, data=DataConfig(name="shapes", num_train=100, num_test=20)),
    ]
    folders = [RunFolder(tmp_path / f"{k}") for k in range(4)]
    train_runs(configs[:1], folders[:1])
    before = folders[0].model.stat().st_mtime_ns
    train_runs(configs, folders)
    assert [folder.read_config() for folder in folders] == configs
    assert all(folder.is_complete for folder in folders)
    assert folders[0].model.stat().st_mtime_ns == before
    with pytest.raises(InputError, match="two runs share a folder"):
        train_runs(configs[:2], [folders[0], RunFolder(tmp_path / "x" / ".." / "0")])
