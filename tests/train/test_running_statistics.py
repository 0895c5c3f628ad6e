"""Networks with batch norms in the engine: alone, in a stack and in a plain loop of torch they are the same."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import CutMix
from nearsight.data import Dataset, DeviceImages, epoch_batches, load_dataset
from nearsight.models import ModelConfig
from nearsight.tensorfile import load_tensors
from nearsight.train import DataConfig, HistoryRow, Listener, RunConfig, RunFolder, baseline, train_run, train_stack
from nearsight.train.cell import Cell
from nearsight.train.engine import Stack, initial_model
from nearsight.train.optimizer import decays, learning_rates
from nearsight.train.stacked import running_statistics, runs_as_one_batch

CPU = torch.device("cpu")
NUM_STATISTICS = 20 * 3
"""Mean, variance and number of batches of ResNet-18's batch norms."""


def config(**changes: object) -> RunConfig:
    protocol = dataclasses.replace(baseline(), max_epochs=4, warmup_epochs=1, batch_size=16, lr=3e-3)
    base = RunConfig(
        model=ModelConfig(name="compact_resnet18", channels=2),
        data=DataConfig(name="shapes", num_train=40, num_test=30),
        protocol=protocol,
    )
    return dataclasses.replace(base, **changes)


def different() -> list[RunConfig]:
    start = config().protocol
    return [
        config(),
        config(seed=1, protocol=dataclasses.replace(start.with_(CutMix(p=1.0)), lr=1e-3, weight_decay=0.3)),
        config(seed=2, protocol=dataclasses.replace(start, smoothing=0.2, clip_norm=0.5, max_epochs=3)),
    ]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=40, num_test=30)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **(tolerance or {"rtol": 0.0, "atol": 0.0}), msg=name)


def of_cell(stack: Stack, position: int) -> dict[str, Tensor]:
    return {name: tensor[position] for name, tensor in stack.weights.items()}


def test_training_is_that_of_a_plain_loop(dataset: Dataset) -> None:
    """Weights, statistics, losses and validation of two epochs without augmentation."""
    one = config(protocol=dataclasses.replace(config().protocol, augment=(), smoothing=0.1), seed=3)
    stack = Stack.start([one], dataset, CPU)
    model = initial_model(one, dataset).train()
    assert not runs_as_one_batch(stack.skeleton)
    assert len(stack.statistics) == NUM_STATISTICS
    groups = {True: [], False: []}  # type: ignore[var-annotated]
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter.unsqueeze(0))].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": one.protocol.weight_decay}, {"params": groups[False]}],
        weight_decay=0.0,
    )
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    images, labels = (dataset.train.images_NCHW / 255 - mean) / std, dataset.train.labels_N
    for epoch in range(2):
        losses = []
        order = epoch_batches(torch.tensor([one.seed]), epoch, len(stack.training_N), one.protocol.batch_size)
        rates = learning_rates(one.protocol, epoch, len(order))
        for batch, lr in zip(stack.training_N[order[:, 0]], rates.tolist(), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        (result,) = stack.run_epoch()
        assert result.train_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        model.eval()
        with torch.no_grad():
            logits = model(images[stack.validation_N])
        model.train()
        held_out = labels[stack.validation_N]
        assert result.val_loss == pytest.approx(F.cross_entropy(logits, held_out).item(), rel=1e-4)
        assert result.val_acc == pytest.approx((logits.argmax(-1) == held_out).float().mean().item())
    assert_same(
        of_cell(stack, 0), {name: tensor.detach() for name, tensor in model.state_dict().items()}, rtol=1e-4, atol=1e-5
    )
    assert stack.statistics["bn1.num_batches_tracked"].tolist() == [2 * stack.steps_per_epoch]
    assert float(stack.statistics["bn1.running_mean"].abs().max()) > 0.01


def test_a_cell_does_not_notice_its_neighbours_nor_their_end(dataset: Dataset) -> None:
    """Three different cells for an epoch, then two of them for another, against each alone."""
    stack = Stack.start(different(), dataset, CPU)
    together = [stack.run_epoch()]
    left = of_cell(stack, 1)
    stack = stack.select([0, 2])
    together.append(stack.run_epoch())
    for cell, position in ((0, 0), (2, 1)):
        alone = Stack.start([different()[cell]], dataset, CPU)
        assert [together[0][cell], together[1][position]] == [alone.run_epoch()[0] for _ in range(2)]
        assert_same(of_cell(stack, position), of_cell(alone, 0))
    alone = Stack.start([different()[1]], dataset, CPU)
    alone.run_epoch()
    assert_same(left, of_cell(alone, 0))


def test_evaluation_uses_running_statistics_and_leaves_them_alone(dataset: Dataset) -> None:
    stack = Stack.start(different()[:2], dataset, CPU)
    stack.run_epoch()
    before = {name: tensor.clone() for name, tensor in stack.weights.items()}
    losses, accuracies = stack.evaluate(DeviceImages(dataset.test, CPU), torch.arange(30))
    assert_same(stack.weights, before)
    assert stack.skeleton.training
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    images, labels = (dataset.test.images_NCHW / 255 - mean) / std, dataset.test.labels_N
    for position, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True)):
        model = initial_model(stack.configs[position], dataset).eval()
        model.load_state_dict(of_cell(stack, position))
        with torch.no_grad():
            logits = model(images)
        assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
        assert accuracy == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


