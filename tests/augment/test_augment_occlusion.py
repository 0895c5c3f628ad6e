"""CutOut and random erasing against their written-out definitions."""

import math

import pytest
import torch

from nearsight.augment import CutOut, RandomErasing
from nearsight.errors import InputError

MEAN = torch.tensor((0.5071, 0.4865, 0.4409)) * 255
STD = torch.tensor((0.2673, 0.2564, 0.2762)) * 255
NO_TARGETS = torch.ones(1, 1, 1)


def test_cutout_is_the_papers_square(make_draws, make_images, apply_one):
    """DeVries & Taylor's code: centre on any pixel, `length // 2` each way, clipped; zero after normalising."""
    num, height, width = 400, 20, 24
    images = make_images(num, height, width).expand(2, -1, -1, -1, -1)
    draws = make_draws(2, num)
    settings = [CutOut(size=8), CutOut(size=5, p=0.5)]
    result = apply_one(settings, images, NO_TARGETS, draws).images_KBCHW
    hits = 0
    for cell, setting in enumerate(settings):
        coin, row, column = draws.per_sample("cutout", 3)[cell].unbind(-1)
        for i in range(num):
            expected = images[cell, i].float()
            if coin[i] < setting.p:
                y, x, half = int(row[i] * height), int(column[i] * width), setting.size // 2
                top, bottom = max(0, y - half), min(height, y + half)
                left, right = max(0, x - half), min(width, x + half)
                expected[:, top:bottom, left:right] = MEAN[:, None, None]
                hits += 1
            assert torch.equal(result[cell, i], expected)
    assert 550 < hits < 650


def rectangle(mask):
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    assert mask.sum() == len(rows) * len(columns)
    return int(rows[0]), int(columns[0]), len(rows), len(columns)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_erasing(make_draws, make_images, apply_one, noise):
    num, height, width = 2_000, 32, 40
    images = make_images(num, height, width).unsqueeze(0)
    setting = RandomErasing(p=0.6, min_area=0.1, max_area=0.3, min_ratio=0.5, max_ratio=2.0, noise=noise)
    result = apply_one([setting], images, NO_TARGETS, make_draws(1, num)).images_KBCHW[0]
    erased = (result != images[0]).all(1)
    where = erased.flatten(1).any(1)
    assert abs(float(where.float().mean()) - 0.6) < 5 * math.sqrt(0.24 / num)
    boxes = torch.tensor([rectangle(mask) for mask in erased[where]]).double()
    top, left, rows, columns = boxes.unbind(1)
    area, ratio = rows * columns / (height * width), (rows / columns).log2()
    assert ((area > 0.085) & (area < 0.315)).all()
    assert abs(float(area.mean()) - 0.2) < 0.006
    assert (ratio.abs() < 1.15).all()
    assert abs(float(ratio.mean())) < 0.06
    assert abs(float((top / (height - rows)).mean()) - 0.5) < 0.03
    assert abs(float((left / (width - columns)).mean()) - 0.5) < 0.03
    filled = (result.permute(0, 2, 3, 1)[erased] - MEAN) / STD
    assert filled.mean().abs() < 0.01
    assert abs(float(filled.std()) - noise) < 0.01
    assert torch.equal(result[~where], images[0][~where].float())


def test_noise_differs_between_cells_and_samples(make_draws, make_images, apply_one):
    images = make_images(20).expand(2, -1, -1, -1, -1)
    cells = [RandomErasing(p=1.0, noise=1.0), RandomErasing(p=1.0, noise=0.0)]
    result = apply_one(cells, images, NO_TARGETS, make_draws(2, 20)).images_KBCHW
    assert (result[0] != result[0].round()).flatten(1).any(1).all()
    filled = (result[1] != images[1]).all(1)
    assert torch.allclose(result[1].permute(0, 2, 3, 1)[filled], MEAN)


def test_erased_rectangles_are_torchvisions(make_draws, make_images, apply_one):
    """torchvision's loop of ten tries, written out, on images and aspect ratios that are not symmetric."""
    num, height, width = 500, 12, 30
    images = make_images(num, height, width).unsqueeze(0)
    draws = make_draws(1, num)
    setting = RandomErasing(p=1.0, min_area=0.3, max_area=1.0, min_ratio=0.2, max_ratio=3.0, noise=0.0)
    result = apply_one([setting], images, NO_TARGETS, draws).images_KBCHW[0]
    _, place_row, place_column, *tries = draws.per_sample("erasing", 23)[0].double().unbind(-1)
    missed = 0
    for i in range(num):
        expected = images[0, i].float()
        for area_draw, ratio_draw in zip(tries[:10], tries[10:], strict=True):
            area = (0.3 + float(area_draw[i]) * 0.7) * height * width
            ratio = math.exp(math.log(0.2) + float(ratio_draw[i]) * (math.log(3.0) - math.log(0.2)))
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if h < height and w < width:
                top, left = int(place_row[i] * (height - h + 1)), int(place_column[i] * (width - w + 1))
                expected[:, top : top + h, left : left + w] = MEAN[:, None, None]
                break
        else:
            missed += 1
        assert torch.equal(result[i], expected), i
    assert 0 < missed < 250


def test_bad_settings():
    with pytest.raises(InputError, match=r"cutout.size"):
        CutOut(size=0)
    with pytest.raises(InputError, match=r"erasing has areas"):
        RandomErasing(max_area=1.5)
    with pytest.raises(InputError, match=r"erasing.noise"):
        RandomErasing(noise=-1.0)
