"""The stacked forward and its gradients against each model on its own."""

import warnings
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.train import stacked
from nearsight.train.optimizer import Arrangement
from nearsight.train.stacked import (
    _FoldedAttention,
    stack_weights,
    stacked_forward,
    verify_stacking,
    vmapped_forward,
    weightless,
)
from nearsight.train.stackedweight import UnstackableError, plain, stack_up

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
@pytest.mark.parametrize("forward", [stacked_forward, vmapped_forward])
def test_outputs_and_gradients_equal_the_single_models(
    num: int, dtype: torch.dtype, forward: Callable[..., Tensor]
) -> None:
    cells = [model.to(dtype) for model in models(num)]
    images = torch.randn(num, 6, 3, 32, 32, dtype=dtype)
    weights = stack_weights([dict(model.named_parameters()) for model in cells], CPU)
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing batching rule would be a loop over K, and a warning
        outputs = forward(weightless(cells[0]), weights, images)
        gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()))
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-13}
    for k, model in enumerate(cells):
        output = model(images[k])
        torch.testing.assert_close(outputs[k], output, **tolerance)
        output.square().sum().backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient[k], parameter.grad, **tolerance)


@pytest.mark.parametrize("forward", [stacked_forward, vmapped_forward])
def test_a_model_with_masks_and_odd_convolutions_still_works(forward: Callable[..., Tensor]) -> None:
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
    outputs = forward(
        weightless(cells[0]), stack_weights([dict(cell.named_parameters()) for cell in cells], CPU), images
    )
    for k, cell in enumerate(cells):
        torch.testing.assert_close(outputs[k], cell(images[k]), rtol=1e-5, atol=1e-6)


def test_unstacked_attention_has_the_same_gradient() -> None:
    """The folded attention is also right where nothing is stacked over it."""
    inputs = [torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: _FoldedAttention.apply(q, k, v, 0.3), inputs)


def test_a_skeleton_holds_no_memory() -> None:
    assert all(parameter.is_meta for parameter in weightless(models(1)[0]).parameters())


class Everything(nn.Module):
    """Weights met in every way that the fast path knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 8)
        self.layer_norm = nn.LayerNorm(8, bias=False)
        self.without_bias = nn.Linear(8, 8, bias=False)
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 10, 8))
        self.number = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(self.embed(images))).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.places
        x = self.layer_norm(x) * self.scale.sigmoid() - self.scale
        x = self.without_bias(x) @ self.matrix / (2 + self.number.exp())
        x = self.token[:, 0].exp() * x.mean(1) + (1 - self.scale) + 2 * self.scale * self.scale
        return self.head(x)


def test_weights_meet_activations_in_many_ways() -> None:
    torch.manual_seed(0)
    cells = [Everything().double() for _ in range(3)]
    images = torch.randn(3, 4, 3, 6, 6, dtype=torch.float64)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], CPU)
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    skeleton = weightless(cells[0])
    outputs = stacked_forward(skeleton, weights, images)
    assert skeleton not in stacked._by_vmap
    assert type(outputs) is Tensor
    gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()))
    for k, cell in enumerate(cells):
        output = cell(images[k])
        torch.testing.assert_close(outputs[k], output, rtol=1e-9, atol=1e-12)
        output.square().sum().backward()
        for gradient, parameter in zip(gradients, cell.parameters(), strict=True):
            torch.testing.assert_close(gradient[k], parameter.grad, rtol=1e-9, atol=1e-12)


class Unusual(nn.Module):
    """Uses its weights in a way the fast path does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)) * self.head.weight.norm()


class Reordering(nn.Module):
    """Puts its windows before its images."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(12, 2)

    def forward(self, images: Tensor) -> Tensor:
        windows = images.flatten(1).unflatten(1, (2, 6)).transpose(0, 1)
        return self.head(self.inner(windows.flatten(0, 1)).view(windows.shape).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("kind", [Unusual, Reordering])
def test_other_models_run_by_vmap_and_are_right(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    cells = [kind() for _ in range(3)]
    skeleton = weightless(cells[0])
    verify_stacking(skeleton, cells, (2, 2))
    assert skeleton in stacked._by_vmap
    images = torch.randn(3, 5, 3, 2, 2)
    outputs = stacked_forward(skeleton, stack_weights([dict(cell.named_parameters()) for cell in cells], CPU), images)
    for k, cell in enumerate(cells):
        torch.testing.assert_close(outputs[k], cell(images[k]), rtol=1e-5, atol=1e-6)


def test_weights_with_a_number_for_each_sample() -> None:
    weight, activations = torch.randn(2, 3, 4), torch.randn(6, 4)
    expected = activations.view(2, 3, 4) * weight
    assert torch.equal(activations * stack_up(weight), expected.view(6, 4))
    assert torch.equal(stack_up(weight) * activations, expected.view(6, 4))
    with pytest.raises(UnstackableError, match="of a whole batch"):
        _ = activations * stack_up(torch.randn(2, 3, 3, 4))


def test_einsum_of_weights_and_activations() -> None:
    maps, mixed = torch.randn(2, 3, 5, 5), torch.randn(2, 5, 5)
    values = torch.randn(8, 5, 3, 4)  # 4 images of each of the 2 cells
    expected = [torch.einsum("hnm,bmhd->bnhd", maps[k], values[4 * k : 4 * k + 4]) for k in range(2)]
    torch.testing.assert_close(torch.einsum("hnm,bmhd->bnhd", stack_up(maps), values), torch.cat(expected))
    of_weights = torch.einsum("hnm,mo->hno", stack_up(maps), stack_up(mixed))
    torch.testing.assert_close(plain(of_weights), torch.einsum("khnm,kmo->khno", maps, mixed))
    for equation in ("hnm,bmhd->nbhd", "bnm,bmhd->bnhd", "hnm,bmhd", "hnm,b...->b..."):
        with pytest.raises(UnstackableError, match="einsum"):
            torch.einsum(equation, stack_up(maps), values)


def test_what_is_not_known_is_named() -> None:
    weight = stack_up(torch.randn(2, 3, 3))
    for use in (weight.norm, lambda: weight @ torch.randn(4, 3), lambda: torch.randn(8, 3) + weight):
        with pytest.raises(UnstackableError, match=r"of weights|of a whole batch"):
            use()
    with pytest.raises(UnstackableError, match="to more axes"):
        weight.expand(2, 2, 3, 3)


def test_one_compiled_program_serves_every_number_of_cells() -> None:
    cells = models(4, depth=1)
    skeleton = weightless(cells[0]).eval()
    weights = stack_weights([dict(model.named_parameters()) for model in cells], CPU)
    arrangement = Arrangement({name: tuple(weight.shape[1:]) for name, weight in weights.items()})
    flat_KP = torch.cat([weight.flatten(1) for weight in weights.values()], dim=1)
    images = torch.randn(4, 6, 3, 32, 32)
    programs = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        programs.append(graph)
        return graph.forward

    def forward(flat_KP: Tensor, images: Tensor) -> Tensor:
        return stacked_forward(skeleton, arrangement.views(flat_KP), images)

    compiled = torch.compile(forward, backend=count, fullgraph=True)
    expected = forward(flat_KP, images)
    for num in (4, 3, 2):
        inputs = flat_KP[:num].clone(), images[:num].clone()
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(compiled(*inputs), expected[:num], rtol=1e-5, atol=1e-6)
    assert len(programs) == 1
