"""Whatever a model does with results that wait for their numbers, its outputs and gradients are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.train.fused import pending
from nearsight.train.fused.pending import fusing
from nearsight.train.fused.waiting import Pending
from nearsight.train.stacked import stack_weights, stacked_forward, weightless

SIDE = 2  # of an image; its channels are the tokens


class Blocks(nn.Module):
    """Tokens through some code that uses these parts."""

    def __init__(self, code: "Code", eps: float = 1e-5, head_size: int = 8) -> None:
        super().__init__()
        self.code = code
        self.embed, self.norm, self.norm2 = nn.Linear(SIDE**2, 16), nn.LayerNorm(16, eps=eps), nn.LayerNorm(16)
        self.qkv, self.projection = nn.Linear(16, 3 * 2 * head_size), nn.Linear(2 * head_size, 16)
        self.fc1, self.fc2, self.to_one = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 1)
        self.matrix, self.scale = nn.Parameter(torch.zeros(16, 32)), nn.Parameter(torch.zeros(16))

    def mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y

    def attend(self, x: Tensor, *args: Any, order: tuple[int, int, int] = (0, 1, 2), **kwargs: Any) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(*(parts[n] for n in order), *args, **kwargs)
        y: Tensor = self.projection(attended.transpose(1, 2).flatten(2))
        return y

    def forward(self, images: Tensor) -> Tensor:
        return self.code(self, self.embed(images.flatten(2))).mean(1)


Code = Callable[[Blocks, Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """An operation that gets tensors as they are, whatever their type."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def questions(b: Blocks, x: Tensor) -> Tensor:
    y = b.norm(x)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert (y.ndim, y.dim(), y.size(2), y.numel()) == (3, 3, 16, x.numel())
    assert y.requires_grad == x.requires_grad
    y = b.fc1(y)
    assert (y.shape, y.stride(), y.dtype) == ((*x.shape[:2], 32), (32 * x.shape[1], 32, 1), x.dtype)
    x = x + b.fc2(F.gelu(y))
    assert x.shape[1:] == (3, 16)
    assert repr(x).startswith("tensor(")
    assert f"{x}" == str(x)
    return x


def a_stream_that_is_used_twice(b: Blocks, x: Tensor) -> Tensor:
    x = x + b.mlp(b.norm(x))
    return torch.cat([x + b.attend(b.norm2(x)), x], 1)


def a_norm_without_weights_of_its_own(b: Blocks, x: Tensor) -> Tensor:
    x = x + b.mlp(b.norm(x))
    ones = torch.ones(16, dtype=x.dtype, device=x.device)
    return x + b.mlp(F.layer_norm(x, (16,), 2 * ones, ones))


