"""The augmentation benchmark runs both libraries and reports what it measured. Speed itself is not tested."""

import math

import pytest
import torch

from nearsight.bench import augment, ordinary
from nearsight.commands import bench as command
from nearsight.errors import InputError


@pytest.fixture(scope="module")
def rows():
    return augment.bench_augment(device="cpu", num_images=96, batch_size=16, seconds=0.1, num_cells=(1, 2))


def test_rows(rows):
    assert [(row.what, row.num_cells) for row in rows] == [
        ("torchvision PIL", 1),
        ("torchvision tensors", 1),
        ("nearsight eager", 1),
        ("nearsight eager", 2),
    ]
    fastest = max(row.images_per_second for row in rows[:2])
    for row in rows:
        assert row.images_per_second > 0
        assert row.ratio == pytest.approx(row.images_per_second / fastest)
    assert rows[0].extra_bytes is None
    assert all(row.extra_bytes is None or row.extra_bytes >= 0 for row in rows[2:])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_images": 100}, "num_images is 100, but one batch needs 128"),
        ({"num_images": 0}, "num_images is 0"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"batch_size": -3}, "batch_size is -3"),
        ({"seconds": 0.0}, "seconds is 0.0, but must be greater than 0"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"seconds": math.inf}, "seconds is inf, but must be finite"),
        ({"num_cells": (1, 0)}, "num_cells is 0"),
        ({"num_cells": ()}, "num_cells is empty"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        augment.bench_augment(device="cpu", **given)


def test_a_moment_is_long_enough_for_a_step():
    assert augment._speed((None for _ in range(4)), 16, 1e-12, "cpu") > 0  # three to warm up


def test_both_sides_see_the_same_work():
    """One step of each: normalised float images of the same scale, and targets that sum to 1."""
    images = ordinary.picture_like_images(64)
    labels = torch.arange(64) % 10
    for kind in ("PIL", "tensors"):
        batches = ordinary.torchvision_loader(
            images, labels, kind, batch_size=16, num_classes=10, mean=(0.5,) * 3, std=(0.25,) * 3, num_workers=0
        )
        batch, targets = next(iter(batches))
        assert batch.shape == (16, 3, 32, 32)
        assert batch.dtype == torch.float32
        assert batch.abs().max() <= 2.0001
        assert targets.shape in {(16,), (16, 10)}


def test_pictures_are_not_noise():
    images = ordinary.picture_like_images(20).float()
    neighbour = (images[..., 1:] - images[..., :-1]).abs().mean()
    assert neighbour < 0.4 * images.std()


def test_command(monkeypatch, capsys, rows):
    given = {}
    monkeypatch.setattr(augment, "bench_augment", lambda **options: given.update(options) or rows)
    assert command.main(["augment", "--device", "cpu", "--num-cells", "1", "2"]) == 0
    assert given == {"device": "cpu", "num_images": 10_000, "batch_size": 128, "seconds": 5.0, "num_cells": (1, 2)}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rows)
    assert printed[0].split() == ["what", "K", "B", "images/s", "ratio", "extra", "MB"]
    assert "torchvision PIL" in printed[1]
