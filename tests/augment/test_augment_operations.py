"""Every operation, image by image, against torchvision's on uint8 tensors with the same parameters."""

import pytest
import torch
import torchvision.transforms.v2.functional as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import AutoAugment

from nearsight.augment.operations import Operation, apply_operations, everything_and_select, only_what_is_needed
from nearsight.augment.pixels import solarize_add_table

BLACK = torch.zeros(3, dtype=torch.uint8)
NAMES = {
    Operation.IDENTITY: "Identity",
    Operation.SHEAR_X: "ShearX",
    Operation.SHEAR_Y: "ShearY",
    Operation.TRANSLATE_X: "TranslateX",
    Operation.TRANSLATE_Y: "TranslateY",
    Operation.ROTATE: "Rotate",
    Operation.BRIGHTNESS: "Brightness",
    Operation.COLOR: "Color",
    Operation.CONTRAST: "Contrast",
    Operation.SHARPNESS: "Sharpness",
    Operation.POSTERIZE: "Posterize",
    Operation.SOLARIZE: "Solarize",
    Operation.AUTOCONTRAST: "AutoContrast",
    Operation.EQUALIZE: "Equalize",
    Operation.INVERT: "Invert",
}
WITHIN_ONE_LEVEL = {Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS, Operation.HUE}
"""Blends of floats, cut to whole levels: the last bit of a sum can decide the level. All others must be exact."""
WIDEST = {
    Operation.SHEAR_X: 0.99,
    Operation.SHEAR_Y: 0.99,
    Operation.TRANSLATE_X: 40.0,
    Operation.TRANSLATE_Y: 40.0,
    Operation.ROTATE: 180.0,
    Operation.HUE: 0.5,
}


def by_torchvision(image: Tensor, operation: Operation, magnitude: float) -> Tensor:
    if operation == Operation.HUE:
        return reference.adjust_hue(image, magnitude)
    policy = AutoAugment()
    return policy._apply_image_or_video_transform(image, NAMES[operation], magnitude, "nearest", policy._fill)


def random_magnitudes(operation: Operation, num: int) -> Tensor:
    share = torch.rand(num, generator=torch.Generator().manual_seed(int(operation))) * 2 - 1
    if operation == Operation.POSTERIZE:
        return (share.abs() * 8.99).floor()
    if operation == Operation.SOLARIZE:
        return share.abs()
    return share * WIDEST.get(operation, 0.99)


def assert_as_torchvision(result: Tensor, images: Tensor, operation: Operation, magnitudes: Tensor) -> None:
    expected = torch.stack([by_torchvision(x, operation, m) for x, m in zip(images, magnitudes.tolist(), strict=True)])
    difference = (result.int() - expected.int()).abs()
    if operation in WITHIN_ONE_LEVEL:
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 1e-4
    else:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("size", [(32, 32), (31, 40), (64, 48)])
@pytest.mark.parametrize("operation", [*NAMES, Operation.HUE], ids=lambda operation: operation.name)
def test_as_torchvision(make_images, operation, size):
    images = make_images(60, *size)
    magnitudes = random_magnitudes(operation, len(images))
    chosen = torch.full((len(images),), int(operation))
    result = apply_operations(images, chosen, magnitudes, BLACK, frozenset(Operation))
    assert_as_torchvision(result, images, operation, magnitudes)
    if operation != Operation.IDENTITY:
        assert not torch.equal(result, images), "the operation did nothing, so the comparison shows nothing"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    operation=st.sampled_from([*NAMES, Operation.HUE]),
    share=st.floats(-1, 1, width=32),
    seed=st.integers(0, 2**31),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    levels=st.integers(1, 256),
)
def test_any_image(operation, share, seed, height, width, levels):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, levels, (1, 3, height, width), generator=generator).to(torch.uint8)
    magnitude = torch.tensor([share * WIDEST.get(operation, 0.99)])
    if operation == Operation.POSTERIZE:
        magnitude = (magnitude.abs() * 8).round()
    if operation == Operation.SOLARIZE:
        magnitude = magnitude.abs()
    result = only_what_is_needed(image, torch.tensor([int(operation)]), magnitude, BLACK)
    expected = by_torchvision(image[0], operation, float(magnitude))
    difference = (result[0].int() - expected.int()).abs()
    assert difference.max() <= (operation in WITHIN_ONE_LEVEL)


