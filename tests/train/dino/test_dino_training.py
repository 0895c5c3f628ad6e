"""DINO's training: the update against plain torch, views, other sizes, whole runs that stop, continue and collapse."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from timm.layers import Format
from torch import Tensor

from nearsight.data import load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model
from nearsight.train import RunFolder, Stop, StoppedError, TrainingError
from nearsight.train.dino import (
    CropsConfig,
    DinoConfig,
    DinoFolder,
    DinoListener,
    DinoProtocol,
    DinoRow,
    DinoTraining,
    ImagesConfig,
    pretrain,
)
from nearsight.train.dino.networks import build_network
from nearsight.train.dino.recipes import PRETRAININGS
from nearsight.train.dino.views import MultiCrop, Views, global_augmentations, local_augmentations

CPU = torch.device("cpu")
SMALL = DinoConfig(
    model=ModelConfig(patch_size=8, depth=2, width=16, num_heads=2, mlp_width=16),
    data=ImagesConfig(name="shapes", num_train=48, num_test=10),
    crops=CropsConfig(num_local=3, local_size=16),
    protocol=DinoProtocol(
        epochs=2, batch_size=16, lr=0.05, warmup_epochs=1, num_prototypes=12, hidden=16, bottleneck=8, momentum=0.9
    ),
)


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("shapes", num_train=48, num_test=10)


def with_protocol(**changes: object) -> DinoConfig:
    return dataclasses.replace(SMALL, protocol=dataclasses.replace(SMALL.protocol, **changes))


def takes_both_sizes(backbone: Any) -> None:
    """Resample positions as timm does with `dynamic_img_size`."""
    backbone.dynamic_img_size = True
    embedding = backbone.patch_embed
    embedding.strict_img_size, embedding.flatten, embedding.output_fmt = False, False, Format.NHWC


def reference_epochs(config: DinoConfig, dataset, batches: list[tuple[int, Tensor]]):
    """The paper's pseudo-code with torch's own AdamW, on these batches (epoch, positions)."""
    protocol = config.protocol
    student, teacher = (build_network(config, dataset.image_size) for _ in range(2))
    takes_both_sizes(student.backbone)
    decayed = [weight for name, weight in student.named_parameters() if not name.endswith("bias") and weight.dim() > 1]
    others = [weight for weight in student.parameters() if not any(weight is other for other in decayed)]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    crop = MultiCrop(config.crops, dataset, config.seed, CPU)
    schedules = DinoTraining(config, dataset, CPU).schedules
    centre = torch.zeros(protocol.num_prototypes)
    for number, (epoch, index) in enumerate(batches):
        views = crop(dataset.train.images_NCHW[index], index, epoch)
        every_view = [*views.global_GBCHW, *views.local_LBChw]
        said = [student.head(student.backbone(view)) for view in every_view]
        with torch.no_grad():
            known = [teacher.head(teacher.backbone(view)) for view in views.global_GBCHW]
        losses = [
            -(
                torch.softmax((known[g] - centre) / schedules.temperature[number].float(), -1)
                * torch.log_softmax(said[v] / protocol.student_temperature, -1)
            )
            .sum(-1)
            .mean()
            for g in range(2)
            for v in range(len(said))
            if v != g
        ]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        for weight in student.parameters():
            torch.nn.utils.clip_grad_norm_([weight], protocol.clip_norm)
        if epoch < protocol.frozen_epochs:
            student.head.prototypes.grad = None
        optimizer.param_groups[0]["weight_decay"] = float(schedules.weight_decay[number])
        for group in optimizer.param_groups:
            group["lr"] = float(schedules.lr[number])
        optimizer.step()
        momentum = float(schedules.momentum[number])
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.copy_(momentum * mine + (1 - momentum) * theirs)
            centre = 0.9 * centre + 0.1 * torch.cat(known).mean(0)
    return student, teacher, centre


@pytest.mark.parametrize("locat", [False, True])
def test_two_epochs_are_those_of_plain_torch(dataset, locat: bool) -> None:
    config = with_protocol(drop_path=0.0, clip_norm=0.05)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, gaug=locat, prr=locat))
    training = DinoTraining(config, dataset, CPU)
    seen: list[tuple[int, Tensor]] = []
    crop = training._step.crop

    def noting(images: Tensor, index: Tensor, epoch: Tensor) -> Views:
        seen.append((int(epoch), index))
        return crop(images, index, epoch)

    training._step.crop = noting
    prototypes = training.network("student").head.prototypes
    training.run_epoch(0)
    assert torch.equal(training.network("student").head.prototypes, prototypes)
    result = training.run_epoch(1)
    assert not torch.equal(training.network("student").head.prototypes, prototypes)
    assert sorted(torch.cat([index for epoch, index in seen if epoch == 0]).tolist()) == list(range(48))
    student, teacher, centre = reference_epochs(config, dataset, seen)
    start = dict(build_network(config, dataset.image_size).named_parameters())
    for ours, theirs in ((training.network("student"), student), (training.network("teacher"), teacher)):
        for (name, mine), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            moved = (expected - start[name]).abs().max()
            assert (mine - expected).abs().max() <= 0.02 * moved + 1e-6, name
    torch.testing.assert_close(training.centre_P, centre, rtol=1e-3, atol=1e-4)
    assert result.centre_norm == pytest.approx(float(training.centre_P.norm()))
    assert 0 <= result.teacher_entropy <= math.log(12)
    assert 1 <= result.prototypes_used <= 12


def test_views_belong_to_the_image_and_not_to_the_batch(dataset) -> None:
    crop = MultiCrop(SMALL.crops, dataset, 3, CPU)
    index = torch.tensor([5, 9, 30, 2])
    views = crop(dataset.train.images_NCHW[index], index, 4)
    assert views.global_GBCHW.shape == (2, 4, 3, 32, 32)
    assert views.local_LBChw is not None
    assert views.local_LBChw.shape == (3, 4, 3, 16, 16)
    part = crop(dataset.train.images_NCHW[index[2:]], index[2:], 4)
    torch.testing.assert_close(part.global_GBCHW, views.global_GBCHW[:, 2:])
    torch.testing.assert_close(part.local_LBChw, views.local_LBChw[:, 2:])
    later = crop(dataset.train.images_NCHW[index], index, 5)
    assert not torch.equal(later.global_GBCHW, views.global_GBCHW)
    for first, second in ((views.global_GBCHW[0], views.global_GBCHW[1]), tuple(views.local_LBChw[:2])):
        assert (first != second).flatten(1).any(1).all()


def test_the_augmentations_of_the_views_are_the_papers() -> None:
    first, second = global_augmentations(CropsConfig())
    assert [(a.name, a.p) for a in first] == [
        *(("resizedcrop", 1.0), ("flip", 0.5), ("colorjitter", 0.8), ("grey", 0.2), ("blur", 1.0))
    ]
    assert [(a.name, a.p) for a in second[3:]] == [("grey", 0.2), ("blur", 0.1), ("solarize", 0.2)]
    local = local_augmentations(CropsConfig())
    assert (local[0].size, local[0].min_area, local[0].max_area, local[-1].p) == (96, 0.05, 0.4, 0.5)


class StopAt(DinoListener):
    def __init__(self, stop: Stop, epoch: int) -> None:
        self._stop, self._epoch, self._epochs_done = stop, epoch, 0

    def epoch(self, config: DinoConfig, row: DinoRow) -> None:
        self._epochs_done = row.epoch

    def step(self, step: int) -> None:
        if self._epochs_done == self._epoch and step == 2:
            self._stop.request("a test")


def test_a_stopped_run_continues_to_the_same_teacher(tmp_path: Path) -> None:
    config = with_protocol(epochs=3, lr=0.005)
    whole = pretrain(config, tmp_path / "whole")
    stop = Stop()
    with pytest.raises(StoppedError, match="after epoch 2"):
        pretrain(config, tmp_path / "parts", listener=StopAt(stop, 2), stop=stop, checkpoint_every=5)
    assert not DinoFolder(tmp_path / "parts").run.is_complete
    parts = pretrain(config, tmp_path / "parts")
    assert whole.run.model.read_bytes() == parts.run.model.read_bytes()
    ours, theirs = (pd.read_csv(folder.path / "history.csv").drop(columns="seconds") for folder in (whole, parts))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    events = [json.loads(line)["event"] for line in (parts.path / "events.jsonl").read_text().splitlines()]
    assert events == ["started", "epoch", "epoch", "stopped", "started", "epoch", "finished"]
    assert {"commit", "versions", "hardware", "images_per_second"} <= set(parts.run.read_provenance())
    # Whatever opens runs can open this one.
    as_any_run = RunFolder(parts.path).read_config()
    assert (as_any_run.model, as_any_run.data.name, as_any_run.data.num_train) == (config.model, "shapes", 48)
    assert load_model(parts.run.model)(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    assert parts.read_config() == config
    with pytest.raises(InputError, match="holds another run"):
        pretrain(SMALL, parts.path)


def test_the_last_checkpoint_is_enough_after_a_kill(tmp_path: Path, dataset) -> None:
    """The state goes through the file: nothing that training depends on is kept in memory alone."""
    folder = DinoFolder(tmp_path)
    folder.claim(SMALL)
    training = DinoTraining(SMALL, dataset, CPU)
    training.run_epoch(0)
    folder.write_checkpoint([], training.state(), SMALL)
    training.run_epoch(1)
    stored = folder.read_checkpoint(SMALL)
    assert stored is not None
    again = DinoTraining(SMALL, dataset, CPU)
    again.load_state(stored[1])
    again.run_epoch(1)
    expected = training.state()
    for name, value in again.state().items():
        assert torch.equal(value, expected[name]), name


def test_a_collapse_is_written_down(tmp_path: Path) -> None:
    """Without sharpening the teacher says the same of every image."""
    flat = with_protocol(epochs=1, teacher_temperature=1e4, teacher_temperature_start=1e4)
    told: list[DinoRow] = []
    listener = DinoListener()
    listener.collapsed = told.append
    folder = pretrain(flat, tmp_path / "run", listener=listener)
    events = (folder.path / "events.jsonl").read_text()
    assert '"collapsed"' in events
    (row,) = told
    assert row.teacher_entropy == pytest.approx(math.log(12), rel=1e-3)
    assert row.information == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    run_epoch = DinoTraining.run_epoch

    def poisoned(training: DinoTraining, epoch: int, on_step: Any) -> Any:
        result = run_epoch(training, epoch, on_step)
        return dataclasses.replace(result, loss=math.nan) if epoch == diverges_in else result

    monkeypatch.setattr(DinoTraining, "run_epoch", poisoned)
    config = dataclasses.replace(SMALL, precision=precision)
    for diverges_in, kept in enumerate(("no epoch was finished", "the checkpoint of epoch 1 is kept")):
        with pytest.raises(TrainingError, match=f"became nan in epoch {diverges_in + 1}; {kept}. Try a lower") as told:
            pretrain(config, tmp_path / "run", checkpoint_every=5)
        assert ("--precision fp32" in str(told.value)) == (precision == "bf16")
        assert DinoFolder(tmp_path / "run").run.checkpoint.exists() == (diverges_in == 1)


def test_bad_settings_are_named(dataset) -> None:
    with pytest.raises(InputError, match="does not divide local crops of 20"):
        dataclasses.replace(SMALL, crops=CropsConfig(local_size=20))
    with pytest.raises(InputError, match="do not fill one batch of 64"):
        DinoTraining(with_protocol(batch_size=64), dataset, CPU)
    shuffled = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, shuffled_tiles=4))
    with pytest.raises(InputError, match=r"takes images of one size.*--crops\.num-local 0"):
        DinoTraining(shuffled, dataset, CPU)
    with pytest.raises(InputError, match="has no patches"):
        DinoConfig(model=ModelConfig(name="compact_resnet18"))
    with pytest.raises(InputError, match="student_temperature"):
        DinoProtocol(student_temperature=0.0)


def test_reduced_precision_stays_near(dataset) -> None:
    losses = [
        DinoTraining(dataclasses.replace(SMALL, precision=precision), dataset, CPU).run_epoch(0).loss
        for precision in ("fp32", "bf16")
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_without_local_crops_any_vit_trains(dataset) -> None:
    model = dataclasses.replace(SMALL.model, shuffled_tiles=4)
    config = dataclasses.replace(SMALL, model=model, crops=CropsConfig(num_local=0))
    training = DinoTraining(config, dataset, CPU)
    before = training.network("teacher").state_dict()
    assert math.isfinite(training.run_epoch(0).loss)
    after = training.network("teacher").state_dict()
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert len(moved) > 10


@pytest.mark.parametrize("name", list(PRETRAININGS))
def test_recipes_say_their_command_and_survive_json(name: str) -> None:
    recipe = PRETRAININGS[name]
    config = recipe()
    assert f"nearsight train {name}" in (recipe.__doc__ or "")
    assert DinoConfig.from_json(json.loads(json.dumps(config.to_json())), "config.json") == config
