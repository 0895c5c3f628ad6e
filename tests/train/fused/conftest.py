"""What tests of the kernels of training share."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.train.fused import pending
from nearsight.train.fused.branches import AttentionBranch, MlpBranch
from nearsight.train.fused.local_branch import LocalAttentionBranch
from nearsight.train.fused.positional_branch import PositionalBranch
from nearsight.train.optimizer import Arrangement
from nearsight.train.stacked import runs_as_one_batch, stack_weights, stacked_forward, weightless

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the largest number of a result."""


@pytest.fixture(params=["float32", "half"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Of products. The interpreter does not round to bfloat16, it cuts off."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    return torch.float32 if request.param == "float32" else half


def _assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "result") -> None:
    """Results are those of float64, up to the rounding of products in this dtype."""
    assert found.shape == expected.shape, what
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype], f"{what}: off by {error:.1e} of the largest"


@pytest.fixture
def near() -> Callable[..., None]:
    return _assert_near


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused branches that ran: "a" for attention, "l" for one with a local bias, "p" by positions, "m" for MLP."""
    ran: list[str] = []
    letters = {AttentionBranch: "a", LocalAttentionBranch: "l", PositionalBranch: "p", MlpBranch: "m"}

    def run_chain(rows: Tensor, chain: Any, *others: Any) -> Tensor:
        ran.extend(letters[type(branch)] for branch in chain)
        return original(rows, chain, *others)

    original = pending.run_chain
    monkeypatch.setattr(pending, "run_chain", run_chain)
    return ran


def _check_stack(
    make: Callable[[], nn.Module],
    image_size: int | tuple[int, int],
    device: torch.device,
    *,
    as_one_batch: bool = True,
    training: bool = False,
) -> None:
    """Outputs and all gradients of a fused stack of two models are those of each on its own, in float64."""
    cells = [make().train(training), make().train(training)]
    for parameter in (parameter for cell in cells for parameter in cell.parameters()):
        parameter.data.normal_(0.1, 0.3)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    images = torch.randn(2, 2, 3, height, width)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], device)
    arrangement = Arrangement({name: tuple(weight.shape[1:]) for name, weight in weights.items()})
    flat = torch.cat([weight.flatten(1) for weight in weights.values()], 1).requires_grad_()
    skeleton = weightless(cells[0])
    with pending.fusing(torch.float32):
        outputs = stacked_forward(skeleton, arrangement.views(flat), images.to(device))
    assert runs_as_one_batch(skeleton) == as_one_batch
    (gradient,) = torch.autograd.grad(outputs.square().sum(), flat)
    for k, cell in enumerate(cells):
        exact = cell.double()(images[k].double())
        _assert_near(outputs[k].cpu(), exact, torch.float32)
        parameters = dict(cell.named_parameters())
        wanted = torch.autograd.grad(exact.square().sum(), list(parameters.values()), materialize_grads=True)
        largest = max(float(of_one.abs().max()) for of_one in wanted)
        for name, of_one in zip(parameters, wanted, strict=True):
            error = (arrangement.views(gradient)[name][k].cpu() - of_one).abs().max() / largest
            assert error < TOLERANCE[torch.float32], f"gradient of {name}: off by {error:.1e} of the largest"


@pytest.fixture
def check_stack() -> Callable[..., None]:
    return _check_stack


def _check_reduced(
    name: str,
    num_cells: int,
    *,
    training: bool = False,
    tolerance: float = 0.03,
    reduced: torch.dtype = torch.bfloat16,
) -> None:
    """Outputs and gradients of a stack as the engine runs it on a GPU are those of float32, by their norms."""
    torch.manual_seed(0)
    cells = [timm.create_model(name, depth=2, num_classes=10).cuda() for _ in range(num_cells)]
    images = torch.randn(num_cells, 16, 3, 32, 32, device="cuda")
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], images.device)
    skeleton = weightless(cells[0]).train(training)
    results = []
    for dtype in (reduced, torch.float32):
        given = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        outputs = stacked_forward(skeleton, given, images, dtype=dtype)
        results.append([outputs, *torch.autograd.grad(outputs.square().sum(), list(given.values()))])
    for name_of_one, reduced_one, exact in zip(("outputs", *weights), *results, strict=True):
        error = (reduced_one - exact).norm() / exact.norm()
        assert error < tolerance, f"{name_of_one}: off by {error:.1e}"


@pytest.fixture
def check_reduced() -> Callable[..., None]:
    return _check_reduced
