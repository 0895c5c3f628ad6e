"""The step of a share, by a process that has all of the batch for its share: what one GPU can show of several."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor

from nearsight.data import load_dataset
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, modern
from nearsight.train.engine import Stack
from nearsight.train.processes import Processes, Share

BATCH = 32


class OneOfOne(Processes):
    """Talks to itself, where one alone would not."""

    def sum_(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_share_of_everything_is_everything(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the step is two graphs there, with nccl between them, and not one."""
    dataset = load_dataset("shapes", num_train=160, num_test=10)
    settings = {"batch_size": BATCH, "lr": 2e-3, "warmup_epochs": 1, "drop_path": 0.1, "clip_norm": 1.0}
    config = RunConfig(
        model=ModelConfig(depth=2, width=32, num_heads=2, mlp_width=32, patch_size=8),
        data=DataConfig(name="shapes", num_train=160, num_test=10),
        protocol=dataclasses.replace(modern(), **settings),
    )
    cells = [config, dataclasses.replace(config, seed=1)]
    ordinary = Stack.start(cells, dataset, torch.device(device))
    expected = [ordinary.run_epoch() for _ in range(2)]
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{tmp_path / 'meeting'}",
        rank=0,
        world_size=1,
    )
    try:
        share = Share(OneOfOne(), BATCH)
        monkeypatch.setattr(Stack, "_share", share)
        stack = Stack.start(cells, dataset, torch.device(device))
        stack.pipeline = share.pipeline(stack.pipeline)
        assert len(stack._epoch().index_SKB[0, 0]) == 2 * BATCH  # with everybody's partner
        found = [stack.run_epoch() for _ in range(2)]
    finally:
        torch.distributed.destroy_process_group()
    # Two compiled programs may round a few pixels in two ways.
    tolerance = 1e-5 if device == "cpu" else 1e-2
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=tolerance)
        assert ours.val_loss == pytest.approx(theirs.val_loss, abs=tolerance)
        assert ours.lr == theirs.lr
