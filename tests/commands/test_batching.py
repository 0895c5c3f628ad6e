"""How many images go through a model at once."""

import pytest
import torch

from nearsight.commands.pictures import MOST, MOST_ON_A_CPU, batch_size_for, find_batch_size, within_memory
from nearsight.errors import InputError

MIB = 2**20


def never(num_images: int) -> None:
    raise AssertionError("on a CPU nothing has to be tried")


@pytest.mark.parametrize(
    ("image_size", "expected"), [((224, 224), 32), ((32, 32), MOST_ON_A_CPU), ((1024, 1024), 1), ((8000, 8000), 1)]
)
def test_on_a_cpu_it_follows_from_the_size_of_images(image_size: tuple[int, int], expected: int) -> None:
    assert find_batch_size(never, image_size, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("one", "two", "available", "expected"),
    [
        (400 * MIB, 410 * MIB, 1000 * MIB, 41),  # 390 for the model, 10 for each image, 800 to be used
        (400 * MIB, 410 * MIB, 100_000 * MIB, MOST),
        (400 * MIB, 410 * MIB, 300 * MIB, 1),  # it has just run with one, so one it is
        (400 * MIB, 400 * MIB, 1000 * MIB, MOST),  # images that cost nothing
    ],
)
def test_from_the_memory_of_one_and_two_images(one: int, two: int, available: int, expected: int) -> None:
    assert batch_size_for(one, two, available) == expected


def test_it_is_halved_until_it_fits() -> None:
    tried = []

    def run(batch_size: int) -> str:
        tried.append(batch_size)
        if batch_size > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "measured"

    assert within_memory(run, 70, may_shrink=True) == "measured"
    assert tried == [70, 35, 17, 8]


def test_what_does_not_fit_at_all() -> None:
    def run(batch_size: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InputError, match="one image does not fit into memory; use --device cpu"):
        within_memory(run, 4, may_shrink=True)
    with pytest.raises(InputError, match="a batch of 4 images does not fit into memory; use a smaller --batch-size"):
        within_memory(run, 4, may_shrink=False)


@pytest.mark.gpu
def test_on_a_gpu_the_found_batch_fits() -> None:
    device = torch.device("cuda")
    weights = torch.empty(64 * MIB, dtype=torch.uint8, device=device)

    def run(num_images: int) -> int:
        return len(torch.empty(num_images, 256 * MIB, dtype=torch.uint8, device=device)) + len(weights[:0])

    found = find_batch_size(run, (224, 224), device)
    free, _ = torch.cuda.mem_get_info(device)
    assert found == min(MOST, found)
    assert abs(found - min(MOST, 0.8 * (free + torch.cuda.memory_reserved(device)) / (256 * MIB))) < 3
    assert run(found) == found
