"""What a forward costs: S2's Table 1, sums by hand, and memory of networks whose tensors can be listed."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from nearsight.lens.cost import forward_cost
from nearsight.models import create_model

PRINTED = {
    "vit_tiny_patch16_224": ("1.26", "1.27"),
    "vit_base_patch16_224": ("17.58", "17.64"),
    "swin_tiny_patch4_window7_224": ("4.50", "4.51"),
    "swin_base_patch4_window7_224": ("15.46", "15.47"),
    "vit_tiny_patch16_reg4_224": ("1.29", "1.30"),
    "vit_base_patch16_reg4_224": ("17.95", "18.02"),
    "vit_tiny_patch16_rope_mixed_224": ("1.26", "1.27"),
    "vit_base_patch16_rope_mixed_224": ("17.58", "17.64"),
    "jumbo_vit_tiny_patch16_224": ("1.40", "1.42"),
    "jumbo_vit_base_patch16_224": ("19.74", "19.81"),
}
"""Of S2's Table 1, in billions, without and with LocAt."""


@pytest.mark.parametrize("backbone", PRINTED)
def test_table_1_to_the_last_digit(backbone: str) -> None:
    for name, printed in zip((backbone, f"locat_{backbone}"), PRINTED[backbone], strict=True):
        with torch.device("meta"):
            model = create_model(name)
        cost = forward_cost(model, (224, 224))
        assert not cost.computed
        assert f"{cost.multiply_adds / 1e9:.2f}" == printed


def test_a_vit_by_hand() -> None:
    model = create_model("compact_vit", depth=3, embed_dim=24, num_heads=3, mlp_ratio=2.0, num_classes=10)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    cost = forward_cost(model.train(), (32, 32))
    tokens, width, hidden = 65, 24, 48
    of_block = tokens * width * (3 * width + width + 2 * hidden) + 2 * tokens**2 * width
    assert cost.products == 64 * width * 48 + 3 * of_block + width * 10
    assert cost.norms == 2 * (3 * 2 * tokens * width + tokens * width)
    assert cost.activations == 3 * tokens * hidden
    assert cost.weight_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    assert model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["gcvit_xxtiny", "convit_tiny", "resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"]
)
def test_products_are_those_of_torchs_counter(name: str) -> None:
    """Which sees what is computed on a CPU, fused attention, too."""
    model, images = timm.create_model(name).eval(), torch.zeros(1, 3, 224, 224)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(images)
    assert forward_cost(model, (224, 224)).products == counted.get_total_flops() // 2


class Wide(nn.Module):
    """Three tensors, of which two live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 2, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        made = self.first(images)  # 8 × 16 numbers
        for _ in range(5):
            made = made.neg()  # as many again, and the former are gone
        view = made[:, :4].flatten(2)  # no memory of its own
        assert view.shape[1] == 4
        last: Tensor = self.last(made)
        return last


def test_memory_is_that_of_the_tensors_that_live_together() -> None:
    cost = forward_cost(Wide(), (4, 4))
    assert cost.forward_bytes == 4 * 2 * 8 * 16
    assert cost.weight_bytes == 4 * (3 * 8 + 8 * 2)
    assert (cost.norms, cost.activations, cost.products) == (0, 0, 16 * (3 * 8 + 8 * 2))


class Attending(nn.Module):
    """All pairs of 256 pixels, in one call or step by step."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        tokens = (self.weight * images).flatten(2).transpose(1, 2).unsqueeze(1)
        if self.fused:
            return F.scaled_dot_product_attention(tokens, tokens, value=tokens)
        return (tokens @ tokens.transpose(-2, -1)).softmax(-1) @ tokens


def test_attention_in_one_call_keeps_no_map() -> None:
    fused, explicit = (forward_cost(Attending(fused=fused), (16, 16)) for fused in (True, False))
    assert fused.products == explicit.products == 2 * 256**2 * 3
    assert fused.forward_bytes < 4 * 256**2 < 2 * 4 * 256**2 <= explicit.forward_bytes


class Asking(nn.Module):
    """A forward that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, images: Tensor) -> Tensor:
        made: Tensor = self.layer(images.mean((2, 3)))
        return made if made.sum().item() > 1e9 else F.relu(made)


def test_a_model_that_asks_for_values_is_computed_once() -> None:
    cost = forward_cost(Asking(), (8, 8))
    assert cost.computed
    assert (cost.products, cost.activations) == (15, 5)
