"""Runs: a stack gives what its cells give alone, a resumed run what an uninterrupted one gives."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from nearsight.augment import AutoAugment, CutMix
from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.lens import HeadTable, attention_maps, measure
from nearsight.metrics import locality_score, neighbour_association
from nearsight.models import ModelConfig, load_model
from nearsight.owner import process_mark
from nearsight.tensorfile import load_tensors
from nearsight.train import DataConfig, HistoryRow, Listener, RunConfig, RunFolder, TrainingError, baseline, train_run
from nearsight.train.engine import Stack, initial_model
from nearsight.train.folder import HEADS_COLUMNS, LAYERS_COLUMNS, Progress
from nearsight.train.heads import MeasuringImages
from nearsight.train.optimizer import learning_rates
from nearsight.train.runner import train_stack

CPU = torch.device("cpu")


def config(**changes: object) -> RunConfig:
    protocol = dataclasses.replace(baseline(), max_epochs=3, warmup_epochs=1, batch_size=32, lr=2e-3)
    base = RunConfig(
        model=ModelConfig(depth=2, width=16, num_heads=2, mlp_width=32, patch_size=8),
        data=DataConfig(name="shapes", num_train=200, num_test=60),
        protocol=protocol,
        num_measured=40,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=200, num_test=60)


def numbers(folder: RunFolder) -> pd.DataFrame:
    return pd.read_csv(folder.path / "history.csv").drop(columns="seconds")


def assert_same_run(a: RunFolder, b: RunFolder) -> None:
    """Bit-equal weights and numbers."""
    pd.testing.assert_frame_equal(numbers(a), numbers(b), check_exact=True)
    assert a.model.read_bytes() == b.model.read_bytes()
    assert a.heads.read_bytes() == b.heads.read_bytes()
    assert a.read_result() == b.read_result()


class CrashError(Exception):
    """Stands for a crash."""


class CrashAt(Listener):
    def __init__(self, epoch: int, step: int) -> None:
        self.epoch_number, self.at = 1, (epoch, step)

    def step(self, step: int) -> None:
        if (self.epoch_number, step) == self.at:
            raise CrashError

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epoch_number = row.epoch + 1


def test_a_run_folder_holds_what_the_contract_says(tmp_path: Path) -> None:
    folder = train_run(config(), tmp_path / "run")
    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "config.json",
        "checkpoint.safetensors",
        "history.csv",
        "events.jsonl",
        "model.safetensors",
        "heads.csv",
        "heads.npz",
        "layers.csv",
        "result.json",
        "checksums.json",
        "provenance.json",
    }
    history = pd.read_csv(folder.path / "history.csv")
    assert list(history.columns) == ["epoch", "train_loss", "val_loss", "val_acc", "lr", "seconds"]
    assert history["epoch"].tolist() == [1, 2, 3]
    assert history["val_acc"].between(0, 1).all()
    # Numbers of float64, as if nothing had been float32: 7 of 40 are 0.175, and not 0.17499999701976776.
    rows = load_tensors(folder.checkpoint)[1]["history"]
    assert all(row["val_acc"] == round(40 * row["val_acc"]) / 40 for row in rows)
    assert folder.read_result()["test_acc"] == round(60 * folder.read_result()["test_acc"]) / 60
    assert [row["lr"] for row in rows] == [float(learning_rates(config().protocol, epoch, 5)[-1]) for epoch in range(3)]
    heads = pd.read_csv(folder.heads)
    assert tuple(heads.columns) == HEADS_COLUMNS
    assert len(heads) == 4
    assert set(heads["num_images"]) == {40}
    assert set(heads["epoch"]) == {folder.read_result()["best_epoch"]}
    table = HeadTable.load(folder.heads_per_image)
    assert table.per_image is not None
    np.testing.assert_allclose(table.per_image.mad.mean(0).ravel(), heads["mad"], rtol=1e-6)
    layers = pd.read_csv(folder.layers)
    assert tuple(layers.columns) == LAYERS_COLUMNS
    assert list(layers["layer_name"]) == list(heads["layer_name"].unique())
    certificate = folder.read_provenance()
    assert {"commit", "versions", "hardware", "seed", "wall_seconds", "images_per_second"} <= set(certificate)
    assert folder.read_result()["min_mad"] == pytest.approx(heads["mad"].min())
    assert folder.read_config() == config()
    events = [json.loads(line)["event"] for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert events == ["started", "epoch", "epoch", "epoch", "finished"]


def test_shares_are_those_of_the_models_maps(tmp_path: Path, dataset: Dataset) -> None:
    """The largest share on a patch itself, and on it and its neighbours, patch by patch."""
    folder = train_run(config(), tmp_path / "run")
    images = torch.cat(list(MeasuringImages(dataset, 40, torch.device("cpu"))))
    on_itself, near = [], []
    for layer in attention_maps(load_model(folder.model), images):
        rows, cols = layer.grid_size
        weights_HQK = layer.weights_BHQK[:, :, : rows * cols].mean(0)
        cells = [(row, col) for row in range(rows) for col in range(cols)]
        for weights_QK in weights_HQK:
            on_itself.append(float(weights_QK.diagonal().mean()))
            around = [
                sum(
                    float(weights_QK[q, k])
                    for k, (row, col) in enumerate(cells)
                    if max(abs(row - cells[q][0]), abs(col - cells[q][1])) <= 1
                )
                for q in range(len(cells))
            ]
            near.append(sum(around) / len(around))
    result = folder.read_result()
    assert result["max_share_self"] == pytest.approx(max(on_itself), abs=1e-6)
    assert result["max_share_near"] == pytest.approx(max(near), abs=1e-6)


def test_layers_are_those_of_the_model(tmp_path: Path, dataset: Dataset) -> None:
    folder = train_run(config(), tmp_path / "run")
    model = load_model(folder.model)
    images = torch.cat(list(MeasuringImages(dataset, 40, torch.device("cpu"))))
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, tokens: outputs.append(tokens.double()))
    with torch.no_grad():
        model(images)
    for layer, tokens in zip(pd.read_csv(folder.layers).to_dict("records"), outputs, strict=True):
        similarity = torch.nn.functional.cosine_similarity(tokens[:, 1:], tokens[:, :1], dim=-1).mean()
        assert layer["patch_cls_similarity"] == pytest.approx(float(similarity), rel=1e-5)
        side = round((tokens.shape[1] - 1) ** 0.5)
        score = locality_score(tokens[:, 1:], (side, side)).mean()
        assert layer["locality_score"] == pytest.approx(float(score), rel=1e-5)


def test_positions_are_those_of_the_model(tmp_path: Path) -> None:
    with_positions = train_run(config(), tmp_path / "with")
    positions = load_model(with_positions.model).pos_embed.detach()[0, 1:].double()
    gram = positions @ positions.T
    expected = float(neighbour_association(gram, (4, 4)).fraction)
    assert with_positions.read_result()["position_association"] == pytest.approx(expected)
    without = dataclasses.replace(config(), model=dataclasses.replace(config().model, positions=False))
    assert train_run(without, tmp_path / "without").read_result()["position_association"] is None


def test_the_best_epochs_weights_are_tested_once(tmp_path: Path, dataset: Dataset) -> None:
    folder = train_run(config(), tmp_path / "run")
    model = load_model(folder.model)
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    images = (dataset.test.images_NCHW / 255 - mean) / std
    with torch.no_grad():
        correct = (model(images).argmax(-1) == dataset.test.labels_N).double().mean()
    assert folder.read_result()["test_acc"] == pytest.approx(float(correct))
    history = pd.read_csv(folder.path / "history.csv")
    assert folder.read_result()["best_epoch"] == history["val_acc"].idxmax() + 1


@pytest.mark.parametrize(("epoch", "step"), [(1, 2), (2, 1), (3, 5)])
def test_a_crash_anywhere_changes_nothing(tmp_path: Path, epoch: int, step: int) -> None:
    whole = train_run(config(), tmp_path / "whole")
    with pytest.raises(CrashError):
        train_run(config(), tmp_path / "crashed", listener=CrashAt(epoch, step))
    assert not RunFolder(tmp_path / "crashed").is_complete
    assert_same_run(train_run(config(), tmp_path / "crashed"), whole)


def test_a_crash_after_training_redoes_only_the_end(tmp_path: Path) -> None:
    folder = train_run(config(), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    for name in ("provenance.json", "result.json", "heads.csv", "layers.csv", "model.safetensors"):
        (folder.path / name).unlink()
    (folder.path / "history.csv").write_text("spoilt")

    class NoTraining(Listener):
        def step(self, step: int) -> None:
            raise AssertionError("trained again")

    train_run(config(), tmp_path / "run", listener=NoTraining())
    for name in ("result.json", "heads.csv", "layers.csv", "model.safetensors", "history.csv"):
        assert (folder.path / name).read_bytes() == before[name]


def test_a_finished_run_is_not_touched_again(tmp_path: Path) -> None:
    folder = train_run(config(), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    train_run(config(), tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in folder.path.iterdir()} == before


def test_cells_of_a_stack_give_what_they_give_alone(tmp_path: Path, dataset: Dataset) -> None:
    """Different protocols, strengths, seeds and initialisations, side by side, against each by itself."""
    start = config().protocol
    configs = [
        config(),
        config(seed=1, protocol=dataclasses.replace(start.with_(CutMix(p=0.7)), lr=1e-3, weight_decay=0.3)),
        config(protocol=dataclasses.replace(start.with_(AutoAugment()), smoothing=0.1, clip_norm=0.5, max_epochs=2)),
        config(model=dataclasses.replace(config().model, init="pytorch", position_std=1.0)),
    ]
    folders = [RunFolder(tmp_path / f"stacked{k}") for k in range(len(configs))]
    train_stack(configs, folders, dataset, CPU, Listener())
    for k, (one, folder) in enumerate(zip(configs, folders, strict=True)):
        alone = train_run(one, tmp_path / f"alone{k}")
        stacked, single = numbers(folder), numbers(alone)
        assert len(stacked) == one.protocol.max_epochs
        pd.testing.assert_frame_equal(stacked, single, rtol=1e-4, atol=1e-5)
        pd.testing.assert_frame_equal(pd.read_csv(folder.heads), pd.read_csv(alone.heads), rtol=1e-3)


def test_training_learns(tmp_path: Path) -> None:
    """Without augmentation a model of this size learns much of 160 images by heart (chance: ln 10 = 2.3)."""
    by_heart = dataclasses.replace(config().protocol, max_epochs=25, lr=1e-2, batch_size=16, patience=25, augment=())
    folder = train_run(config(protocol=by_heart), tmp_path / "run")
    history = pd.read_csv(folder.path / "history.csv")
    assert history["train_loss"].iloc[0] > 2
    assert history["train_loss"].iloc[-1] < 1.8


def test_first_loss_is_that_of_the_untrained_model(dataset: Dataset) -> None:
    """One step without augmentation: the reported loss is cross-entropy of the initial weights on the first batch."""
    one = config(protocol=dataclasses.replace(config().protocol, augment=(), batch_size=160, smoothing=0.2))
    stack = Stack.start([one], dataset, CPU)
    assert stack.steps_per_epoch == 1
    model = initial_model(one, dataset)
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    with torch.no_grad():
        logits = model((dataset.train.images_NCHW[stack.training_N] / 255 - mean) / std)
    labels = dataset.train.labels_N[stack.training_N]
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    (result,) = stack.run_epoch()
    assert result.train_loss == pytest.approx(float(expected), rel=1e-5)


def test_bf16_trains_close_to_fp32(tmp_path: Path) -> None:
    full = numbers(train_run(config(), tmp_path / "fp32"))
    reduced = numbers(train_run(config(precision="bf16"), tmp_path / "bf16"))
    assert (full["train_loss"] - reduced["train_loss"]).abs().max() < 0.02
    assert not full["train_loss"].equals(reduced["train_loss"])


def row(epoch: int, val_acc: float) -> HistoryRow:
    return HistoryRow(epoch=epoch, train_loss=1.0, val_loss=1.0, val_acc=val_acc, lr=0.1, seconds=1.0)


def test_early_stopping_waits_for_patience_epochs_after_the_best() -> None:
    accuracies = [0.1, 0.4, 0.4, 0.3, 0.39]
    rows = tuple(row(epoch + 1, accuracy) for epoch, accuracy in enumerate(accuracies))
    over = [Progress(history=rows[:n]).is_over(max_epochs=100, patience=3) for n in range(len(rows) + 1)]
    assert over == [False, False, False, False, False, True]
    assert Progress(history=rows).best == rows[1]  # the first of equals: a tie is no improvement
    assert Progress(history=rows[:3]).is_over(max_epochs=3, patience=3)


def test_early_stopping_ends_a_run(tmp_path: Path) -> None:
    protocol = dataclasses.replace(config().protocol, max_epochs=50, patience=1, lr=1e-12)
    folder = train_run(config(protocol=protocol), tmp_path / "run")
    assert folder.read_result()["epochs"] == 2


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_epoch = Stack.run_epoch

    def poisoned(stack: Stack, on_step: object) -> object:
        if stack.epochs_done == [1]:
            stack.weights["head.weight"].detach().fill_(math.nan)
        return run_epoch(stack, on_step)

    monkeypatch.setattr(Stack, "run_epoch", poisoned)
    with pytest.raises(TrainingError, match="became nan in epoch 2; the checkpoint of epoch 1 is kept") as told:
        train_run(config(), tmp_path / "run")
    assert str(told.value).endswith("Try a lower --protocol.lr")  # the precision is full already
    monkeypatch.undo()
    tensors, stored = load_tensors(tmp_path / "run" / "checkpoint.safetensors")
    assert len(stored["history"]) == 1
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert_same_run(train_run(config(), tmp_path / "run"), train_run(config(), tmp_path / "whole"))


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    train_run(config(), tmp_path / "run")
    with pytest.raises(InputError, match="holds another run"):
        train_run(config(seed=1), tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds weights but no config\.json"):
        train_run(config(), tmp_path / "run")


def test_the_remains_of_a_killed_write_are_cleared_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ended = re.sub(r"-.*-", f"-{2**22 + 1}-", process_mark())  # a number that no process has
    (tmp_path / f".history.csv.{ended}-12345678.tmp.csv").write_text("half a ta")
    folder.claim(config())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_damaged_checkpoint_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        train_run(config(), tmp_path / "run", listener=CrashAt(2, 3))
    path = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"checkpoint\.safetensors is damaged"):
        train_run(config(), tmp_path / "run")
    assert path.read_bytes() == content
    assert not (tmp_path / "run" / "provenance.json").exists()


def test_cells_that_do_not_share_shapes_cannot_be_stacked(dataset: Dataset) -> None:
    wider = config(model=dataclasses.replace(config().model, width=32))
    with pytest.raises(InputError, match="differ in model shape"):
        Stack.start([config(), wider], dataset, CPU)
    big = dataclasses.replace(config().protocol, batch_size=500)
    with pytest.raises(InputError, match="do not fill one batch of 500; take more of them, or a smaller batch"):
        Stack.start([config(protocol=big)], dataset, CPU)
    with pytest.raises(InputError, match="the run is for cifar10, but the data are shapes"):
        Stack.start([config(data=DataConfig(name="cifar10"))], dataset, CPU)


def test_an_events_line_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log("one")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "cut')
    folder.log("two")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in (lines[0], lines[2])] == ["one", "two"]


def test_heads_are_those_of_the_saved_model(tmp_path: Path, dataset: Dataset) -> None:
    folder = train_run(config(num_measured=60), tmp_path / "run")
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    table = measure(load_model(folder.model), (dataset.test.images_NCHW / 255 - mean) / std)
    heads = pd.read_csv(folder.heads)
    assert heads["mad"].tolist() == pytest.approx(table.mad.flatten().tolist(), rel=1e-5)
    assert heads["entropy_std"].tolist() == pytest.approx(table.entropy_std.flatten().tolist(), rel=1e-3)