def test_a_step_names_all_that_it_changes(dataset: Dataset) -> None:
    """What a graph's warm-up puts back: without it, a captured step would start from other statistics."""
    stack = Stack.start(different()[:2], dataset, CPU)
    step = stack._make_programs(stack._epoch()).step
    before, state = {name: tensor.clone() for name, tensor in stack.weights.items()}, step.state
    values = [tensor.clone() for tensor in state]
    step()
    assert not any(torch.equal(tensor, before[name]) for name, tensor in stack.statistics.items())
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)
    assert_same(stack.weights, before)


class CrashError(Exception):
    """Stands for a crash."""


class CrashAt(Listener):
    def __init__(self, epoch: int, step: int) -> None:
        self.epoch_number, self.at = 1, (epoch, step)

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self.epoch_number = epochs_done + 1

    def step(self, step: int) -> None:
        if (self.epoch_number, step) == self.at:
            raise CrashError

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epoch_number = row.epoch + 1


def test_a_crash_changes_nothing(tmp_path: Path) -> None:
    """Checkpoints of epoch 3, with the weights and statistics of the best epoch in them."""
    with pytest.raises(CrashError):
        train_run(config(), tmp_path / "whole", listener=CrashAt(4, 1))
    for crash, every in ((CrashAt(3, 2), 5), (CrashAt(4, 1), 3)):
        with pytest.raises(CrashError):
            train_run(config(), tmp_path / "crashed", listener=crash, checkpoint_every=every)
    whole, _ = load_tensors(RunFolder(tmp_path / "whole").checkpoint)
    crashed, _ = load_tensors(RunFolder(tmp_path / "crashed").checkpoint)
    assert_same(whole, crashed)
    names = running_statistics(config().model.build((32, 32), 10))
    for group in ("statistics", "best"):
        assert {f"{group}/{name}" for name in names} <= whole.keys()
    assert whole["statistics/bn1.num_batches_tracked"] == 3 * 2


def test_the_best_epochs_statistics_belong_to_its_weights(tmp_path: Path, dataset: Dataset) -> None:
    stack = Stack.start([config()], dataset, CPU)
    cell = Cell(config(), RunFolder(tmp_path / "run"))
    cell.folder.claim(config())
    kept = {}
    for epoch, accuracy in enumerate((0.1, 0.5, 0.3), 1):
        stack.run_epoch()
        if accuracy == 0.5:
            kept = {name: tensor.clone() for name, tensor in of_cell(stack, 0).items()}
        row = HistoryRow(epoch=epoch, train_loss=1.0, val_loss=1.0, val_acc=accuracy, lr=0.1, seconds=1.0)
        cell.record(stack, 0, row, None, checkpoint_every=1)
    assert_same(cell.best_weights, kept)
    model = initial_model(config(), dataset)
    model.load_state_dict(cell.best_weights)  # strictly: all there is


def test_a_stack_that_stops_resumes_cell_by_cell(tmp_path: Path, dataset: Dataset) -> None:
    folders = [RunFolder(tmp_path / str(k)) for k in range(2)]
    configs = different()[:2]
    with pytest.raises(CrashError):
        train_stack(configs, folders, dataset, CPU, CrashAt(3, 1))
    resumed = Stack.start(configs, dataset, CPU)
    for position, (one, folder) in enumerate(zip(configs, folders, strict=True)):
        Cell(one, folder).resume(resumed, position)
    whole = Stack.start(configs, dataset, CPU)
    for _ in range(2):
        whole.run_epoch()
    assert_same(resumed.weights, whole.weights)
    assert resumed.run_epoch() == whole.run_epoch()
    assert_same(resumed.weights, whole.weights)


def test_reduced_precision_trains_close_to_full(dataset: Dataset) -> None:
    full, reduced = (Stack.start([config(precision=precision)], dataset, CPU) for precision in ("fp32", "bf16"))
    (one,), (other,) = full.run_epoch(), reduced.run_epoch()
    assert one.train_loss == pytest.approx(other.train_loss, abs=0.05)
    assert one.train_loss != other.train_loss
    assert {tensor.dtype for tensor in reduced.statistics.values()} == {torch.float32, torch.int64}


def test_only_norms_that_keep_running_means_count() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2))
    model.register_buffer("fixed", torch.zeros(3))
    assert list(running_statistics(model)) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
