"""Layers with learning rates of their own, averaged weights and batches in parts: each in a stack, alone, interrupted,
and, where it must change nothing, against the run without it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from timm.utils import ModelEmaV3

from nearsight.augment import CutMix
from nearsight.augment.pipeline import one_thread
from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model
from nearsight.tensorfile import load_tensors
from nearsight.train import DataConfig, Listener, Protocol, RunConfig, RunFolder, baseline, train_run, train_stack
from nearsight.train.engine import Stack, initial_model
from nearsight.train.planning import cell_bytes

CPU = torch.device("cpu")
ALL = {"layer_decay": 0.7, "locality_lr": 10.0, "ema": 0.8, "accumulate": 3}


@pytest.fixture(scope="module", autouse=True)
def same_bits_in_any_stack() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=100, num_test=20)


def config(seed: int = 0, model: ModelConfig | None = None, **changes: object) -> RunConfig:
    settings = {"max_epochs": 2, "warmup_epochs": 1, "batch_size": 32, "lr": 5e-3, "drop_path": 0.1}
    protocol = dataclasses.replace(baseline().with_(CutMix(p=0.5)), **{**settings, **changes})  # type: ignore[arg-type]
    model = model or ModelConfig(depth=2, width=16, num_heads=2, mlp_width=16, patch_size=8)
    return RunConfig(
        model=model,
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=protocol,
        seed=seed,
        num_measured=10,
        measure_every=1,
        num_measured_during=5,
    )


class KillError(BaseException):
    """Stands for a kill."""


class KillAfter(Listener):
    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def step(self, step: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KillError


def test_cells_do_not_notice_their_neighbours_nor_a_kill(tmp_path: Path, dataset: Dataset) -> None:
    """One slot after another, too: what the last cell left there is gone."""
    configs = [
        config(0, **ALL),
        config(1, layer_decay=0.9, ema=0.5, accumulate=3),
        config(2, **ALL, max_epochs=1, clip_norm=0.5),
    ]
    alone = [train_run(each, tmp_path / f"alone{place}") for place, each in enumerate(configs)]
    folders = [RunFolder(tmp_path / str(place)) for place in range(3)]

    def go_on(listener: Listener) -> None:
        left = [place for place, folder in enumerate(folders) if not folder.is_complete]
        train_stack(
            [configs[place] for place in left], [folders[place] for place in left], dataset, CPU, listener, slots=2
        )

    for kill in (3, 3):
        with pytest.raises(KillError):
            go_on(KillAfter(kill))
    go_on(Listener())
    for folder, expected in zip(folders, alone, strict=True):
        for name in ("model.safetensors", "heads.csv", "result.json"):
            assert (folder.path / name).read_bytes() == (expected.path / name).read_bytes(), name
        assert load_model(folder.model) is not None


def test_the_averages_are_what_is_validated_and_saved(tmp_path: Path, dataset: Dataset) -> None:
    """timm's average, updated after every step of a run without one."""
    plain, averaged = config(max_epochs=1, warmup_epochs=0), config(max_epochs=1, warmup_epochs=0, ema=0.8)
    stack, model = Stack.start([plain], dataset, CPU), initial_model(plain, dataset)
    theirs = ModelEmaV3(model, decay=0.8)

    def follow(_step: int) -> None:
        model.load_state_dict({name: weight[0] for name, weight in stack.weights.items()})
        theirs.update(model)

    stack.run_epoch(follow)
    folder = train_run(averaged, tmp_path / "run")
    saved = load_tensors(folder.model)[0]
    for name, weight in theirs.module.state_dict().items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-5, atol=1e-6)
    own = Stack.start([averaged], dataset, CPU)
    (result,) = own.run_epoch()
    weights = {name: weight.unsqueeze(0) for name, weight in theirs.module.state_dict().items()}
    (val_loss,), _ = stack.evaluate(stack.images, stack.validation_N, weights)
    assert result.val_loss == pytest.approx(val_loss, abs=1e-5)
    raw = load_tensors(folder.checkpoint)[0]
    assert torch.equal(raw["weights/norm.weight"], stack.weights["norm.weight"][0])  # training itself is unmoved
    assert torch.equal(raw["average/norm.weight"], saved["norm.weight"])


def test_running_statistics_are_averaged_too(tmp_path: Path) -> None:
    resnet = ModelConfig(name="compact_resnet18", channels=2)
    whole = train_run(config(model=resnet, ema=0.8, drop_path=0.0), tmp_path / "whole")
    with pytest.raises(KillError):
        train_run(config(model=resnet, ema=0.8, drop_path=0.0), tmp_path / "killed", listener=KillAfter(3))
    again = train_run(config(model=resnet, ema=0.8, drop_path=0.0), tmp_path / "killed")
    assert again.model.read_bytes() == whole.model.read_bytes()
    stored = load_tensors(whole.checkpoint)[0]
    assert not torch.equal(stored["average/bn1.running_var"], stored["statistics/bn1.running_var"])


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("parts", [2, 5, 32])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(
    parts: int, teacher: bool, tmp_path: Path, dataset: Dataset
) -> None:
    """With CutMix over the whole batch, drop path, smoothing, and parts of different sizes."""
    taught: dict[str, object] = {"teacher": str(train_run(config(), tmp_path / "t").path)} if teacher else {}
    gradients, losses = [], []
    for accumulate in (1, parts):
        stack = Stack.start([config(accumulate=accumulate, smoothing=0.1, **taught)], dataset, CPU)
        epoch = stack._epoch()
        stack._programs = stack._make_programs(epoch)
        step = stack._programs.step
        step.begin(epoch)
        gradients.append(step._differentiate())
        losses.append(float(step.loss_K))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_parts_take_less_memory() -> None:
    vit = ModelConfig(name="vit_tiny_patch16_224", settings=("patch_size=8", "depth=2"))
    whole, parts = (cell_bytes(config(model=vit, batch_size=512, accumulate=number)) for number in (1, 8))
    assert parts < 0.4 * whole


def test_what_is_off_has_no_part_in_the_identity() -> None:
    assert config().identity == config(layer_decay=1.0, locality_lr=1.0, ema=0.0, accumulate=1).identity
    kinds = [config(**{name: value}) for name, value in ALL.items()]  # type: ignore[arg-type]
    assert len({each.identity for each in (config(), *kinds)}) == 5
    assert len({each.stack_key for each in (config(), *kinds)}) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_decay": 0.0}, "layer_decay is 0.0, but must be above 0 and at most 1"),
        ({"layer_decay": 1.1}, "layer_decay is 1.1"),
        ({"locality_lr": 0.0}, "locality_lr is 0.0, but must be positive"),
        ({"ema": 1.0}, "ema"),
        ({"accumulate": 0}, "accumulate is 0, but must be at least 1"),
        ({"accumulate": 200}, "accumulate is 200, but a batch of 128 images has"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Protocol(**changes)  # type: ignore[arg-type]
