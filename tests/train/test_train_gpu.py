"""The same numbers on a GPU as on the CPU, up to rounding."""

import dataclasses
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

from nearsight.augment import CutMix
from nearsight.data import DeviceImages
from nearsight.lens import measure
from nearsight.models import ModelConfig, load_model
from nearsight.randomness import permutation, uniform
from nearsight.train import DataConfig, RunConfig, RunFolder, engine, load_data, modern, train_run
from nearsight.train.engine import Stack

pytestmark = pytest.mark.gpu


@pytest.fixture
def config() -> RunConfig:
    protocol = dataclasses.replace(modern().with_(CutMix(p=0.7)), max_epochs=2, warmup_epochs=1, batch_size=64)
    return RunConfig(
        model=ModelConfig(depth=3, width=48, num_heads=4, mlp_width=96),
        data=DataConfig(name="shapes", num_train=1000, num_test=200),
        protocol=protocol,
        num_measured=200,
    )


def numbers(folder: RunFolder) -> pd.DataFrame:
    return pd.read_csv(folder.path / "history.csv").drop(columns="seconds")


def test_random_numbers_are_the_same_everywhere() -> None:
    seed, epoch, index = torch.tensor([3, 2**50]), torch.tensor([0, 7]), torch.arange(1000)
    cpu = uniform(seed.unsqueeze(-1), "s", epoch.unsqueeze(-1), index, 7)
    gpu = uniform(seed.cuda().unsqueeze(-1), "s", epoch.cuda().unsqueeze(-1), index.cuda(), 7)
    assert torch.equal(cpu, gpu.cpu())
    assert torch.equal(permutation(seed, "o", epoch, 5000), permutation(seed.cuda(), "o", epoch.cuda(), 5000).cpu())


def test_training_agrees_with_the_cpu(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    cpu = train_run(config, tmp_path / "cpu", device="cpu")
    gpu = train_run(config, tmp_path / "gpu", device="cuda")
    pd.testing.assert_frame_equal(numbers(cpu), numbers(gpu), rtol=2e-3, atol=0.011)
    pd.testing.assert_frame_equal(pd.read_csv(cpu.heads), pd.read_csv(gpu.heads), rtol=1e-2)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(name="compact_resnet18", channels=8),
        ModelConfig(depth=3, width=48, num_heads=4, mlp_width=96, shuffled_tiles=8),
    ],
    ids=["batch norms", "shuffled tiles"],
)
def test_other_networks_agree_with_the_cpu(
    config: RunConfig, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    cells = [dataclasses.replace(config, model=model, seed=seed) for seed in range(2)]
    dataset = load_data(config.data)
    here, there = (Stack.start(cells, dataset, torch.device(name)) for name in ("cpu", "cuda"))
    for _ in range(2):
        for ours, theirs in zip(here.run_epoch(), there.run_epoch(), strict=True):
            assert theirs.train_loss == pytest.approx(ours.train_loss, rel=0.02)
            assert theirs.val_loss == pytest.approx(ours.val_loss, rel=0.1)
    for name, statistic in here.statistics.items():
        torch.testing.assert_close(there.statistics[name].cpu(), statistic, rtol=0.1, atol=0.05, msg=name)
        if name.endswith("num_batches_tracked"):  # a warm-up of the captured step leaves no trace
            assert there.statistics[name].tolist() == [2 * here.steps_per_epoch] * 2


def test_a_run_moves_between_devices(config: RunConfig, tmp_path: Path) -> None:
    one_epoch = dataclasses.replace(config, precision="bf16")
    folder = train_run(one_epoch, tmp_path / "run", device="cuda")
    images = torch.randn(4, 3, 32, 32)
    model = load_model(folder.model)
    here, there = measure(model, images, device="cpu"), measure(model, images, device="cuda")
    assert abs(here.mad - there.mad).max() < 1e-4
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("resident", [True, False])
def test_a_captured_step_trains_who_joins(config: RunConfig, resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the graph that there is, with all that distinguishes the new cell; as in a stack that begins with it."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    if not resident:
        monkeypatch.setattr(engine, "DeviceImages", partial(DeviceImages, max_bytes=0))
    protocol = dataclasses.replace(config.protocol, drop_path=0.2, max_epochs=3)
    stays = dataclasses.replace(config, protocol=protocol)
    goes = dataclasses.replace(config, seed=1, protocol=dataclasses.replace(protocol, augment=()))
    other = dataclasses.replace(
        protocol.without("cutmix"), lr=3e-3, smoothing=0.3, weight_decay=0.5, clip_norm=0.1, drop_path=0.4
    )
    comes = dataclasses.replace(config, seed=2, protocol=other)
    dataset = load_data(config.data)
    stack = Stack.start([goes, stays], dataset, torch.device("cuda"), waiting=[comes])
    stack.run_epoch()
    programs = stack._programs
    stack.put(0, comes, dataset)
    fresh = Stack.start([comes], dataset, torch.device("cuda"))
    for _ in range(3):
        ours, theirs = stack.run_epoch()[0], fresh.run_epoch()[0]
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=2e-3)
        assert ours.val_loss == pytest.approx(theirs.val_loss, rel=1e-2)
        assert ours.lr == theirs.lr
    assert stack._programs is programs
