"""What tests of the kernels share.

Triton settles when a kernel is defined whether its interpreter runs it. So a test that takes `device` is two. On a GPU
it runs as any test. On the CPU it runs in a process that has TRITON_INTERPRET set, one for all such tests, and here it
only says how it went there.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nearsight.train.fused import pending
from nearsight.train.fused.branches import AttentionBranch
from nearsight.train.optimizer import Arrangement
from nearsight.train.stacked import runs_as_one_batch, stack_weights, stacked_forward, weightless
from nearsight.triton_language import INTERPRETED, triton

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF = {CPU: torch.float16, GPU: torch.bfloat16}  # the interpreter does not round to bfloat16, it cuts off
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the largest number of a result."""
_outcomes = pytest.StashKey[dict[str, str]]()


@pytest.fixture(params=[CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    if triton is None:
        pytest.skip("Triton is not installed")
    which: torch.device = request.param
    torch.manual_seed(0)
    return which


@pytest.fixture(params=["float32", "half"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Of products."""
    return torch.float32 if request.param == "float32" else HALF[device]


def _is_interpreted(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("device") is CPU


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETED or not _is_interpreted(pyfuncitem):
        return None
    if _outcomes not in pyfuncitem.config.stash:
        pyfuncitem.config.stash[_outcomes] = _run_interpreted(pyfuncitem.session)
    outcome = pyfuncitem.config.stash[_outcomes][pyfuncitem.nodeid]
    if outcome:
        pytest.fail(outcome, pytrace=False)
    return True


def _run_interpreted(session: pytest.Session) -> dict[str, str]:
    """What went wrong with each test that this session selected; nothing, if all is well."""
    names = [item.nodeid for item in session.items if _is_interpreted(item)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "outcomes.json"
        finished = subprocess.run(
            [sys.executable, __file__, str(answer), *names],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=session.config.rootpath,
            capture_output=True,
            text=True,
            check=False,
        )
        told: dict[str, str] = json.loads(answer.read_text()) if answer.exists() else {}
    return {name: told.get(name, f"did not run:\n{finished.stdout}\n{finished.stderr}") for name in names}


class _Outcomes(dict[str, str]):
    """A plugin of the process with the interpreter, and what it has to tell."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self[report.nodeid] = self.get(report.nodeid, "") + (report.longreprtext if report.failed else "")


class Memory(TorchDispatchMode):
    """New tensors lie between NaNs that nobody may write, and are NaN until they are written.

    Whoever reads past an end, or forgets a place, gets a NaN for it.
    """

    MARGIN = 1 << 16  # numbers; more than a tile
    EMPTY = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    )

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.given: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return self._like(made) if func in self.EMPTY and made.numel() and made.is_floating_point() else made

    def _like(self, tensor: Tensor) -> Tensor:
        size = tensor.numel()
        whole = torch.full((size + 2 * self.MARGIN,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        self.given.append((whole, size))
        return whole[self.MARGIN : self.MARGIN + size].view(tensor.shape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
        """Random numbers."""
        numbers = torch.randn(shape) + mean
        return self._like(numbers.to(self.device, dtype)).copy_(numbers)

    def check(self) -> None:
        for whole, size in self.given:
            assert whole[: self.MARGIN].isnan().all(), "written before a tensor's first number"
            assert whole[self.MARGIN + size :].isnan().all(), "written past a tensor's last number"


@pytest.fixture
def memory(device: torch.device) -> Iterator[Memory]:
    with Memory(device) as memory:
        yield memory
    memory.check()


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
    """The fused branches that ran: "a" for attention, "m" for MLP."""
    ran: list[str] = []

    def run_chain(rows: Tensor, chain: Any, *others: Any) -> Tensor:
        ran.extend("a" if isinstance(branch, AttentionBranch) else "m" for branch in chain)
        return original(rows, chain, *others)

    original = pending.run_chain
    monkeypatch.setattr(pending, "run_chain", run_chain)
    return ran


def _check_stack(
    make: Callable[[], nn.Module], image_size: int, device: torch.device, *, as_one_batch: bool = True
) -> None:
    """Outputs and all gradients of a fused stack of two models are those of each on its own, in float64."""
    cells = [make().eval(), make().eval()]
    for parameter in (parameter for cell in cells for parameter in cell.parameters()):
        parameter.data.normal_(0.1, 0.3)
    images = torch.randn(2, 2, 3, image_size, image_size)
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


if __name__ == "__main__":
    outcomes = _Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[outcomes])
    Path(sys.argv[1]).write_text(json.dumps(outcomes))
