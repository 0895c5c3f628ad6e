"""Pictures on their way to a model, however long and narrow they are, and how many at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data import create_transform

from nearsight.commands.pictures import (
    MOST,
    MOST_ON_A_CPU,
    PreparedImages,
    batch_size_for,
    find_batch_size,
    find_pictures,
    within_memory,
)
from nearsight.errors import InputError


def prepared(folder: Path, **config: Any) -> torch.Tensor:
    images = PreparedImages(find_pictures(str(folder), 9, None), {"input_size": (3, 224, 224), **config})
    [batch] = images.batches(9)
    return batch


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_pictures_of_any_ordinary_shape_are_prepared_as_timm_does(tmp_path: Path, mode: str) -> None:
    config = {"input_size": (3, 64, 48), "crop_pct": 0.9, "crop_mode": mode}
    expected = []
    for number, size in enumerate([(300, 30), (30, 300), (90, 100), (2, 40)]):
        picture = Image.effect_noise(size, 90).convert("RGB")
        picture.save(tmp_path / f"{number}.png")
        expected.append(create_transform(**config, is_training=False)(picture))
    assert torch.equal(prepared(tmp_path, **config), torch.stack(expected))


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_narrow_ones_are_refused_where_they_would_become_huge_or_nothing(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("1", size).save(tmp_path / "long.png")
    with pytest.raises(InputError, match=r"long\.png cannot be read: is .* resized to 256 on its shorter side it has"):
        prepared(tmp_path, crop_pct=0.875)
    with pytest.raises(InputError, match=r"long\.png cannot be read: is .* resized to 256 on its shorter side it has"):
        prepared(tmp_path)  # whose share is timm's own
    with pytest.raises(InputError, match=r"long\.png cannot be read: height and width must be > 0"):
        prepared(tmp_path, crop_pct=1.0, crop_mode="border")
    assert prepared(tmp_path, crop_pct=1.0, crop_mode="squash").shape == (1, 3, 224, 224)


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
