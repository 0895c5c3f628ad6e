"""Pictures on their way to a model, however long and narrow they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data import create_transform

from nearsight.commands.pictures import PreparedImages, find_pictures
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
