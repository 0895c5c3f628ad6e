"""The digest of a model: what changes what it computes changes it, and nothing else does."""

import dataclasses

import pytest
import torch

import nearsight
from nearsight.models import ModelConfig
from nearsight.probe import model_identity, weights_hash

LOCAT = ModelConfig(depth=1, width=24, num_heads=3, mlp_width=24, gaug=True, prr=True)


def built(config: ModelConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return config.build((32, 32), 10)


@pytest.mark.parametrize(
    "change",
    [
        {"locat_kernel": "laplace", "locat_isotropic": True},
        {"locat_kernel": "inverse", "locat_isotropic": True},
        {"locat_width": 2.0, "locat_isotropic": True},
        {"locat_scale": "none"},
        {"locat_scale": "auto"},
    ],
    ids=str,
)
def test_every_setting_of_locat_is_part_of_it(change: dict[str, object]) -> None:
    before = LOCAT if "locat_isotropic" not in change else dataclasses.replace(LOCAT, locat_isotropic=True)
    after = dataclasses.replace(LOCAT, **change)  # type: ignore[arg-type]
    one, other = built(before), built(after)
    # All that both have is the same, as it is of a model whose weights were copied.
    other.load_state_dict(one.state_dict(), strict=False)
    assert model_identity(one) != model_identity(other)
    if set(one.state_dict()) == set(other.state_dict()):
        assert weights_hash(one) == weights_hash(other)


def test_heads_and_weights_are_part_of_it_and_modes_are_not() -> None:
    def made(num_heads: int) -> torch.nn.Module:
        torch.manual_seed(0)
        return nearsight.create_model("compact_vit", depth=1, embed_dim=24, num_heads=num_heads)

    one, again, other = made(3), made(3), made(4)
    assert model_identity(one) == model_identity(again)
    assert weights_hash(one) == weights_hash(other)
    assert model_identity(one) != model_identity(other)
    again.eval()
    for module in again.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = not module.fused_attn
    assert model_identity(one) == model_identity(again)
    with torch.no_grad():
        next(iter(again.parameters())).view(-1)[0] += 1e-3
    assert model_identity(one) != model_identity(again)
