"""Heads during training: a stack measured at once gives what `measure` gives, and no run is changed by it.

Runs of models that have no heads to measure end like others, and say so.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

import nearsight
from nearsight.cli import main
from nearsight.data import Dataset, load_dataset
from nearsight.models import ModelConfig
from nearsight.report.inputs import model_heads
from nearsight.study import Study, StudyResults, run_study
from nearsight.train import (
    HEADS_COLUMNS,
    LAYERS_COLUMNS,
    DataConfig,
    HistoryRow,
    Listener,
    RunConfig,
    RunFolder,
    baseline,
    measure_stack,
    train_run,
)
from nearsight.train import heads as train_heads
from nearsight.train.engine import Stack, initial_model
from nearsight.train.heads import measure_on_test
from nearsight.train.runner import train_stack
from nearsight.train.stacked import stack_weights, weightless

CPU = torch.device("cpu")


MODELS = {
    "ResNet": {"name": "compact_resnet18", "channels": 4},
    "pixels": {"name": "compact_vit", "shuffled_tiles": 32, "patch_size": 8, "width": 8, "num_heads": 1, "depth": 1},
}


def config(**changes: object) -> RunConfig:
    protocol = dataclasses.replace(baseline(), max_epochs=4, warmup_epochs=1, batch_size=32, lr=2e-3)
    base = RunConfig(
        model=ModelConfig(depth=2, width=16, num_heads=2, mlp_width=32, patch_size=8),
        data=DataConfig(name="shapes", num_train=120, num_test=40),
        protocol=protocol,
        num_measured=40,
        measure_every=2,
        num_measured_during=15,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=120, num_test=40)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train_run(config(), tmp_path_factory.mktemp("whole") / "run")


class Explicit(nn.Module):
    """A ViT whose attention is written out, so that there is no fused call to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, stride=8)
        self.attend = ExplicitAttention()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


class ExplicitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


def cells_of(kind: str, num: int) -> list[nn.Module]:
    made = []
    for seed in range(num):
        torch.manual_seed(seed)
        if kind == "explicit":
            made.append(Explicit())
        elif kind == "registers":
            made.append(VisionTransformer(32, 8, embed_dim=24, depth=3, num_heads=3, reg_tokens=2, qk_norm=True))
        else:
            made.append(timm.create_model("compact_vit", depth=3, embed_dim=24, num_heads=3, num_classes=5))
    for model in made:  # far from uniform attention, so that the numbers say something
        for name, parameter in model.named_parameters():
            if "qkv" in name:
                parameter.data.mul_(8)
    return made


@pytest.mark.parametrize("kind", ["plain", "registers", "explicit"])
@pytest.mark.parametrize("num", [1, 3])
def test_a_stack_is_measured_as_its_models_are(kind: str, num: int) -> None:
    cells = cells_of(kind, num)
    torch.manual_seed(9)
    batches = [torch.randn(4, 3, 32, 32), torch.randn(3, 3, 32, 32)]
    weights = stack_weights([dict(model.named_parameters()) for model in cells], CPU)
    model = cells_of(kind, 1)[0].train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tables = measure_stack(model, weights, batches)
    with_skeleton = measure_stack(model, weights, batches, skeleton=weightless(model))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for cell, table, other in zip(cells, tables, with_skeleton, strict=True):
        alone = nearsight.measure(cell, batches)
        np.testing.assert_array_equal(table.mad, other.mad)
        assert table.layer_names == alone.layer_names
        assert table.skipped == alone.skipped
        assert table.num_images == alone.num_images == 7
        for name in ("mad", "mad_std", "entropy", "entropy_std"):
            np.testing.assert_allclose(getattr(table, name), getattr(alone, name), atol=1e-6)
        np.testing.assert_array_equal(table.extra["grid_size"], alone.extra["grid_size"])
    if num > 1:
        assert abs(tables[0].mad - tables[1].mad).max() > 1e-3


def test_a_folded_model_takes_one_forward_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_heads, "measure", None)  # the way cell by cell
    (model,) = cells_of("plain", 1)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells_of("plain", 2)], CPU)
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)
    measure_stack(model, weights, [torch.randn(2, 3, 32, 32)] * 3)
    assert forwards == 3 + 1  # and the survey


def test_the_time_course_is_that_of_the_weights_then(tmp_path: Path, dataset: Dataset, whole: RunFolder) -> None:
    """Rows from the initial weights on, the final ones at the best epoch, and all else as without them."""
    folder = whole
    heads = pd.read_csv(folder.heads)
    best = folder.read_result()["best_epoch"]
    assert tuple(heads.columns) == HEADS_COLUMNS
    assert heads["epoch"].is_monotonic_increasing
    assert set(heads["epoch"]) == {0, 2, 4, best}
    assert not heads.duplicated(["epoch", "layer", "head"]).any()
    assert all(set(rows["num_images"]) == {40 if epoch == best else 15} for epoch, rows in heads.groupby("epoch"))
    assert set(heads["layer_name"]) == {"blocks.0.attn", "blocks.1.attn"}

    plain = train_run(config(measure_every=0), tmp_path / "plain")
    assert plain.path.joinpath("model.safetensors").read_bytes() == folder.model.read_bytes()
    pd.testing.assert_frame_equal(
        heads[heads["epoch"] == best].reset_index(drop=True), pd.read_csv(plain.heads), check_exact=True
    )
    ours, theirs = (pd.read_csv(each.path / "history.csv").drop(columns="seconds") for each in (folder, plain))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)

    table = measure_on_test(initial_model(config(), dataset), dataset, 15, CPU).to_frame()
    first = heads[heads["epoch"] == 0].reset_index(drop=True)
    np.testing.assert_allclose(first["mad"], table["mad"], rtol=1e-6)
    np.testing.assert_allclose(first["entropy_std"], table["entropy_std"], rtol=1e-4, atol=1e-9)


