"""A process's share of a batch, made by itself: each sample becomes what it becomes in the whole batch."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nearsight.augment import AUGMENTATIONS, Augmentation, CutMix, HorizontalFlip, Mixup, MixupOrCutMix, Pipeline
from nearsight.augment.pipeline import CompiledPipeline
from nearsight.errors import InputError
from nearsight.randomness import Draws
from nearsight.train import RunConfig, baseline
from nearsight.train.processes import Processes, together
from nearsight.train.schedule import learning_rates
from nearsight.train.share import Share

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
