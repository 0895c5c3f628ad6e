"""Settings of the compact ViT that S1 does not report, against timm's own or loops; and as the lens sees them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.metrics import attention_distance
from nearsight.models import ModelConfig, create_model
from nearsight.train import DataConfig, RunConfig

SMALL = ModelConfig(depth=2, width=32, num_heads=4, mlp_width=64, patch_size=8)
CHANGED: list[dict[str, Any]] = [
    {"qkv_bias": False},
    {"head_size": 12},
    {"embed_norm": True},
    {"final_norm": False},
    {"activation": "relu"},
    {"qk_std": 0.005},
]


def built(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return dataclasses.replace(SMALL, **settings).build((32, 24), 5).eval()


def of_timm(**settings: Any) -> Any:
    return timm.models.vision_transformer.VisionTransformer(
        img_size=(32, 24), patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2, num_classes=5, **settings
    ).eval()


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    ("settings", "timms"),
    [
        ({"qkv_bias": False}, {"qkv_bias": False}),
        ({"final_norm": False}, {"final_norm": False}),
        ({"final_norm": False, "pool": "avg"}, {"final_norm": False, "global_pool": "avg"}),
        ({"activation": "relu"}, {"act_layer": "relu"}),
    ],
    ids=str,
)
def test_settings_are_timms(settings: dict[str, Any], timms: dict[str, Any]) -> None:
    model, theirs = built(**settings), of_timm(**timms)
    perturb(model)
    theirs.load_state_dict(model.state_dict())
    images = torch.randn(3, 3, 32, 24)
    torch.testing.assert_close(model(images), theirs(images))


@pytest.mark.parametrize("fused", [True, False])
def test_heads_of_another_size_are_timms_own(fused: bool) -> None:
    """timm's attention can have them; its blocks do not say so."""
    model = built(head_size=12)
    perturb(model)
    ours = model.blocks[1].attn
    theirs = Attention(32, num_heads=4, attn_head_dim=12, qkv_bias=True)
    theirs.load_state_dict(ours.state_dict())
    assert type(ours) is Attention  # so that LocAt and whatever else knows timm's goes with it
    ours.fused_attn = theirs.fused_attn = fused
    tokens = torch.randn(2, 13, 32)
    assert torch.equal(ours(tokens), theirs(tokens))
    assert (ours.head_dim, ours.attn_dim, ours.scale) == (theirs.head_dim, theirs.attn_dim, theirs.scale)


def test_the_patch_embedding_is_vit_pytorchs() -> None:
    """Norm of a patch's numbers, linear, norm of the token: patch by patch, in float64."""
    model = built(embed_norm=True).double()
    perturb(model)
    embed, images = model.patch_embed, torch.randn(2, 3, 32, 24, dtype=torch.float64)
    linear = nn.Linear(192, 32).double()
    linear.load_state_dict({"weight": embed.proj.weight.flatten(1), "bias": embed.proj.bias})
    tokens = [
        embed.norm(linear(embed.norm_pixels(images[:, :, row : row + 8, col : col + 8].flatten(1))))
        for row in range(0, 32, 8)
        for col in range(0, 24, 8)
    ]
    torch.testing.assert_close(embed(images), torch.stack(tokens, 1), rtol=1e-12, atol=1e-12)


def test_queries_and_keys_alone_start_smaller() -> None:
    plain, small = built(), built(qk_std=0.005)
    for name, weight in small.state_dict().items():
        before = plain.state_dict()[name]
        if not name.endswith("qkv.weight"):
            assert torch.equal(weight, before), name
            continue
        assert torch.equal(weight[64:], before[64:])
        assert float(weight[:64].std()) == pytest.approx(0.005, rel=0.06)
    drawn = [built(seed, init="pytorch", qk_std=0.0).blocks[0].attn.qkv.weight for seed in range(2)]
    assert not drawn[0][:64].any()
    assert drawn[0][64:].any()


