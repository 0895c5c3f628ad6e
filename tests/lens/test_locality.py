"""Attention made local by inducers, against maps written out in float64 (`local_attention`)."""

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import changed_attention
import pytest
import torch
from changed_attention import FAMILIES, Family, Places, grid, huggingface, output_of, swin
from local_attention import Extent, local_by_hand, unsettle_inducers
from torch import Tensor, nn

from nearsight import add_locality, remove_locality
from nearsight.lens.induced import Locality

INDUCERS: dict[str, dict[str, Any]] = {
    "gaug": {},
    "alibi2d": {},
    "gaussian": {"width": 1.3},
    "relpos": {},
    "neighborhood": {"radius": 2.0},
    "gpsa": {"strength": 0.4},
    "lsa": {},
    "entmax15": {},
}
_NAMES = (
    *("vit", "vit-unfused", "registers", "eva", "swin", "pvt", "torchvision", "encoder-layers-norm-first"),
    *("hf-ViT-sdpa", "hf-ViT-eager", "hf-Beit-sdpa", "hf-Dinov2WithRegisters-sdpa"),
)
QUICK = {(family, "relpos") for family in _NAMES} | {(family, one) for family in ("vit", "swin") for one in INDUCERS}
QUICK |= {("pvt", "gaug"), ("torchvision", "gaug"), ("hf-ViT-eager", "entmax15"), ("vit-unfused", "gaug")}
CASES = [
    pytest.param(family, one, marks=() if (family, one) in QUICK else pytest.mark.slow)
    for family in _NAMES
    for one in INDUCERS
]


