"""Patch refinement: against the paper, against timm's own where it has one, and for whoever wants the patches."""

from typing import Any

import pytest
import timm
import timm.layers
import torch
from locat_models import FAMILIES, excite, plain_model
from locat_paper import refined

from nearsight import add_locat, measure
from nearsight.errors import InputError
from nearsight.locat import refine, refined_map

has_prr = pytest.mark.skipif(
    not hasattr(timm.layers, "AttentionPoolPrr"), reason=f"timm {timm.__version__} has no global_pool='prr'"
)


def test_against_the_paper_head_by_head() -> None:
    tokens = torch.randn(3, 11, 24, dtype=torch.float64)
    for num_heads in (1, 2, 6):
        torch.testing.assert_close(refine(tokens, num_heads), refined(tokens, num_heads), rtol=1e-12, atol=1e-12)


@has_prr
@pytest.mark.parametrize("class_token", [True, False])
def test_equals_that_of_timm(class_token: bool) -> None:
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "class_token": class_token}
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", **options, global_pool="prr").eval()
    pool = "token" if class_token else "avg"
    ours = timm.create_model("vit_tiny_patch16_224", **options, global_pool=pool, fc_norm=False).eval()
    ours.load_state_dict(theirs.state_dict())
    batch = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(ours(batch), theirs(batch))
    torch.testing.assert_close(add_locat(ours, gaug=False)(batch), theirs(batch))


@pytest.mark.parametrize("pool", ["token", "avg", "avgmax", "max", ""])
def test_the_model_pools_as_it_did(pool: str) -> None:
    plain = plain_model("registers", global_pool=pool)
    local = add_locat(plain_model("registers", global_pool=pool), gaug=False)
    batch = torch.randn(2, 3, 40, 40)
    tokens = refine(plain.forward_features(batch), 3)
    expected = plain.head(plain.fc_norm(plain.pool(tokens)))
    torch.testing.assert_close(local(batch), expected)
    torch.testing.assert_close(local.forward_features(batch), plain.forward_features(batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_refined_patches_as_a_map(family: str) -> None:
    model: Any = add_locat(plain_model(family)).eval()
    excite(model)
    batch = torch.randn(2, 3, 56, 112)
    features = model.forward_features(batch)
    if family == "swin":
        expected = refined(features.flatten(1, 2), 4).unflatten(1, (7, 14))
    else:
        expected = refined(features, 3)[:, model.num_prefix_tokens :].unflatten(1, (7, 14))
    torch.testing.assert_close(refined_map(model, batch), expected.permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5)


def test_a_model_without_refinement_has_no_refined_patches() -> None:
    with pytest.raises(InputError, match="does not refine its patches"):
        refined_map(add_locat(plain_model("vit"), prr=False), torch.randn(1, 3, 40, 40))


def test_gradients_reach_the_last_block_only_with_it() -> None:
    """S2 §4.2: without refinement the last local attention learns nothing from the class token."""
    for prr in (False, True):
        model = add_locat(plain_model("vit"), prr=prr)
        excite(model)
        model(torch.randn(2, 3, 40, 40)).square().sum().backward()
        assert bool(model.blocks[-1].attn.gaug.log_var.weight.grad.any()) is prr
        assert model.blocks[0].attn.gaug.log_var.weight.grad.any()


def test_another_pooling_takes_it_off() -> None:
    model = add_locat(plain_model("vit"), gaug=False)
    model.reset_classifier(4)
    assert model.attn_pool is not None
    model.reset_classifier(0, "")
    batch = torch.randn(1, 3, 40, 40)
    torch.testing.assert_close(model(batch), model.forward_features(batch))


@pytest.mark.parametrize("source", ["ours", pytest.param("timm", marks=has_prr)])
def test_it_is_no_layer(source: str) -> None:
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3}
    if source == "ours":
        model = add_locat(timm.create_model("vit_tiny_patch16_224", **options))
    else:
        model = timm.create_model("vit_tiny_patch16_224", **options, global_pool="prr")
    table = measure(model, torch.randn(2, 3, 32, 32))
    assert table.layer_names == ("blocks.0.attn", "blocks.1.attn")
    assert "PRR" in table.skipped["attn_pool"]
