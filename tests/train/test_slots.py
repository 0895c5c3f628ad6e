"""Slots: a cell's numbers are equal to the bit whenever it joined, whoever had its slot before, and whatever came
between. On a CPU and one thread, where the order of sums does not depend on how many cells there are."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nearsight.augment import AutoAugment, CutMix, Mixup, Pipeline, RandomErasing
from nearsight.augment.pipeline import one_thread
from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.tensorfile import load_tensors
from nearsight.train import (
    DataConfig,
    HistoryRow,
    Listener,
    Protocol,
    RunConfig,
    RunFolder,
    TrainingError,
    baseline,
    train_run,
    train_runs,
    train_stack,
)
from nearsight.train import engine as engine_module
from nearsight.train.engine import Stack

CPU = torch.device("cpu")
DATA = DataConfig(name="shapes", num_train=120, num_test=20)
MODEL = ModelConfig(depth=2, width=16, num_heads=2, mlp_width=16, patch_size=8)
RESNET = ModelConfig(name="compact_resnet18", channels=2)


@pytest.fixture(scope="module", autouse=True)
def same_bits_in_any_stack() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=120, num_test=20)


def protocol(epochs: int = 3, **changes: object) -> Protocol:
    settings = {"max_epochs": epochs, "warmup_epochs": 1, "batch_size": 32, "lr": 2e-3, "drop_path": 0.1}
    return dataclasses.replace(baseline(), **{**settings, **changes})  # type: ignore[arg-type]


def config(seed: int, given: Protocol, **changes: object) -> RunConfig:
    base = RunConfig(model=MODEL, data=DATA, protocol=given, seed=seed, num_measured=20, num_measured_during=10)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def cells() -> list[RunConfig]:
    """Of one kind, and different in all that cells of a kind may differ in."""
    plain = protocol()
    return [
        config(0, plain),
        config(1, dataclasses.replace(plain.with_(CutMix(p=0.7)), lr=1e-3, weight_decay=0.3, max_epochs=2)),
        config(2, dataclasses.replace(plain.with_(AutoAugment()), smoothing=0.1, clip_norm=0.5), measure_every=2),
        config(3, dataclasses.replace(plain, augment=(), decay_all=True, drop_path=0.4, max_epochs=1)),
        config(4, dataclasses.replace(plain.with_(RandomErasing(p=0.5)), max_epochs=4), measure_every=1),
        config(5, dataclasses.replace(plain.with_(Mixup(p=1.0)), schedule="triangular", patience=1)),
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Every cell in a stack of its own; not to be changed."""
    root = tmp_path_factory.mktemp("alone")
    return [train_run(each, root / str(number)) for number, each in enumerate(cells())]


