"""What a forward pass costs: every model of S2's Table 1 has the multiply-adds that are printed there."""

import functools

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nearsight  # noqa: F401  # for the names of its models

PRINTED = {
    "vit_tiny_patch16_224": (1.26, 1.27),
    "vit_base_patch16_224": (17.58, 17.64),
    "swin_tiny_patch4_window7_224": (4.50, 4.51),
    "swin_base_patch4_window7_224": (15.46, 15.47),
    "vit_tiny_patch16_reg4_224": (1.29, 1.30),
    "vit_base_patch16_reg4_224": (17.95, 18.02),
    "vit_tiny_patch16_rope_mixed_224": (1.26, 1.27),
    "vit_base_patch16_rope_mixed_224": (17.58, 17.64),
    "jumbo_vit_tiny_patch16_224": (1.40, 1.42),
    "jumbo_vit_base_patch16_224": (19.74, 19.81),
}
"""Billions, without and with LocAt."""
CLOSE = 0.0056
"""Half of the last digit, and the angles of RoPE (0.002), which the paper does not count."""


@functools.cache
def multiply_adds(name: str) -> float:
    """In billions, as the paper's tool (ptflops) counts them: beside the products, 2 for every number that is
    normalised and 1 for every number through a GELU.
    """
    others = 0

    def count(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal others
        others += output.numel() * (2 if isinstance(module, nn.LayerNorm) else 1)

    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.zeros(1, 3, 224, 224)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.GELU):
            module.register_forward_hook(count)
    with torch.no_grad(), FlopCounterMode(display=False) as products:
        model(images)
    return (products.get_total_flops() / 2 + others) / 1e9


@pytest.mark.parametrize("backbone", PRINTED)
def test_as_printed(backbone: str) -> None:
    plain, local = multiply_adds(backbone), multiply_adds(f"locat_{backbone}")
    assert (plain, local) == pytest.approx(PRINTED[backbone], abs=CLOSE)
    # What LocAt adds, to the same digit.
    assert local - plain == pytest.approx(PRINTED[backbone][1] - PRINTED[backbone][0], abs=2 * CLOSE)


def test_what_locat_adds_to_vit_base() -> None:
    """Its heads on all queries, three numbers from each, and one attention of tokens with themselves."""
    heads, refinement = 12 * 197 * 12 * 64 * 3, 2 * 197**2 * 768
    added = multiply_adds("locat_vit_base_patch16_224") - multiply_adds("vit_base_patch16_224")
    assert added * 1e9 == pytest.approx(heads + refinement)
