"""Blur, grey and solarisation against torchvision."""

import math

import pytest
import torch
import torchvision.transforms.v2.functional as reference

from nearsight.augment import GaussianBlur, RandomGrey, Solarize
from nearsight.errors import InputError

NO_TARGETS = torch.ones(1, 1, 1)


def test_blur_is_torchvisions_at_the_drawn_width(make_draws, make_images, apply_one, stacked_draws):
    num = 60
    settings = [GaussianBlur(p=1.0), GaussianBlur(p=0.5, min_sigma=0.5, max_sigma=1.0), None]
    images = make_images(num, 20, 26).unsqueeze(0).expand(3, -1, -1, -1, -1)
    result = apply_one(settings, images, NO_TARGETS, make_draws(3, num)).images_KBCHW
    assert torch.equal(result[2], images[2])
    stacked, drawn = stacked_draws([GaussianBlur(p=1.0), settings[1], GaussianBlur(p=0.0)], num)
    blurred, sigma_KB = GaussianBlur.draw(stacked, drawn)
    for cell in (0, 1):
        kernel = 2 * math.ceil(4 * settings[cell].max_sigma) + 1
        for before, after, sigma, touched in zip(
            images[cell], result[cell], sigma_KB[cell], blurred[cell, :, 0, 0, 0], strict=True
        ):
            expected = reference.gaussian_blur(before, [kernel, kernel], [float(sigma)] * 2) if touched else before
            # Sums in another order may fall on the other side of a half.
            assert (after.int() - expected.int()).abs().max() <= 1
            assert (after != expected).float().mean() < 0.01
    assert 0.1 <= sigma_KB[0].min() < 0.3
    assert 1.7 < sigma_KB[0].max() <= 2.0
    assert 15 < blurred[1].sum() < 45


def test_blur_of_images_smaller_than_its_kernel_keeps_one_colour(make_draws, apply_one):
    images = torch.full((1, 2, 3, 4, 1), 77, dtype=torch.uint8)
    assert torch.equal(apply_one([GaussianBlur(p=1.0)], images, NO_TARGETS, make_draws(1, 2)).images_KBCHW, images)


@pytest.mark.parametrize(
    ("always", "sometimes", "expected"),
    [
        (RandomGrey(p=1.0), RandomGrey(p=0.3), lambda images: reference.rgb_to_grayscale(images, 3)),
        (Solarize(p=1.0), Solarize(p=0.3), lambda images: reference.solarize(images, 128)),
        (Solarize(p=1.0, threshold=40), Solarize(p=0.3, threshold=40), lambda images: reference.solarize(images, 40)),
    ],
)
def test_grey_and_solarisation_are_torchvisions(make_draws, make_images, apply_one, always, sometimes, expected):
    num = 400
    images = make_images(num, 9, 7).unsqueeze(0).expand(3, -1, -1, -1, -1)
    result = apply_one([always, sometimes, None], images, NO_TARGETS, make_draws(3, num)).images_KBCHW
    changed = expected(images[0])
    assert torch.equal(result[0], changed)
    assert torch.equal(result[2], images[2])
    touched = (result[1] != images[1]).flatten(1).any(1)
    assert torch.equal(result[1], torch.where(touched[:, None, None, None], changed, images[1]))
    could_change = (changed != images[0]).flatten(1).any(1).sum()
    assert 0.2 < touched.sum() / could_change < 0.4


def test_bad_settings_are_named():
    with pytest.raises(InputError, match=r"blur\.max_sigma is 0\.5"):
        GaussianBlur(min_sigma=1.0, max_sigma=0.5)
    with pytest.raises(InputError, match=r"blur\.min_sigma"):
        GaussianBlur(min_sigma=0.0)
