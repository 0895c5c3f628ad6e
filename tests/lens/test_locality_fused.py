"""Inducers by fused kernels: where they are taken, and that they are told the same as those who make a bias in memory.

Without a GPU, plain torch stands for the kernels, which have tests of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from changed_attention import FAMILIES, output_of
from hypothesis import given
from hypothesis import strategies as st
from local_attention import unsettle_inducers
from torch import Tensor, nn

from nearsight import add_locality, attention_maps, measure
from nearsight.lens import induced
from nearsight.locat import Grid
from nearsight.locat.inducers import Radial
from nearsight.locat.inducers.base import whole_grid

INDUCERS: list[dict[str, dict[str, Any]]] = [
    {"alibi2d": {"gate": 1.0}},
    {"gaussian": {"width": 1.3}},
    {"neighborhood": {"radius": 1.5}},
    {"neighborhood": {"radius": (0.0, 1.5, None), "by": "head"}},
    {"neighborhood": {"radius": (1.0, 2.0), "by": "layer"}},
    {"alibi2d": {}, "neighborhood": {"radius": 2.0}},
    {"gaug": {}},
    {"gaug": {"kernel": "inverse", "gated": False}, "neighborhood": {"radius": 2.0}},
]
DENSE: list[dict[str, dict[str, Any]]] = [{"relpos": {}}, {"lsa": {}}, {"alibi2d": {}, "gaussian": {}}]


@contextmanager
def with_kernels() -> Iterator[mock.Mock]:
    """As if there were some; how often they are called."""
    with (
        mock.patch.object(induced, "has_kernels", return_value=True),
        mock.patch.object(induced, "attend_on_grid", wraps=induced.attend_on_grid) as called,
    ):
        yield called


def made(name: str, inducers: dict[str, dict[str, Any]]) -> tuple[nn.Module, Tensor]:
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = family.model().float()
    for one, options in inducers.items():
        # By names of modules, gaug takes the lens's way on timm's models, too.
        layers = measure(model, family.images().float()).layer_names if one == "gaug" else None
        add_locality(model, one, layers=layers, image_size=family.image_size, **options)
    unsettle_inducers(model)
    return model, family.images().float()


def results(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Outputs and gradients."""
    images = images.clone().requires_grad_()
    output = output_of(model(images))
    weights = [weight for name, weight in model.named_parameters() if ".locality." in name]
    toward = torch.randn(output.shape, generator=torch.Generator().manual_seed(11))
    return [output.detach(), *torch.autograd.grad((output * toward).sum(), [images, *weights])]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max()) + 1e-7


@pytest.mark.parametrize("inducers", INDUCERS, ids=str)
def test_kernels_are_told_what_a_bias_in_memory_says(inducers: dict[str, dict[str, Any]]) -> None:
    model, images = made("registers", inducers)
    expected = results(model, images)
    with with_kernels() as called:
        found = results(model, images)
    assert called.call_count == 2  # its layers
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["eva", "torchvision", "hf-ViT-sdpa"])
def test_so_they_are_in_other_models(name: str) -> None:
    model, images = made(name, {"gaug": {}, "neighborhood": {"radius": 2.0}})
    expected = results(model, images)
    with with_kernels() as called:
        found = results(model, images)
    assert called.call_count
    assert_same(found, expected)


@pytest.mark.parametrize("inducers", DENSE, ids=str)
def test_what_has_no_such_form_is_made_in_memory(inducers: dict[str, dict[str, Any]]) -> None:
    model, images = made("vit", inducers)
    with with_kernels() as called:
        results(model, images)
    assert not called.called


@pytest.mark.parametrize("name", ["swin", "vit-unfused"])
def test_so_is_what_has_a_bias_of_its_own_or_its_weights_in_memory(name: str) -> None:
    model, images = made(name, {"alibi2d": {}})
    expected = results(model, images)
    with with_kernels() as called:
        found = results(model, images)
    assert not called.called
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_so_are_pooled_keys() -> None:
    """The last of four layers has all its patches as keys."""
    model, images = made("pvt", {"alibi2d": {}})
    expected = results(model, images)
    with with_kernels() as called:
        assert_same(results(model, images), expected)
    assert called.call_count == 1


def test_dropout_and_transforms_are_left_to_plain_torch() -> None:
    model, images = made("vit", {"alibi2d": {}})
    model(images)
    with with_kernels() as called:
        for module in model.modules():
            if isinstance(getattr(module, "attn_drop", None), nn.Dropout):
                module.attn_drop.p = 0.1  # type: ignore[union-attr]
        model.train()(images)
        assert not called.called
        torch.vmap(lambda each: model.eval()(each[None])[0])(images)
        assert not called.called
        model(images)
        assert called.called


def test_the_lens_sees_it() -> None:
    model, images = made("registers", {"alibi2d": {}, "neighborhood": {"radius": 1.5}})
    expected, table = attention_maps(model, images), measure(model, images)
    with with_kernels() as called:
        found, same = attention_maps(model, images), measure(model, images)
    assert called.called
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.weights_BHQK, other.weights_BHQK)
        assert (one.weights_BHQK == 0).any()
    np.testing.assert_allclose(same.mad, table.mad, rtol=1e-4)


@given(rows=st.integers(1, 5), cols=st.integers(1, 5), prefix=st.integers(0, 3), at=st.floats(-9, 9))
def test_whole_grids_are_known(rows: int, cols: int, prefix: int, at: float) -> None:
    patches = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).view(-1, 2).double() + at
    tokens = torch.cat([torch.full((prefix, 2), torch.nan, dtype=torch.float64), patches])
    windows = torch.stack([tokens, tokens + 3.0])
    assert whole_grid(windows) == Grid(rows, cols, prefix)
    assert whole_grid(windows.flip(1)) == (Grid(1, 1, 0) if len(tokens) == 1 else None)
    if rows * cols > 1:
        assert whole_grid(2.5 * windows) is None
        assert whole_grid(torch.cat([windows, windows[:, -1:]], dim=1)) is None
        windows[1, -1] += 1
        assert whole_grid(windows) is None


def test_forms_add_up() -> None:
    near, far = torch.tensor([1.0, 4.0]), torch.tensor([2.0])
    both = Radial("distance", reach=near) & Radial(reach=far)
    assert both is not None
    assert both.shape == "distance"
    assert both.reach is not None
    assert both.reach.tolist() == [1.0, 2.0]
    assert (Radial("distance") & Radial("gaussian")) is None
    alone = Radial() & Radial("laplace", largest_half_square=3.0)
    assert (alone, alone and alone.reach) == (Radial("laplace", largest_half_square=3.0), None)


@pytest.mark.gpu
@pytest.mark.parametrize("inducers", INDUCERS, ids=str)
def test_on_a_gpu_numbers_are_those_of_a_cpu(inducers: dict[str, dict[str, Any]]) -> None:
    model, images = made("registers", inducers)
    expected = results(model, images)
    model.cuda()
    with mock.patch.object(induced, "attend_on_grid", wraps=induced.attend_on_grid) as called:
        output = output_of(model(images.cuda().requires_grad_()))
    assert called.called
    assert_same([output.detach().cpu()], expected[:1])
    weights = [weight for name, weight in model.named_parameters() if ".locality." in name]
    toward = torch.randn(output.shape, generator=torch.Generator().manual_seed(11)).cuda()
    if weights:
        assert_same([grad.cpu() for grad in torch.autograd.grad((output * toward).sum(), weights)], expected[2:])
