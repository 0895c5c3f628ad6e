"""What the teacher's output tells about images: nothing of it comes from the teacher's own way."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from nearsight.data import Dataset, load_dataset
from nearsight.models import ModelConfig
from nearsight.train.dino import (
    COLLAPSED_BELOW,
    CropsConfig,
    DinoConfig,
    DinoProtocol,
    DinoTraining,
    ImagesConfig,
    training,
)

CONFIG = DinoConfig(
    model=ModelConfig(patch_size=8, depth=2, width=16, num_heads=2, mlp_width=16),
    data=ImagesConfig(name="shapes", num_train=48, num_test=10),
    crops=CropsConfig(num_local=2, local_size=16, jitter_p=0.0, solarize_second_p=0.0),
    protocol=DinoProtocol(
        epochs=3,
        batch_size=8,
        lr=0.02,
        warmup_epochs=0,
        momentum=0.5,
        centre_momentum=0.3,
        num_prototypes=12,
        hidden=16,
        bottleneck=8,
    ),
)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=48, num_test=10)


def plain_entropy(distribution: Tensor) -> float:
    return -sum(p * math.log(p) for p in distribution.tolist() if p > 0)


def test_it_is_that_of_the_batches(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Tensor] = []

    def noting(*arguments: Tensor) -> Tensor:
        said.append(teacher_distributions(*arguments))
        return said[-1]

    teacher_distributions = training.teacher_distributions
    monkeypatch.setattr(training, "teacher_distributions", noting)
    result = DinoTraining(CONFIG, dataset, torch.device("cpu")).run_epoch(0)
    batches = [batch.double().flatten(0, 1) for batch in said]
    assert len(batches) == 6
    of_each = [sum(map(plain_entropy, batch)) / len(batch) for batch in batches]
    of_mean = [plain_entropy(batch.mean(0)) for batch in batches]
    assert result.teacher_entropy == pytest.approx(sum(of_each) / 6, rel=1e-5)
    assert result.information == pytest.approx((sum(of_mean) - sum(of_each)) / 6, rel=1e-4)
    assert 0 < result.information < math.log(16)
    used = math.exp(plain_entropy(torch.cat(batches).mean(0)))
    assert result.prototypes_used == pytest.approx(used, rel=1e-6)


def test_images_that_are_all_the_same_tell_nothing(dataset: Dataset) -> None:
    """However far teacher and centre go meanwhile: the mean over an epoch would take that for knowledge."""
    grey = torch.full_like(dataset.train.images_NCHW, 128)
    alike = dataclasses.replace(dataset, train=dataclasses.replace(dataset.train, images_NCHW=grey))
    training = DinoTraining(CONFIG, alike, torch.device("cpu"))
    results = [training.run_epoch(epoch) for epoch in range(3)]
    assert max(abs(result.information) for result in results) < 1e-5
    over_epochs = [math.log(result.prototypes_used) - result.teacher_entropy for result in results]
    assert min(over_epochs) > 2 * COLLAPSED_BELOW