def test_the_final_numbers_win_where_both_are_of_the_best_epoch(tmp_path: Path) -> None:
    folder = train_run(config(measure_every=1), tmp_path / "run")
    heads, best = pd.read_csv(folder.heads), folder.read_result()["best_epoch"]
    assert set(heads["epoch"]) == {0, 1, 2, 3, 4}
    assert set(heads.loc[heads["epoch"] == best, "num_images"]) == {40}
    # The page reports the model that was kept, not the last one that was measured.
    reported = model_heads(folder, "run").measured()
    assert set(reported["epoch"]) == {best}
    assert reported["mad"].min() == pytest.approx(folder.read_result()["min_mad"])


class CrashError(Exception):
    """Stands for a crash."""


class CrashAfter(Listener):
    def __init__(self, epoch: int) -> None:
        self.last = epoch

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        if row.epoch == self.last:
            raise CrashError


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_crash_keeps_what_was_measured_before(
    tmp_path: Path, whole: RunFolder, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    with pytest.raises(CrashError):
        train_run(config(), tmp_path / "crashed", listener=CrashAfter(epoch))
    crashed = RunFolder(tmp_path / "crashed")
    assert set(pd.read_csv(crashed.heads)["epoch"]) == ({0} if epoch == 1 else {0, 2})
    measured = []
    measure_before = train_heads.TimeCourse.measure

    def noting(course: train_heads.TimeCourse, stack: Stack, epochs: dict[int, int]) -> object:
        measured.extend(epochs.values())
        return measure_before(course, stack, epochs)

    monkeypatch.setattr(train_heads.TimeCourse, "measure", noting)
    train_run(config(), tmp_path / "crashed")
    assert measured == list(range(epoch + 1, 5))  # nothing that is on disk is measured again
    assert crashed.heads.read_bytes() == whole.heads.read_bytes()
    assert crashed.model.read_bytes() == whole.model.read_bytes()


def test_measuring_a_run_again_keeps_its_time_course(whole: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = whole.heads.read_bytes()
    assert main(["measure", str(whole.path), "--device", "cpu", "--json"]) == 0
    assert whole.heads.read_bytes() == before
    rows = json.loads(capsys.readouterr().out)["heads"]
    assert {row["epoch"] for row in rows} == {whole.read_result()["best_epoch"]}
    whole.heads.write_text("not a table")
    assert main(["measure", str(whole.path), "--device", "cpu", "--json"]) == 2
    assert "heads.csv is damaged, or was changed" in capsys.readouterr().err
    (whole.path / "checksums.json").unlink()  # as earlier versions left it: what is no table is made anew
    assert main(["measure", str(whole.path), "--device", "cpu", "--json"]) == 0
    assert set(pd.read_csv(whole.heads)["epoch"]) == {whole.read_result()["best_epoch"]}
    whole.heads.write_bytes(before)


def test_cells_measure_at_their_own_epochs(tmp_path: Path, dataset: Dataset) -> None:
    configs = [
        config(measure_every=1),
        config(seed=1, measure_every=0),
        config(seed=2, measure_every=3, num_measured_during=7),
    ]
    folders = [RunFolder(tmp_path / f"stacked{k}") for k in range(3)]
    train_stack(configs, folders, dataset, CPU)
    for k, (one, folder) in enumerate(zip(configs, folders, strict=True)):
        alone = train_run(one, tmp_path / f"alone{k}")
        pd.testing.assert_frame_equal(pd.read_csv(folder.heads), pd.read_csv(alone.heads), rtol=1e-3)


def test_measuring_is_part_of_the_identity_only_where_it_happens() -> None:
    assert RunConfig(num_measured_during=3).identity == RunConfig().identity
    assert RunConfig(measure_every=5).identity != RunConfig().identity
    assert RunConfig(measure_every=5, num_measured_during=3).identity != RunConfig(measure_every=5).identity
    # Runs from before there was a choice keep theirs.
    assert RunConfig().identity == "142647aea0aba225"


@pytest.mark.parametrize("measure_every", [0, 1])
def test_a_study_of_such_models(tmp_path: Path, measure_every: int) -> None:
    """One without attention, one whose tokens have no place: pixels from everywhere."""
    protocol = dataclasses.replace(baseline(), max_epochs=1, warmup_epochs=1, batch_size=32, augment=())
    base = RunConfig(
        model=ModelConfig(**MODELS["pixels"]),
        data=DataConfig(name="shapes", num_train=120, num_test=20),
        protocol=protocol,
        measure_every=measure_every,
    )
    levels = {name: {"model": ModelConfig(**fields)} for name, fields in MODELS.items()}
    folder = run_study(Study(base, factors={"network": levels}), tmp_path)
    results = folder.write_tables()
    assert list(results.runs["network"]) == list(MODELS)
    assert results.runs["min_mad"].isna().all()
    assert results.runs["test_acc"].between(0, 1).all()
    assert results.heads.empty
    assert results.layers.empty
    assert results.course.empty
    for run in results.runs["run"]:
        ended = folder.run_folder(run)
        assert tuple(pd.read_csv(ended.heads).columns) == HEADS_COLUMNS
        assert tuple(pd.read_csv(ended.layers).columns) == LAYERS_COLUMNS
        assert ended.read_result()["min_mad"] is None
        told = [json.loads(line) for line in (ended.path / "events.jsonl").read_text().splitlines()]
        (why,) = [line["reason"] for line in told if line["event"] == "heads not measured"]
        assert "attention" in why
    again = StudyResults.read(tmp_path)
    pd.testing.assert_frame_equal(again.runs, results.runs)
