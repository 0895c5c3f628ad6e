"""A process's share of a batch, made by itself: each sample becomes what it becomes in the whole batch.

And the step of a share, by a process that has all of the batch for its share: what one GPU can show of several.
"""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor

from nearsight.augment import AUGMENTATIONS, Augmentation, CutMix, HorizontalFlip, Mixup, MixupOrCutMix, Pipeline
from nearsight.augment.pipeline import CompiledPipeline
from nearsight.data import load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.randomness import Draws
from nearsight.train import DataConfig, RunConfig, baseline, modern
from nearsight.train.engine import Stack
from nearsight.train.optimizer import learning_rates
from nearsight.train.processes import Processes, Share, together

CPU = torch.device("cpu")
BATCH, PROCESSES, STEPS = 11, 3, 2
NUM_CLASSES = 5


def pipeline_of(*cells: list[Augmentation]) -> Pipeline:
    return Pipeline.stack(cells, num_classes=NUM_CLASSES, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), device=CPU)


def by_shares(whole: Pipeline, seed: int, *, compiled: bool = False) -> list[tuple[Tensor, Tensor]]:
    """(of the whole batch, of the shares put together) of images and targets, for every step of an epoch."""
    generator = torch.Generator().manual_seed(seed)
    images_NCHW = torch.randint(256, (60, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels_N = torch.randint(NUM_CLASSES, (60,), generator=generator)
    seed_K, epoch_K = torch.tensor([seed, seed + 1]), torch.tensor([3, 4])
    index_SKB = torch.stack([torch.randperm(60, generator=generator)[: 2 * BATCH].view(2, BATCH) for _ in range(STEPS)])
    pairs = []
    augment = CompiledPipeline(backend="eager") if compiled else Pipeline.__call__
    for step in range(STEPS):
        draws = Draws(seed_K, epoch_K, torch.tensor(step), index_SKB[step])
        expected = whole(images_NCHW[draws.index_KB], labels_N[draws.index_KB], draws)
        parts = []
        for rank in range(PROCESSES):
            share = Share(Processes(rank, PROCESSES), BATCH)
            index_KR = share.needed(whole, seed_K, epoch_K, index_SKB)[step]
            needed = dataclasses.replace(draws, index_KB=index_KR)
            made = augment(share.pipeline(whole), images_NCHW[index_KR], labels_N[index_KR], needed)
            images, targets, own = share.own(*made, needed)
            assert images.shape[1] == targets.shape[1] == own.index_KB.shape[1] == share.num_samples
            parts.append((images, targets))
        pairs += list(zip(expected, (torch.cat(kind, dim=1) for kind in zip(*parts, strict=True)), strict=True))
    return pairs


@pytest.mark.parametrize("kind", AUGMENTATIONS.values(), ids=lambda kind: kind.name)
def test_every_augmentation_can_be_shared(kind: type[Augmentation]) -> None:
    """To the bit, at probabilities that let both answers of a coin happen."""
    before = [] if kind is HorizontalFlip else [HorizontalFlip()]
    whole = pipeline_of([*before, kind(p=0.7)], [kind(p=0.3)])
    for expected, shared in by_shares(whole, 7):
        assert torch.equal(expected, shared)


@pytest.mark.parametrize("per_sample", [False, True])
def test_mixing_on_mixing_can_be_shared(per_sample: bool) -> None:
    """Three mixings one after the other, and a single one in another cell."""
    mixings = [kind(p=0.9, per_sample=per_sample) for kind in (CutMix, Mixup, MixupOrCutMix)]
    whole = pipeline_of(mixings, mixings[1:2])
    assert len(whole.stages) == 3
    for seed in range(4):
        for expected, shared in by_shares(whole, seed):
            torch.testing.assert_close(shared, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_shared_augmentation_compiles() -> None:
    """In one piece, as a GPU's graph wants it."""
    for expected, shared in by_shares(pipeline_of([CutMix(p=0.9)], [CutMix(p=0.5)]), 5, compiled=True):
        torch.testing.assert_close(shared, expected)


def test_weighted_means_add_up_to_the_mean() -> None:
    losses_KB = torch.randn(2, BATCH, dtype=torch.float64)
    parts = [
        Share(processes, BATCH).weighted(processes.share(losses_KB).mean(-1))
        for processes in (Processes(rank, PROCESSES) for rank in range(PROCESSES))
    ]
    torch.testing.assert_close(sum(parts), losses_KB.mean(-1))


def test_learning_rates_grow_with_the_batch_if_asked_to() -> None:
    plain = dataclasses.replace(baseline(), batch_size=1024, lr=1e-3)
    scaled = {rule: dataclasses.replace(plain, lr_scaling=rule) for rule in ("none", "linear", "sqrt")}
    assert {rule: protocol.peak_lr for rule, protocol in scaled.items()} == pytest.approx(
        {"none": 1e-3, "linear": 4e-3, "sqrt": 2e-3}
    )
    torch.testing.assert_close(learning_rates(scaled["linear"], 7, 5), 4 * learning_rates(plain, 7, 5))
    assert dataclasses.replace(scaled["linear"], lr_scaling_batch=1024).peak_lr == plain.lr
    stored = RunConfig(protocol=scaled["sqrt"]).to_json()["config"]["protocol"]
    assert (stored["batch_size"], stored["lr_scaling"], stored["lr_scaling_batch"]) == (1024, "sqrt", 256)
    assert RunConfig(protocol=scaled["none"]).identity == RunConfig(protocol=plain).identity
    assert RunConfig(protocol=scaled["sqrt"]).identity != RunConfig(protocol=plain).identity
    with pytest.raises(InputError, match="'square' is not a known lr_scaling"):
        dataclasses.replace(plain, lr_scaling="square")
    with pytest.raises(InputError, match="lr_scaling_batch is 0"):
        dataclasses.replace(plain, lr_scaling_batch=0)


def test_processes_need_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with together(torch.device("meta")) as device:  # alone, anything goes
        assert device.type == "meta"
    with pytest.raises(InputError, match="timeout is 0"):  # though nobody waits
        together(CPU, timeout=0).__enter__()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="process 2 on this machine has no GPU of its own, there are 1"):
        together(torch.device("cuda")).__enter__()
    with pytest.raises(InputError, match="several processes do not train on mps"):
        together(torch.device("mps")).__enter__()
    with pytest.raises(InputError, match="timeout is 0"):
        together(CPU, timeout=0).__enter__()


SHARED_BATCH = 32


class OneOfOne(Processes):
    """Talks to itself, where one alone would not."""

    def sum_(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_share_of_everything_is_everything(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the step is two graphs there, with nccl between them, and not one."""
    dataset = load_dataset("shapes", num_train=160, num_test=10)
    settings = {"batch_size": SHARED_BATCH, "lr": 2e-3, "warmup_epochs": 1, "drop_path": 0.1, "clip_norm": 1.0}
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
        share = Share(OneOfOne(), SHARED_BATCH)
        monkeypatch.setattr(Stack, "_share", share)
        stack = Stack.start(cells, dataset, torch.device(device))
        stack.pipeline = share.pipeline(stack.pipeline)
        assert len(stack._epoch().index_SKB[0, 0]) == 2 * SHARED_BATCH  # with everybody's partner
        found = [stack.run_epoch() for _ in range(2)]
    finally:
        torch.distributed.destroy_process_group()
    # Two compiled programs may round a few pixels in two ways.
    tolerance = 1e-5 if device == "cpu" else 1e-2
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=tolerance)
        assert ours.val_loss == pytest.approx(theirs.val_loss, abs=tolerance)
        assert ours.lr == theirs.lr
