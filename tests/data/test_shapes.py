"""The embedded set: a function of (seed, split, index), balanced, and not to be told apart by colour."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.data import DATASETS, load_dataset, make_shapes
from nearsight.data.dataset import ImageSet
from nearsight.data.shapes import CLASSES, OBJECTS
from nearsight.errors import InputError


def digest(images: ImageSet) -> str:
    return hashlib.sha256(images.images_NCHW.numpy().tobytes() + images.labels_N.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("image_size", "split", "seed", "expected"),
    [
        (32, "train", 0, "7c104e7b0b1eb05a"),
        (32, "test", 0, "d42baf5a30be9124"),
        (64, "train", 0, "827c2bd478b4146c"),
        (32, "train", 7, "183e83b952ba0024"),
    ],
)
def test_images_are_the_same_everywhere(image_size: int, split: str, seed: int, expected: str) -> None:
    assert digest(make_shapes(50, image_size=image_size, split=split, seed=seed)) == expected


@settings(max_examples=10, deadline=None)
@given(few=st.integers(1, 40), more=st.integers(41, 400), seed=st.integers(0, 2**40))
def test_an_image_does_not_depend_on_how_many_are_drawn(few: int, more: int, seed: int) -> None:
    short, long = make_shapes(few, seed=seed), make_shapes(more, seed=seed)
    assert torch.equal(short.images_NCHW, long.images_NCHW[:few])
    assert torch.equal(short.labels_N, long.labels_N[:few])


def test_seeds_splits_and_indices_give_different_images() -> None:
    images = torch.cat(
        [make_shapes(20, seed=seed, split=split).images_NCHW for seed in (0, 1) for split in ("train", "test")]
    )
    assert len(torch.unique(images.flatten(1), dim=0)) == 80


def test_every_prefix_is_balanced_to_within_one() -> None:
    for num in (1, 10, 33, 100):
        counts = torch.bincount(make_shapes(num).labels_N, minlength=10)
        assert int(counts.sum()) == num
        assert int(counts.max() - counts.min()) <= 1


def test_64_pixels_show_the_scenes_of_32() -> None:
    small = make_shapes(30).images_NCHW.double()
    large = torch.nn.functional.avg_pool2d(make_shapes(30, image_size=64).images_NCHW.double(), 2)
    assert float((small - large).abs().mean()) < 6  # grey levels; edges are sharper at 64
    assert float((small - large.roll(1, dims=0)).abs().mean()) > 30


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.name)
def test_every_silhouette_covers_the_area_of_the_unit_disc(kind) -> None:
    centres = (np.arange(1200) + 0.5) / 300 - 2
    x, y = np.meshgrid(centres * 1.0, centres)
    inside = kind.outside(x / kind.radius, y / kind.radius) < 0
    assert inside.sum() / 300**2 == pytest.approx(np.pi, rel=0.01)
    second_colour = (kind.texture(x / kind.radius, y / kind.radius) > 0)[inside].mean()
    assert 0.35 < second_colour < 0.65, "both colours of an object take a fair share of it"


def colour_statistics(images: ImageSet) -> torch.Tensor:
    """Per image: an 8-bin histogram of each channel, a joint 4×4×4 histogram, channel means and deviations."""
    pixels = images.images_NCHW.long().flatten(2)
    bins = torch.stack([((pixels >> 5) == level).double().mean(2) for level in range(8)], dim=2).flatten(1)
    colour = (pixels[:, 0] >> 6) * 16 + (pixels[:, 1] >> 6) * 4 + (pixels[:, 2] >> 6)
    joint = torch.zeros(len(colour), 64, dtype=torch.float64).scatter_add_(1, colour, torch.ones(colour.shape).double())
    values = pixels.double() / 255
    return torch.cat([bins, joint / colour.shape[1], values.mean(2), values.std(2)], dim=1)


def test_colours_do_not_give_the_class_away() -> None:
    """Ridge regression on colour statistics stays near the 10 % of guessing (a ViT of depth 4 learns 80 %)."""
    train, test = make_shapes(3000), make_shapes(2000, split="test")
    features, held_out = colour_statistics(train), colour_statistics(test)
    mean, std = features.mean(0), features.std(0) + 1e-6
    design, query = (torch.nn.functional.pad((f - mean) / std, (0, 1), value=1.0) for f in (features, held_out))
    targets = torch.nn.functional.one_hot(train.labels_N, 10).double()
    weights = torch.linalg.solve(design.T @ design + 10 * torch.eye(design.shape[1]).double(), design.T @ targets)
    accuracy = float(((query @ weights).argmax(1) == test.labels_N).double().mean())
    assert accuracy < 0.15


def test_position_does_not_give_the_class_away() -> None:
    """Where the image varies most (its object) is spread alike for every class."""
    images = make_shapes(2000)
    grey = images.images_NCHW.double().mean(1)
    rough = (grey[:, 1:, 1:] - grey[:, :-1, :-1]).abs()
    row = (rough.sum(2) * torch.arange(31)).sum(1) / rough.sum((1, 2))
    means = torch.stack([row[images.labels_N == label].mean() for label in range(10)])
    assert float(means.std()) < 0.1 * float(row.std()) + row.std() / 200**0.5 * 2


def test_the_registry_line_tells_the_truth() -> None:
    spec, dataset = DATASETS["shapes"], load_dataset("shapes", num_train=2000, num_test=100)
    values = dataset.train.images_NCHW.double() / 255
    assert dataset.classes == CLASSES
    assert dataset.num_classes == spec.num_classes == 10
    assert values.mean((0, 2, 3)).tolist() == pytest.approx(spec.mean, abs=0.01)
    assert values.std((0, 2, 3)).tolist() == pytest.approx(spec.std, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images": 0}, "at least 1"),
        ({"num_images": 5, "image_size": 48}, "32 or 64"),
        ({"num_images": 5, "split": "trian"}, "did you mean 'train'"),
    ],
)
def test_bad_input(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_shapes(**arguments)