def no_gradient_for_a_while(b: Blocks, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = b.norm(x)
    return x + b.mlp(y)


def numbers_first_without_gradient(b: Blocks, x: Tensor) -> Tensor:
    y = b.norm(x)
    with torch.no_grad():
        largest = y.amax()
    return x + b.mlp(y / largest)


CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
CODES: dict[str, tuple[Code, str]] = {
    "the sum the other way round": (lambda b, x: b.mlp(b.norm(x)) + x, "m"),
    "torch.add": (lambda b, x: torch.add(x, b.mlp(b.norm(x))), "m"),
    "a sum with a factor": (lambda b, x: torch.add(x, b.mlp(b.norm(x)), alpha=2), ""),
    "a sum in place": (lambda b, x: (1 * x).add_(b.mlp(b.norm(x))), ""),
    "a sum that broadcasts": (lambda b, x: x + b.to_one(F.gelu(b.fc1(b.norm(x)))), ""),
    "norm after the sum": (lambda b, x: b.norm2(x + b.mlp(b.norm(x))), "m"),
    "post-norm": (lambda b, x: b.norm(x + b.mlp(x)), ""),
    "norm of the branch": (lambda b, x: x + b.norm(b.mlp(x)), ""),
    "two norms": (lambda b, x: x + b.mlp(b.norm2(b.norm(x))), ""),
    "added to something else": (lambda b, x: 2 * x + b.mlp(b.norm(x)), ""),
    "one norm, two branches": (lambda b, x: x + b.mlp(y := b.norm(x)) + b.attend(y), "m"),
    "two branches, one sum": (lambda b, x: x + (b.mlp(y := b.norm(x)) + b.attend(y)), ""),
    "one branch, two sums": (lambda b, x: (x + (y := b.mlp(b.norm(x)))) * (x + y), "mm"),
    "weights that are used twice": (lambda b, x: (y := x + b.mlp(b.norm(x))) + b.mlp(b.norm(y)), "mm"),
    "a stream that is used twice": (a_stream_that_is_used_twice, "mam"),
    "scale on the left": (lambda b, x: x + b.scale * b.mlp(b.norm(x)), ""),
    "scale on the right": (lambda b, x: x + b.mlp(b.norm(x)) * b.scale, ""),
    "a parameter as the residual": (lambda b, x: b.scale + b.mlp(b.norm(x)), ""),
    "a matrix on its side": (lambda b, x: x + b.fc2(F.gelu(F.linear(b.norm(x), b.matrix.transpose(0, 1)))), "m"),
    "tied matrices": (lambda b, x: x + F.linear(F.gelu(b.fc1(b.norm(x))), b.fc1.weight.transpose(0, 1)), "m"),
    "a norm without weights of its own": (a_norm_without_weights_of_its_own, "m"),
    "a scale of attention": (lambda b, x: x + b.attend(b.norm(x), scale=0.7), "a"),
    "a scale of 0": (lambda b, x: x + b.attend(b.norm(x), scale=0.0), ""),
    "a negative scale": (lambda b, x: x + b.attend(b.norm(x), scale=-0.7), ""),
    "a mask": (lambda b, x: x + b.attend(b.norm(x), attn_mask=CAUSAL.to(x.device)), "a"),
    "a mask without its name": (lambda b, x: x + b.attend(b.norm(x), CAUSAL.to(x.device)), ""),
    "causal attention": (lambda b, x: x + b.attend(b.norm(x), is_causal=True), ""),
    "keys as queries": (lambda b, x: x + b.attend(b.norm(x), order=(1, 0, 2)), ""),
    "one token": (lambda b, x: b.norm(x)[:, :1], ""),
    "questions": (questions, "m"),
    "no gradient for a while": (no_gradient_for_a_while, ""),
}
"""What is done, and the branches that are fused."""
HIDING: dict[str, Code] = {
    "an autograd function": lambda b, x: x + Doubled.apply(b.mlp(b.norm(x))),
    "numbers first without gradient": numbers_first_without_gradient,
}


@pytest.mark.parametrize("name", CODES)
def test_code(device: torch.device, taken: list[str], check_stack: Any, name: str) -> None:
    code, expected = CODES[name]
    check_stack(lambda: Blocks(code), SIDE, device)
    assert "".join(taken) == expected


@pytest.mark.parametrize("settings", [{"eps": 0.0}, {"head_size": 12}], ids=str)
def test_settings(device: torch.device, taken: list[str], check_stack: Any, settings: Any) -> None:
    check_stack(lambda: Blocks(lambda b, x: x + b.attend(b.norm(x)), **settings), SIDE, device)
    assert taken == ["a"]


@pytest.mark.parametrize("name", HIDING)
def test_code_that_hides_where_a_result_comes_from(device: torch.device, check_stack: Any, name: str) -> None:
    """Autograd would lose the gradient of what waits. So such a model runs by `torch.vmap`, where nothing does."""
    check_stack(lambda: Blocks(HIDING[name]), SIDE, device, as_one_batch=False)


def test_after_an_error_nothing_waits(device: torch.device) -> None:
    def code(b: Blocks, x: Tensor) -> Tensor:
        assert isinstance(b.norm(x), Pending)
        raise ArithmeticError

    cell = Blocks(code)
    weights = stack_weights([dict(cell.named_parameters())], device)
    images = torch.randn(1, 2, 3, SIDE, SIDE, device=device)
    with pytest.raises(ArithmeticError), fusing(torch.float32):
        stacked_forward(weightless(cell), weights, images)

    def code_after(b: Blocks, x: Tensor) -> Tensor:
        assert not isinstance(b.norm(x), Pending)
        return x

    cell.code = code_after
    stacked_forward(weightless(cell), weights, images)


def test_without_kernels_nothing_waits(check_stack: Any, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "runs_on", lambda device: False)
    check_stack(lambda: Blocks(lambda b, x: x + b.mlp(b.norm(x))), SIDE, torch.device("cpu"))
    assert not taken
