"""Models with LocAt against the paper written down in float64, in every family and variant, at two resolutions."""

from typing import Any

import pytest
import torch
from locat_models import FAMILIES, attention_names, excite, papers, plain_model
from locat_paper import refined, written_down
from torch import Tensor

from nearsight import add_locat

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def expected_logits(local: Any, batch: Tensor, plain: Any, **variant: Any) -> Tensor:
    model = written_down(local, plain, papers(local, batch, **variant))
    features = model.forward_features(batch)
    if features.dim() == 4:
        num_heads = model.layers[-1].blocks[-1].attn.attention.num_heads
        return model.head.fc(refined(features.flatten(1, 2), num_heads).mean(1))
    # Where a model normalises what it has pooled, that norm comes first (S2 §4.2: refinement is of normalised tokens).
    tokens = refined(model.fc_norm(features), model.blocks[-1].attn.attention.num_heads)
    pooled = tokens[:, 0] if model.global_pool == "token" else tokens[:, model.num_prefix_tokens :].mean(1)
    return model.head(pooled)


@pytest.mark.parametrize("size", [(40, 40), (64, 48)], ids=["training size", "larger"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "swin"])
def test_every_vit(family: str, size: tuple[int, int]) -> None:
    plain = plain_model(family)
    local = add_locat(plain_model(family)).double()
    excite(local)
    batch = images(*size)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain), **CLOSE)


@pytest.mark.parametrize("size", [(56, 56), (112, 84)], ids=["training size", "larger"])
def test_swin(size: tuple[int, int]) -> None:
    plain = plain_model("swin")
    local = add_locat(plain_model("swin")).double()
    excite(local)
    batch = images(*size)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain), **CLOSE)


def test_swin_with_another_window() -> None:
    plain, local = plain_model("swin"), add_locat(plain_model("swin")).double()
    excite(local)
    for model in (plain, local):
        model.set_input_size((40, 40), window_size=(5, 5))
    batch = images(40, 40)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain, initial=(7, 7)), **CLOSE)


VARIANTS: dict[str, dict[str, Any]] = {
    "laplace": {"kernel": "laplace"},
    "inverse": {"kernel": "inverse"},
    "input": {"width": "input"},
    "fixed": {"width": 1.5},
    "isotropic": {"isotropic": True},
    "isotropic laplace": {"isotropic": True, "kernel": "laplace"},
    "isotropic from the input": {"isotropic": True, "width": "input"},
    "no scale": {"scale": "none"},
    "auto": {"scale": "auto"},
    "fixed and automatic": {"width": 2.0, "scale": "auto", "kernel": "inverse"},
    "squared": {"resolution": "squared"},
}


@pytest.mark.parametrize("size", [(40, 40), (64, 48)], ids=["training size", "larger"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, size: tuple[int, int]) -> None:
    plain = plain_model("registers")
    local = add_locat(plain_model("registers"), **VARIANTS[variant]).double()
    excite(local)
    batch = images(*size)
    expected = expected_logits(local, batch, plain, **VARIANTS[variant])
    torch.testing.assert_close(local(batch), expected, **CLOSE)
    if size == (64, 48):
        default = expected_logits(add_locat(plain_model("registers")).double(), batch, plain)
        assert not torch.allclose(expected, default), "the variant changes nothing"


def test_variants_of_swin() -> None:
    plain = plain_model("swin")
    variant = {"kernel": "laplace", "width": "input", "scale": "auto"}
    local = add_locat(plain_model("swin"), **variant).double()
    excite(local)
    batch = images(56, 56)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain, **variant), **CLOSE)


def test_the_grid_that_widths_were_learned_on() -> None:
    plain = plain_model("vit")
    local = add_locat(plain_model("vit"), initial_grid=(3, 4)).double()
    excite(local)
    batch = images(40, 40)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain, initial=(3, 4)), **CLOSE)


def test_a_grid_as_large_as_to_need_another_eps() -> None:
    """From 27 patches on EPS doubles, and from 116 on distances are clamped, too."""
    settings = {"patch_size": 1, "img_size": (2, 120), "depth": 1}
    plain = plain_model("vit", **settings)
    local = add_locat(plain_model("vit", **settings)).double()
    assert local.blocks[0].attn.gaug.eps == pytest.approx(0.8)
    excite(local)
    batch = images(2, 120)
    reference = written_down(
        local, plain, {name: paper.__class__((2, 120), (2, 120), 1) for name, paper in papers(local, batch).items()}
    )
    torch.testing.assert_close(local.forward_features(batch), reference.forward_features(batch), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_without_strength_and_refinement(family: str) -> None:
    plain = plain_model(family).double()
    local = add_locat(plain_model(family), prr=False).double()
    with torch.no_grad():
        for name in attention_names(local):
            head = local.get_submodule(name).gaug.log_alpha
            head.weight.zero_()
            head.bias.fill_(-1e4)
    batch = images(56, 56)
    torch.testing.assert_close(local(batch), plain(batch), rtol=1e-12, atol=1e-12)


def test_some_blocks_alone() -> None:
    plain, local = plain_model("vit", depth=3), add_locat(plain_model("vit", depth=3), blocks=[1]).double()
    assert [hasattr(block.attn, "gaug") for block in local.blocks] == [False, True, False]
    excite(local)
    batch = images(40, 40)
    reference = written_down(local, plain, {"blocks.1.attn": papers(local, batch)["blocks.1.attn"]})
    torch.testing.assert_close(local.forward_features(batch), reference.forward_features(batch), **CLOSE)