def extent(name: str) -> Extent:
    if name == "swin":
        return lambda _: (4, 4)
    if name == "pvt":
        return lambda layer: (16 >> layer, 16 >> layer)
    height, width = FAMILIES[name].image_size
    return lambda _: (height // 8, width // 8)


def made(name: str, one: str, known: Family | None = None) -> tuple[Family, nn.Module]:
    """With inducers by the lens's tap, and anything for what they learn."""
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    family = dataclasses.replace(known or FAMILIES[name], gain=4.0)
    settings = {"radius": 9.0} if (name, one) == ("pvt", "neighborhood") else {}  # its keys are pooled from 8×8 patches
    model = family.model()
    layers = [site for site, module in model.named_modules() if is_owner(family, module)] if one == "gaug" else None
    torch.manual_seed(3)
    add_locality(model, one, layers=layers, image_size=family.image_size, **{**INDUCERS[one], **settings})
    model.double()
    unsettle_inducers(model)
    return family, model


def is_owner(family: Family, module: nn.Module) -> bool:
    """Whether it is what computes an attention, as the lens names it."""
    if isinstance(module, nn.TransformerEncoderLayer) or not (
        family.is_attention(module) or isinstance(module, nn.MultiheadAttention)
    ):
        return False
    return not any(part is not module and family.is_attention(part) for part in module.modules())


def gradients(output: Tensor, images: Tensor, model: nn.Module) -> list[Tensor]:
    weights = [weight for name, weight in model.named_parameters() if ".locality." in name]
    toward = torch.randn(output.shape, generator=torch.Generator().manual_seed(11)).to(output)
    return list(torch.autograd.grad((output * toward).sum(), [images, *weights]))


def assert_same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = max(float(expected.detach().abs().max()), 1e-9)
    assert float((found - expected).detach().abs().max()) <= tolerance * scale


# Exactness


@pytest.mark.parametrize(("name", "one"), CASES)
def test_outputs_and_gradients_are_those_of_maps_written_by_hand(name: str, one: str) -> None:
    family, model = made(name, one)
    config = next(part for part in model.modules() if isinstance(part, Locality)).inducers[0].config
    images = family.images().requires_grad_()
    scales_first = name in ("vit-unfused", "swin")
    with local_by_hand(family, model, config, extent(name), extent(name), scales_first=scales_first):
        expected = output_of(model(images))
        expected_gradients = gradients(expected, images, model)
    found = output_of(model(images))
    assert_same(found, expected, 10 * family.tolerance)
    for ours, theirs in zip(gradients(found, images, model), expected_gradients, strict=True):
        assert_same(ours, theirs, 1e3 * family.tolerance)
    remove_locality(model)
    plain, expected = output_of(model(images)).detach(), expected.detach()
    assert float((plain - expected).abs().max()) > 1e-5 * float(expected.abs().max())  # a wrong map would show


RESIZED: dict[str, tuple[tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "vit": ((64, 96), {"dynamic_img_size": True}, {}),
    "vit-unfused": ((64, 96), {"dynamic_img_size": True}, {}),
    "registers": ((64, 96), {"dynamic_img_size": True}, {}),
    "eva": ((64, 96), {"dynamic_img_size": True}, {}),
    "dinov3": ((64, 96), {"dynamic_img_size": True}, {}),
    "pvt": ((128, 128), {}, {}),
    "swin": ((64, 48), {"strict_img_size": False}, {}),
    "hf-square": ((64, 96), {}, {"interpolate_pos_encoding": True}),
    "hf-Dinov2WithRegisters-sdpa": ((64, 96), {}, {}),
}
"""Images of another size, how models that take them are made, and called."""
QUICK_RESIZED = {(name, "relpos") for name in ("vit", "registers", "eva", "pvt", "swin", "hf-square")}
QUICK_RESIZED |= {("vit", one) for one in INDUCERS}
RESIZED_CASES = [
    pytest.param(name, one, marks=() if (name, one) in QUICK_RESIZED else pytest.mark.slow)
    for name in RESIZED
    for one in INDUCERS
]


def resized_places(name: str, size: tuple[int, int]) -> Any:
    if name == "pvt":  # patches of 4, 8, 16, 32 pixels, and keys of 32
        centres = [[(2**k * (i + 0.5) - 0.5) for i in range(4)] for k in (3, 2, 1, 0)]
        return lambda n: (grid(32 >> n, 32 >> n)(n)[0], [[(row, col) for row in centres[n] for col in centres[n]]])
    if name == "swin":
        rows, cols = size[0] // 4, size[1] // 4

        def windows(layer: int) -> tuple[Places, Places]:
            shift = 2 if layer % 2 else 0
            found: Places = [
                [((top + r + shift) % rows, (left + c + shift) % cols) for r in range(4) for c in range(4)]
                for top in range(0, rows, 4)
                for left in range(0, cols, 4)
            ]
            return found, found

        return windows
    return grid(size[0] // 8, size[1] // 8, 5 if name in ("registers", "dinov3", "hf-Dinov2WithRegisters-sdpa") else 1)


@pytest.mark.parametrize(("name", "one"), RESIZED_CASES)
def test_on_images_of_another_size_widths_grow_with_the_grid(name: str, one: str) -> None:
    size, settings, call = RESIZED[name]
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    known = huggingface("ViT", "sdpa", 1, image_size=48) if name == "hf-square" else FAMILIES[name]
    family, model = made(name, one, dataclasses.replace(known, build=_with(known, settings)))
    larger = dataclasses.replace(family, places=resized_places(name, size), image_size=size)
    config = next(part for part in model.modules() if isinstance(part, Locality)).inducers[0].config

    def now(layer: int) -> tuple[int, int]:
        return {"pvt": (32 >> layer,) * 2, "swin": (4, 4)}.get(name, (size[0] // 8, size[1] // 8))  # type: ignore[return-value]

    made_for: Extent = (lambda _: (6, 6)) if name.startswith("hf-") else extent(name)
    scales_first = name in ("vit-unfused", "swin")
    images = larger.images().requires_grad_()
    first = output_of(model(images, **call))
    ours = gradients(first, images, model)
    with (
        mock.patch.object(changed_attention, "swin_windows", larger.places),
        local_by_hand(larger, model, config, now, made_for, scales_first=scales_first),
    ):
        expected = output_of(model(images, **call))
        theirs = gradients(expected, images, model)
    assert_same(first, expected, 100 * family.tolerance)
    for found, wanted in zip(ours, theirs, strict=True):
        assert_same(found, wanted, 1e4 * family.tolerance)
    with torch.no_grad():
        small = output_of(model(family.images()))
        with local_by_hand(family, model, config, made_for, made_for, scales_first=scales_first):
            assert_same(small, output_of(model(family.images())), 100 * family.tolerance)
        assert_same(output_of(model(images, **call)), first, 100 * family.tolerance)  # which is known by now


def _with(family: Family, settings: dict[str, Any]) -> Any:
    assert isinstance(family.build, partial) or not settings or family.build is swin
    if family.build is swin:
        return partial(swin, **settings)
    return partial(family.build, **settings) if settings else family.build