@pytest.mark.parametrize("size", [(32, 32), (33, 45)])
@pytest.mark.parametrize(
    ("operation", "strongest"),
    [(Operation.SHEAR_X, 0.3), (Operation.SHEAR_Y, 0.99), (Operation.ROTATE, 30.0), (Operation.ROTATE, 135.0)],
)
def test_bins_of_the_policies(make_images, operation, strongest, size):
    """Round magnitudes put source positions exactly between pixels, where the last bit of the sum decides."""
    magnitudes = torch.cat((torch.linspace(0, strongest, 31), -torch.linspace(0, strongest, 31)))
    images = make_images(1, *size).expand(len(magnitudes), -1, -1, -1)
    result = only_what_is_needed(images, torch.full((len(images),), int(operation)), magnitudes, BLACK)
    assert_as_torchvision(result, images, operation, magnitudes)


@pytest.mark.parametrize("channels", [1, 3])
def test_both_ways_agree_bit_for_bit(make_images, channels):
    images = make_images(170, 24, 20, channels)
    generator = torch.Generator().manual_seed(1)
    operation = torch.arange(len(images)) % len(Operation)
    magnitude = torch.empty(len(images))
    for each in Operation:
        here = operation == each
        magnitude[here] = random_magnitudes(each, int(here.sum()))
    shuffled = torch.randperm(len(images), generator=generator)
    arguments = (images, operation[shuffled], magnitude[shuffled], BLACK[:channels] + 77)
    sparse = only_what_is_needed(*arguments)
    dense = everything_and_select(*arguments, frozenset(Operation))
    assert torch.equal(sparse, dense)
    assert (sparse != images).flatten(1).any(1).float().mean() > 0.6


def test_operations_that_cannot_occur_are_left_out(make_images):
    images = make_images(10)
    operation = torch.tensor([int(Operation.INVERT), int(Operation.IDENTITY)] * 5)
    arguments = (images, operation, torch.zeros(10), BLACK)
    only = everything_and_select(*arguments, frozenset({Operation.INVERT, Operation.IDENTITY}))
    assert torch.equal(only, everything_and_select(*arguments, frozenset(Operation)))
    assert torch.equal(only[::2], 255 - images[::2])
    assert torch.equal(only[1::2], images[1::2])


@pytest.mark.parametrize("degrees", [90.0, 180.0, 270.0, -90.0, 45.0, 135.0])
def test_right_angles(make_images, degrees):
    images = make_images(5)
    result = only_what_is_needed(images, torch.full((5,), int(Operation.ROTATE)), torch.full((5,), degrees), BLACK)
    assert torch.equal(result, reference.rotate(images, degrees))


def test_fill_is_what_torchvision_fills(make_images):
    images = make_images(5)
    fill = torch.tensor([10, 200, 77], dtype=torch.uint8)
    result = only_what_is_needed(images, torch.full((5,), int(Operation.ROTATE)), torch.full((5,), 20.0), fill)
    assert torch.equal(result, reference.rotate(images, 20.0, fill=[10.0, 200.0, 77.0]))


@pytest.mark.parametrize("operation", [Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS, Operation.EQUALIZE])
def test_grey_images(make_images, operation):
    images = make_images(20, channels=1)
    magnitudes = random_magnitudes(operation, 20)
    result = only_what_is_needed(images, torch.full((20,), int(operation)), magnitudes, BLACK[:1])
    expected = torch.stack([by_torchvision(x, operation, m) for x, m in zip(images, magnitudes.tolist(), strict=True)])
    assert (result.int() - expected.int()).abs().max() <= 1


def test_solarize_add_as_written_out():
    amount = torch.tensor([0.0, 37.0, 110.0, 128.0])
    table = solarize_add_table(amount)[:, 0]
    expected = [[min(255, i + int(a)) if i < 128 else i for i in range(256)] for a in amount.tolist()]
    assert table.tolist() == expected
