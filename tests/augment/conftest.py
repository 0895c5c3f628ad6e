"""Pictures, draws and a χ² test for the augmentation tests."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from nearsight.augment import Augmentation, Batch
from nearsight.augment.base import Cells
from nearsight.augment.streams import Drawn
from nearsight.randomness import Draws

MEAN = (0.5071, 0.4865, 0.4409)
STD = (0.2673, 0.2564, 0.2762)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and a busy machine makes threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_draws() -> Callable[..., Draws]:
    def make(num_cells: int, num_samples: int, *, seed: int = 0, epoch: int = 3, step: int = 5) -> Draws:
        index_B = (torch.arange(num_samples) * 7919) % 1_000_003
        return Draws(
            torch.arange(num_cells) + seed, torch.tensor(epoch), torch.tensor(step), index_B.expand(num_cells, -1)
        )

    return make


@pytest.fixture
def make_images() -> Callable[..., Tensor]:
    """uint8 images of several kinds: noise, dark noise, smooth, few levels, one colour."""

    def make(num: int, height: int = 32, width: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, (num, channels, height, width), generator=generator).float()
        dark = noise * torch.rand(num, 1, 1, 1, generator=generator)
        smooth = torch.nn.functional.avg_pool2d(noise, 5, 1, 2)
        few = (noise / 64).floor() * 64
        flat = noise[..., :1, :1].expand_as(noise)
        kind = torch.arange(num) % 5
        picked = torch.stack((noise, dark, smooth, few, flat))[kind, torch.arange(num)]
        return picked.to(torch.uint8)

    return make


@pytest.fixture
def apply_one() -> Callable[..., Batch]:
    """One augmentation, given as one object (or None) per cell, applied to a batch."""

    def apply(cells: Sequence[Augmentation | None], images: Tensor, targets: Tensor, draws: Draws) -> Batch:
        kind = next(type(cell) for cell in cells if cell is not None)
        stacked = kind.stack(cells, torch.device("cpu"))
        batch = Batch(images, targets, torch.tensor(MEAN) * 255, torch.tensor(STD) * 255)
        return kind.apply(batch, stacked, drawn_for(kind, stacked, images.shape[-3:], draws))

    return apply


def drawn_for(kind: type[Augmentation], cells: Cells, image_shape: torch.Size, draws: Draws) -> Drawn:
    return Drawn.of(draws, kind.sample_draws(cells, image_shape), kind.batch_draws(cells))


@pytest.fixture
def stacked_draws(make_draws) -> Callable[..., tuple[Cells, Drawn]]:
    """The stacked settings and the draws of an augmentation for many samples."""

    def make(cells: Sequence[Augmentation], num_samples: int, height: int = 32, width: int = 32) -> tuple[Cells, Drawn]:
        kind = type(cells[0])
        stacked = kind.stack(cells, torch.device("cpu"))
        draws = make_draws(len(cells), num_samples)
        return stacked, drawn_for(kind, stacked, torch.Size((3, height, width)), draws)

    return make


@pytest.fixture
def chi_square_p() -> Callable[[Tensor, Tensor], float]:
    """p-value of observed counts against expected counts."""

    def p_value(observed: Tensor, expected: Tensor) -> float:
        observed, expected = observed.double(), expected.double()
        assert expected.min() >= 5, "the χ² approximation needs larger expected counts"
        assert torch.isclose(observed.sum(), expected.sum()), "some draws fell outside the expected outcomes"
        statistic = ((observed - expected) ** 2 / expected).sum()
        freedom = torch.tensor(float(len(expected) - 1), dtype=torch.float64)
        return float(torch.special.gammaincc(freedom / 2, statistic / 2))

    return p_value
