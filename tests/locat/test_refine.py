"""Patch refinement: against the paper, against timm's own where it has one, and for whoever wants the patches."""

import copy
import pickle
from typing import Any

import pytest
import timm
import timm.layers
import torch
from locat_models import FAMILIES, excite, plain_model
from locat_paper import refined
from torch import nn

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
    # Averages are normalised after pooling by timm, where refinement is of normalised tokens (S2 §4.2).
    assert isinstance(plain.norm, torch.nn.Identity) is pool.startswith(("avg", "max"))
    tokens = refine(plain.fc_norm(plain.forward_features(batch)), 3)
    torch.testing.assert_close(local(batch), plain.head(plain.pool(tokens)))
    torch.testing.assert_close(local.forward_features(batch), plain.forward_features(batch))
    torch.testing.assert_close(refined_map(local, batch).flatten(2).transpose(1, 2), tokens[:, 5:])
    assert local.state_dict().keys() == plain.state_dict().keys()
    before = local(batch)
    for copied in (copy.deepcopy(local), pickle.loads(pickle.dumps(local))):
        torch.testing.assert_close(copied(batch), before)
        with torch.no_grad():
            for norm in (copied.norm, copied.fc_norm):
                for weight in norm.parameters():
                    weight.add_(1.0)
        assert (copied(batch) - before).abs().max() > 1e-3  # by its own norm
        torch.testing.assert_close(local(batch), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_refined_patches_as_a_map(family: str) -> None:
    model: Any = add_locat(plain_model(family)).eval()
    excite(model)
    batch = torch.randn(2, 3, 56, 112)
    features = model.forward_features(batch)
    if family == "swin":
        expected = refined(features.flatten(1, 2), 4).unflatten(1, (7, 14))
    else:
        normed = (
            nn.functional.layer_norm(features, (48,), eps=1e-6) if family == "eva" else features
        )  # its norm comes last
        expected = refined(normed, 3)[:, model.num_prefix_tokens :].unflatten(1, (7, 14))
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


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("family", ["vit", "registers", "rope", "eva", "siglip-gap"])
def test_another_pooling_takes_it_off(family: str, copied: bool) -> None:
    plain, local = plain_model(family), add_locat(plain_model(family), gaug=False)
    local = pickle.loads(pickle.dumps(copy.deepcopy(local))) if copied else local
    batch = torch.randn(1, 3, 40, 40)
    local.reset_classifier(0, plain.global_pool)  # the one that it has
    plain.reset_classifier(0)
    assert local.attn_pool is not None
    assert (local(batch) - plain(batch)).abs().max() > 1e-3
    for pool in ("avg" if plain.global_pool == "token" else "max", "", "avg"):
        for model in (plain, local):
            model.reset_classifier(0, pool)
        assert local.attn_pool is None
        assert torch.equal(local(batch), plain(batch))
    for model in (plain, local):
        torch.manual_seed(0)
        model.reset_classifier(4)
    assert torch.equal(local(batch), plain(batch))


def test_models_that_normalise_what_they_do_not_pool() -> None:
    with pytest.raises(InputError, match="normalises after pooling, but does not pool; use prr=False"):
        add_locat(plain_model("vit", global_pool="", fc_norm=True))


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
