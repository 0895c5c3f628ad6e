"""Runs in float16: the scale of losses is torch's, cell by cell; an overflow costs a step of its own cell alone."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearsight.data import Dataset, load_dataset
from nearsight.models import ModelConfig
from nearsight.train import (
    DataConfig,
    HistoryRow,
    Listener,
    RunConfig,
    Stop,
    StoppedError,
    baseline,
    train_run,
)
from nearsight.train.engine import Stack, initial_model
from nearsight.train.optimizer import AdamW, decays, learning_rates
from nearsight.train.scaling import FIRST_SCALE, LossScale
from nearsight.train.stacked import stack_weights

CPU = torch.device("cpu")


def config(seed: int = 0, **changes: Any) -> RunConfig:
    protocol = dataclasses.replace(baseline(), batch_size=16, max_epochs=3, warmup_epochs=0, lr=1e-3, augment=())
    return RunConfig(
        model=ModelConfig(depth=2, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=dataclasses.replace(protocol, **changes),
        precision="fp16",
        seed=seed,
    )


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=100, num_test=20)


def test_it_is_torchs_scaler() -> None:
    """Over 4,500 steps, of which some overflow: weights, scales, and how many steps count."""
    random = torch.Generator().manual_seed(0)
    theirs = [nn.Parameter(torch.full((3,), float(k))) for k in range(2)]
    optimizers = [torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1) for weight in theirs]
    scalers = [torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE) for _ in range(2)]
    ours = AdamW.start(
        stack_weights([{"w": weight} for weight in theirs], CPU),
        betas=(0.9, 0.999),
        weight_decay=[0.1, 0.1],
        decay_all=[True, True],
        clip_norm=[None, None],
    )
    scale = LossScale.start(2, CPU)
    for step in range(4500):
        scaled_KP = torch.randn(2, 3, generator=random) * scale.scale_K[:, None]
        scaled_KP[0, 1] = torch.inf if step in (1, 2, 900) else scaled_KP[0, 1]
        scaled_KP[1, 2] = torch.nan if step in (700, 4400) else scaled_KP[1, 2]
        for k in range(2):
            scalers[k].scale(torch.zeros(()))  # which makes its state
            theirs[k].grad = scaled_KP[k].clone()
            scalers[k].step(optimizers[k])
            scalers[k].update()
        scale.step(ours, scaled_KP, torch.tensor([1e-2, 1e-2]))
        assert scale.scale_K.tolist() == [scaler.get_scale() for scaler in scalers]
    assert scale.scale_K[0] != scale.scale_K[1]
    torch.testing.assert_close(ours.weights_KP, torch.stack([weight.detach() for weight in theirs]))
    assert ours.steps_done_K.tolist() == [4497, 4498]


def test_a_scale_never_becomes_infinite() -> None:
    scale = LossScale(torch.tensor([3e38, 3e38]), torch.tensor([1999, 0]))
    scale._update(torch.tensor([True, False]))
    assert scale.scale_K.tolist() == pytest.approx([3e38, 1.5e38])
    assert scale.finite_steps_K.tolist() == [0, 0]


def test_an_epoch_is_that_of_autocast_and_a_scaler(dataset: Dataset) -> None:
    """Of a stack, against models that torch trains one by one; one begins with a scale that overflows."""
    configs = [config(0), config(1)]
    stack = Stack.start(configs, dataset, CPU)
    assert stack.scale is not None
    first = [2.0**30, FIRST_SCALE]
    stack.scale.scale_K.copy_(torch.tensor(first))
    index_SKB = stack._epoch().index_SKB
    stack.run_epoch()
    assert stack.scale.scale_K[0] < first[0]
    assert stack.scale.scale_K[1] == first[1]
    assert stack.optimizer.steps_done_K[0] < stack.optimizer.steps_done_K[1] == len(index_SKB)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    for k, run in enumerate(configs):
        model, rates_S = initial_model(run, dataset), learning_rates(run.protocol, 0, len(index_SKB))
        groups = [
            {
                "params": [p for name, p in model.named_parameters() if decays(name, p[None]) == is_decayed],
                "weight_decay": run.protocol.weight_decay * is_decayed,
            }
            for is_decayed in (True, False)
        ]
        optimizer, scaler = torch.optim.AdamW(groups), torch.amp.GradScaler("cpu", init_scale=first[k])
        for index_B, rate in zip(index_SKB[:, k], rates_S.tolist(), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model((dataset.train.images_NCHW[index_B] / 255 - mean) / std)
            scaler.scale(F.cross_entropy(logits.float(), dataset.train.labels_N[index_B])).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == stack.scale.scale_K[k]
        for name, weight in model.named_parameters():
            torch.testing.assert_close(stack.weights[name][k], weight.detach(), rtol=0, atol=2e-3)


def test_slots_begin_anew_and_cells_leave_with_their_scales(dataset: Dataset) -> None:
    stack = Stack.start([config(0), config(1)], dataset, CPU)
    assert stack.scale is not None
    stack.scale.scale_K.copy_(torch.tensor([4.0, 8.0]))
    stack.run_epoch()
    stack.put(0, config(2), dataset)
    assert stack.scale.scale_K.tolist() == [FIRST_SCALE, 8.0]
    other = stack.select([1])
    assert other.scale is not None
    assert other.scale.scale_K.tolist() == [8.0]
    half = dataclasses.replace(config(), precision="bf16")
    assert config().stack_key != half.stack_key
    assert Stack.start([half], dataset, CPU).scale is None


class StopAfterTheFirstEpoch(Listener):
    def __init__(self) -> None:
        self.stop = Stop()

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.stop.request("a test")


def test_a_run_goes_on_with_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows every four steps here, so that it is another one in the second epoch."""
    monkeypatch.setattr("nearsight.train.scaling._STEPS_TO_GROWTH", 4)
    listener = StopAfterTheFirstEpoch()
    whole = train_run(config(), tmp_path / "whole")
    with pytest.raises(StoppedError, match="after epoch 1"):
        train_run(config(), tmp_path / "parts", listener=listener, stop=listener.stop)
    parts = train_run(config(), tmp_path / "parts")
    assert parts.model.read_bytes() == whole.model.read_bytes()
    assert parts.read_result() == whole.read_result()