@pytest.mark.parametrize("settings", CHANGED, ids=str)
def test_identities(settings: dict[str, Any]) -> None:
    """At its default a setting is no part of a run's identity; changed, it makes another run."""
    run = RunConfig(model=SMALL, data=DataConfig(name="shapes"))
    (name,) = settings
    default = dataclasses.replace(SMALL, **{name: type(SMALL).__dataclass_fields__[name].default})
    assert dataclasses.replace(run, model=default).identity == run.identity
    other = dataclasses.replace(run, model=dataclasses.replace(SMALL, **settings))
    assert other.identity != run.identity
    assert (other.stack_key == run.stack_key) == (name == "qk_std")
    assert RunConfig.from_json(other.to_json(), "a file") == other


def test_the_usual_size_of_a_head_is_no_other_setting() -> None:
    assert dataclasses.replace(SMALL, head_size=8) == SMALL
    assert ModelConfig(head_size=24) == ModelConfig()


def _maps_by_hand(model: Any, images: Tensor) -> list[Tensor]:
    """Softmax of queries times keys, block by block, with nothing of the lens."""
    found, tokens = [], model._pos_embed(model.patch_embed(images))
    for block in model.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(tokens)).unflatten(-1, (3, attention.num_heads, attention.head_dim))
        query, key, _ = qkv.permute(2, 0, 3, 1, 4)
        found.append((query @ key.mT * attention.scale).softmax(-1))
        tokens = block(tokens)
    return found


@torch.no_grad()
@pytest.mark.parametrize("settings", [*CHANGED, {"head_size": 12, "embed_norm": True, "reach": (1.5,)}], ids=str)
def test_the_lens_measures_them(settings: dict[str, Any]) -> None:
    model, images = built(**settings), torch.randn(3, 3, 32, 24)
    perturb(model)
    table = nearsight.measure(model, images)
    assert table.mad.shape == (2, 4)
    assert not table.skipped
    if "reach" not in settings:
        for layer, maps in enumerate(_maps_by_hand(model, images)):
            expected = attention_distance(maps, (4, 3)).mean(0)
            np.testing.assert_allclose(table.mad[layer], expected, atol=1e-6)


def test_locat_with_heads_of_another_size() -> None:
    """With a strength of 0 it is the model without it, and its heads are as wide as the head."""
    model, local = built(head_size=12), built(head_size=12, gaug=True, qkv_bias=True)
    assert local.blocks[0].attn.gaug.log_var.in_features == 12
    for block in local.blocks:
        nn.init.zeros_(block.attn.gaug.log_alpha.weight)
        nn.init.constant_(block.attn.gaug.log_alpha.bias, -1e4)
    images = torch.randn(2, 3, 32, 24)
    torch.testing.assert_close(local(images), model(images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_size": 0}, "head_size is 0"),
        ({"qk_std": -0.1}, "qk_std is -0.1"),
        ({"activation": "tanh"}, "activation is 'tanh', but must be one of 'gelu', 'relu'"),
        ({"embed_norm": True, "shuffled_tiles": 4}, "embed_norm does not go with shuffled_tiles"),
        ({"name": "compact_jumbo_vit", "final_norm": False}, "final_norm is False, but compact_jumbo_vit has no such"),
        ({"name": "compact_resnet18", "qkv_bias": False}, "qkv_bias is False, but compact_resnet18 has no such"),
        ({"name": "vit_tiny_patch16_224", "activation": "relu"}, "activation is 'relu', but vit_tiny_patch16_224 has"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_size": 12, "qk_norm": True}, "head_size does not go with qk_norm"),
        ({"embed_norm": True, "dynamic_img_pad": True}, "dynamic_img_pad does not go with embed_norm"),
    ],
)
def test_what_timm_could_be_told_besides(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_model("compact_vit", depth=1, **settings)
    normed = create_model("compact_vit", depth=1, embed_norm=True)
    with pytest.raises(InputError, match="embed_norm is of patches of one size"):
        normed.set_input_size(patch_size=8)
    normed.set_input_size(img_size=(48, 32))
    assert normed(torch.zeros(1, 3, 48, 32)).shape == (1, 100)
