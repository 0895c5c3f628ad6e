"""Distillation: what the teacher says is what is learned, and teachers that do not fit are refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model, save_model
from nearsight.models.sources import SourcedModel
from nearsight.train import DataConfig, RunConfig, RunFolder, baseline, step, train_run
from nearsight.train.dino import CropsConfig, DinoConfig, DinoFolder
from nearsight.train.engine import Stack, initial_model
from nearsight.train.step import Teacher

CPU = torch.device("cpu")


def config(**changes: object) -> RunConfig:
    protocol = dataclasses.replace(baseline(), batch_size=16, max_epochs=1, warmup_epochs=0, lr=1e-2, augment=())
    return RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=dataclasses.replace(protocol, **changes),
        num_measured=20,
    )


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=100, num_test=20)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder."""
    folder: RunFolder = train_run(config(), tmp_path_factory.mktemp("runs") / "teacher")
    return folder.path


def test_the_first_loss_is_the_divergence_plus_the_teachers_entropy(taught: Path, dataset: Dataset) -> None:
    pupil = config(teacher=str(taught))
    stack = Stack.start([pupil], dataset, CPU)
    losses: list[float] = []
    stack.run_epoch(lambda _: losses.append(float(stack.losses_so_far)))
    model, teaching = initial_model(pupil, dataset).eval(), load_model(taught / "model.safetensors")
    index = Stack.start([pupil], dataset, CPU)._epoch().index_SKB[0, 0]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    images = (dataset.train.images_NCHW[index].float() / 255 - mean) / std
    with torch.no_grad():
        wanted, given = F.log_softmax(teaching(images), -1), F.log_softmax(model(images), -1)
    divergence = F.kl_div(given, wanted, reduction="batchmean", log_target=True)
    entropy = -(wanted.exp() * wanted).sum(-1).mean()
    assert losses[0] == pytest.approx(float(divergence + entropy), abs=1e-5)


def test_labels_do_not_matter(taught: Path, dataset: Dataset) -> None:
    """The pupil's weights are the same if every training image has another label, up to which are held out."""
    shuffled = dataset.train.labels_N.clone()
    pupil = config(teacher=str(taught))
    stack = Stack.start([pupil], dataset, CPU)
    changed = dataclasses.replace(
        dataset, train=dataclasses.replace(dataset.train, labels_N=(shuffled + 1) % dataset.num_classes)
    )
    other = Stack.start([pupil], changed, CPU)
    other.training_N, other.validation_N = stack.training_N, stack.validation_N
    stack.run_epoch()
    other.run_epoch()
    assert torch.equal(stack.optimizer.weights_KP, other.optimizer.weights_KP)
    by_labels = Stack.start([config()], dataset, CPU)
    by_labels.run_epoch()
    assert not torch.allclose(by_labels.optimizer.weights_KP, stack.optimizer.weights_KP, atol=1e-3)


def test_it_sees_images_as_it_was_taught_to(monkeypatch: pytest.MonkeyPatch, dataset: Dataset) -> None:
    """A model from elsewhere normalises otherwise than the data set."""
    seen: list[torch.Tensor] = []

    class Watching(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images.flatten(1)[:, : dataset.num_classes]

    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "input_size": (3, 32, 32)}
    sourced = SourcedModel(label="x", model=Watching(), data_config=settings)
    monkeypatch.setattr(step, "load_source", lambda name, pretrained: sourced)
    loaded = Teacher.load("some_vit", dataset, CPU)
    grey = torch.rand(2, 5, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    answer = loaded((grey - mean) / std)
    own_mean, own_std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(seen[-1].view(grey.shape), (grey - own_mean) / own_std, rtol=1e-5, atol=1e-5)
    assert answer.shape == (2, 5, dataset.num_classes)
    torch.testing.assert_close(answer.sum(-1), torch.ones(2, 5))


def test_teachers_that_do_not_fit_are_refused(taught: Path, tmp_path: Path, dataset: Dataset) -> None:
    with pytest.raises(InputError, match="teacher is empty"):  # and not a run that learns labels
        config(teacher="")
    with pytest.raises(InputError, match="'vit_tny' is not a model timm knows"):
        Stack.start([config(teacher="vit_tny")], dataset, CPU)
    with pytest.raises(InputError, match="not a complete run folder"):
        Stack.start([config(teacher=str(tmp_path))], dataset, CPU)
    small = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8)
    (tmp_path / "config.json").write_text((taught / "config.json").read_text())
    for side, classes, message in ((32, 7, "knows 7 classes, but shapes has 10"), (64, 10, "does not take images of")):
        model = small.build((side, side), classes)
        save_model(tmp_path / "model.safetensors", model.state_dict(), small, (side, side), classes)
        with pytest.raises(InputError, match=message):
            Stack.start([config(teacher=str(tmp_path))], dataset, CPU)


def test_models_without_classes_are_no_teachers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Dataset
) -> None:
    """Though as many features as there are classes would pass for these."""
    wide = ModelConfig(depth=1, width=dataset.num_classes, num_heads=2, mlp_width=16, patch_size=8)
    backbone = wide.build(dataset.image_size, 0)
    DinoFolder(tmp_path / "dino").claim(DinoConfig(model=wide, crops=CropsConfig(num_local=0)))
    save_model(tmp_path / "dino" / "model.safetensors", backbone.state_dict(), wide, dataset.image_size, 0)
    with pytest.raises(InputError, match="was pretrained without labels and has no classes"):
        Stack.start([config(teacher=str(tmp_path / "dino"))], dataset, CPU)
    sourced = SourcedModel(label="x", model=backbone, data_config={"mean": (0.5,) * 3, "std": (0.5,) * 3})
    monkeypatch.setattr(step, "load_source", lambda name, pretrained: sourced)
    with pytest.raises(InputError, match="teacher some_vit has no classifier"):
        Teacher.load("some_vit", dataset, CPU)


def test_pupils_of_different_teachers_are_no_stack(taught: Path) -> None:
    assert config(teacher=str(taught)).stack_key != config().stack_key
