"""The stacked forward and its gradients against each model on its own."""

import warnings

import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.train.stacked import stack_weights, stacked_forward, weightless

CPU = torch.device("cpu")


def models(num: int, **kwargs: object) -> list[nn.Module]:
    made = []
    for seed in range(num):
        torch.manual_seed(seed)
        settings = {"depth": 2, "embed_dim": 32, "num_heads": 4, "num_classes": 5, **kwargs}
        made.append(timm.create_model("compact_vit", **settings))
    return made


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_equal_the_single_models(num: int, dtype: torch.dtype) -> None:
    cells = [model.to(dtype) for model in models(num)]
    images = torch.randn(num, 6, 3, 32, 32, dtype=dtype)
    weights = stack_weights([dict(model.named_parameters()) for model in cells], CPU)
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing batching rule would be a loop over K, and a warning
        outputs = stacked_forward(weightless(cells[0]), weights, images)
        gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()))
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-13}
    for k, model in enumerate(cells):
        output = model(images[k])
        torch.testing.assert_close(outputs[k], output, **tolerance)
        output.square().sum().backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient[k], parameter.grad, **tolerance)


def test_a_model_with_masks_and_odd_convolutions_still_works() -> None:
    """Whatever the fast paths do not cover goes the ordinary way."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.conv(x).flatten(2).transpose(1, 2).unsqueeze(1)
            mask = torch.ones(tokens.shape[-2], tokens.shape[-2], dtype=torch.bool).tril()
            attended = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=mask)
            return self.head(attended.mean((1, 2)))

    cells = [Odd(), Odd()]
    images = torch.randn(2, 3, 3, 6, 6)
    outputs = stacked_forward(
        weightless(cells[0]), stack_weights([dict(cell.named_parameters()) for cell in cells], CPU), images
    )
    for k, cell in enumerate(cells):
        torch.testing.assert_close(outputs[k], cell(images[k]), rtol=1e-5, atol=1e-6)


def test_unstacked_attention_has_the_same_gradient() -> None:
    """The folded attention is also right where nothing is stacked over it."""
    from nearsight.train.stacked import _FoldedAttention

    inputs = [torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: _FoldedAttention.apply(q, k, v, 0.3), inputs)


def test_a_skeleton_holds_no_memory() -> None:
    assert all(parameter.is_meta for parameter in weightless(models(1)[0]).parameters())