def assert_same_run(ours: RunFolder, theirs: RunFolder) -> None:
    tables = [pd.read_csv(folder.path / "history.csv").drop(columns="seconds") for folder in (ours, theirs)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    for name in ("model.safetensors", "heads.csv", "result.json"):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes(), name
    weights = [load_tensors(folder.checkpoint)[0] for folder in (ours, theirs)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


class KillError(BaseException):
    """Stands for a kill: nothing may be saved on its way out."""


class KillAfter(Listener):
    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def step(self, step: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KillError


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    order=st.permutations(range(6)),
    slots=st.integers(1, 4),
    kills=st.lists(st.integers(0, 12), max_size=2),
    checkpoint_every=st.sampled_from([1, 2]),
)
def test_a_cell_is_the_same_in_any_slot_at_any_time(
    tmp_path_factory: pytest.TempPathFactory,
    dataset: Dataset,
    alone: list[RunFolder],
    order: Sequence[int],
    slots: int,
    kills: Sequence[int],
    checkpoint_every: int,
) -> None:
    """In any order, so that each joins when others end; killed at some steps, and resumed with other neighbours."""
    root = tmp_path_factory.mktemp("schedule")
    configs, folders = [cells()[place] for place in order], [RunFolder(root / str(place)) for place in order]
    for number, kill in enumerate(kills):
        left = [place for place, folder in enumerate(folders) if not folder.is_complete]
        if number % 2:
            left.reverse()
        if not left:
            break
        with suppress(KillError):
            train_stack(
                [configs[place] for place in left],
                [folders[place] for place in left],
                dataset,
                CPU,
                KillAfter(kill),
                slots=slots,
                checkpoint_every=checkpoint_every,
            )
    train_runs(configs, folders)
    for place, folder in zip(order, folders, strict=True):
        assert_same_run(folder, alone[place])


class Told(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self.lines.append(f"{config.seed} starts")

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.lines.append(f"{config.seed}:{row.epoch}")

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        self.lines.append(f"{config.seed} ends")


def test_the_next_run_takes_the_slot_before_the_next_epoch(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    make = Stack._make_programs
    monkeypatch.setattr(Stack, "_make_programs", lambda *given: sizes.append(len(given[0].configs)) or make(*given))
    lengths = (2, 1, 2, 1)
    configs = [config(seed, protocol(epochs=epochs)) for seed, epochs in enumerate(lengths)]
    told = Told()
    train_stack(configs, [RunFolder(tmp_path / str(seed)) for seed in range(4)], dataset, CPU, told, slots=2)
    assert told.lines == [
        *("0 starts", "1 starts", "0:1", "1:1", "1 ends", "2 starts", "0:2", "2:1", "0 ends", "3 starts"),
        *("3:1", "2:2", "3 ends", "2 ends"),
    ]
    assert sizes == [2]  # the program of the first epoch did all


def test_a_stack_that_was_not_started_for_a_cell_is_made_anew(dataset: Dataset) -> None:
    """Correct, and slower: another augmentation, stronger than all, in another place, and clipping."""
    first, other = config(0, protocol()), config(1, protocol())
    new = config(2, dataclasses.replace(protocol().with_(CutMix(p=0.9)), clip_norm=0.1))
    stack = Stack.start([first, other], dataset, CPU)
    stack.run_epoch()
    programs = stack._programs
    stack.put(1, other, dataset)
    stack.run_epoch()
    assert stack._programs is programs
    stack.put(0, new, dataset)
    found = [stack.run_epoch()[0] for _ in range(2)]
    assert stack._programs is not programs
    fresh = Stack.start([new], dataset, CPU)
    assert found == [fresh.run_epoch()[0] for _ in range(2)]
    with pytest.raises(InputError, match="differ in model shape"):
        stack.put(0, config(0, protocol(batch_size=16)), dataset)


def test_running_statistics_begin_anew(dataset: Dataset) -> None:
    plain = protocol(drop_path=0.0)
    configs = [config(seed, plain, model=RESNET) for seed in range(3)]
    stack = Stack.start(configs[:2], dataset, CPU)
    stack.run_epoch()
    stack.put(1, configs[2], dataset)
    assert stack.run_epoch()[1] == Stack.start(configs[2:], dataset, CPU).run_epoch()[0]


def test_a_pipeline_knows_whom_it_takes() -> None:
    def pipeline(*lists: tuple[object, ...]) -> Pipeline:
        return Pipeline.stack(
            [lists[0]],  # type: ignore[list-item]
            num_classes=3,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            device=CPU,
            later=lists,  # type: ignore[arg-type]
        )

    cut, mix = CutMix(p=0.5), Mixup(p=0.5)
    both = pipeline((cut,), (mix,), ())
    assert both.stages[0][1]["p"].tolist() == [0.5]
    assert both.takes(())
    assert both.takes((mix,))
    assert both.takes((CutMix(p=0.0), mix))  # which does nothing
    assert not both.takes((CutMix(p=0.6),))
    assert not both.takes((AutoAugment(),))
    names = [kind.name for kind, _ in both.stages]
    turned = {"cutmix": cut, "mixup": mix}
    assert both.takes([turned[name] for name in names])
    assert not both.takes([turned[name] for name in reversed(names)])


def test_a_run_that_cannot_begin_leaves_its_slot_to_the_next(tmp_path: Path, alone: list[RunFolder]) -> None:
    """Its checkpoint is damaged; it is the first, or one that joins."""
    configs = cells()[:4]
    folders = [RunFolder(tmp_path / str(number)) for number in range(4)]
    for folder in (folders[0], folders[2]):
        folder.path.mkdir()
        folder.checkpoint.write_bytes(b"no tensors")
    for number in (0, 2):
        (folders[number].path / "config.json").write_bytes((alone[number].path / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"2 runs could not go on: .*is damaged.*is damaged"):
        train_runs(configs, folders)
    for number in (1, 3):
        assert_same_run(folders[number], alone[number])


def test_a_run_that_diverges_in_a_slot_does_not_take_the_others_along(
    tmp_path: Path, dataset: Dataset, alone: list[RunFolder]
) -> None:
    wild = config(9, protocol(lr=1e30, warmup_epochs=0))
    configs = [cells()[0], wild, *cells()[1:4]]
    folders = [RunFolder(tmp_path / str(number)) for number in range(5)]
    with pytest.raises(TrainingError, match=r"the loss of .*1 became (nan|inf) in epoch 1"):
        train_stack(configs, folders, dataset, CPU, slots=2)
    assert not folders[1].is_complete
    for number, folder in zip(range(4), [folders[0], *folders[2:]], strict=True):
        assert_same_run(folder, alone[number])


def test_streamed_images_fill_slots_too(
    tmp_path: Path, dataset: Dataset, alone: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Streamed(engine_module.DeviceImages):
        def __init__(self, *given: object) -> None:
            super().__init__(*given, max_bytes=0)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "DeviceImages", Streamed)
    folders = [RunFolder(tmp_path / str(number)) for number in range(6)]
    train_stack(cells(), folders, dataset, CPU, slots=3)
    for ours, theirs in zip(folders, alone, strict=True):
        assert_same_run(ours, theirs)
