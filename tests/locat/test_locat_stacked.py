"""Models with LocAt in the stacked engine: two at once give what each gives alone, gradients included."""

from typing import Any

import pytest
import timm
import torch
from locat_models import excite
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nearsight import add_locat
from nearsight.locat.attend import attend
from nearsight.locat.attention import attend_locally
from nearsight.train.stacked import runs_as_one_batch, stack_weights, stacked_forward, weightless


def cells(**options: Any) -> list[nn.Module]:
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = timm.create_model("compact_vit", depth=2, embed_dim=32, num_heads=4, num_classes=5)
        add_locat(model, **options)
        excite(model, seed)
        made.append(model.double())
    return made


@pytest.mark.parametrize(
    "options",
    [{}, {"kernel": "laplace"}, {"width": "input", "isotropic": True}, {"width": 2.0, "scale": "auto"}, {"prr": False}],
    ids=str,
)
def test_outputs_and_gradients_equal_the_single_models(options: dict[str, Any]) -> None:
    models = cells(**options)
    skeleton = weightless(models[0])
    images = torch.randn(2, 3, 3, 32, 32, dtype=torch.float64)
    weights = stack_weights([dict(model.named_parameters()) for model in models], torch.device("cpu"))
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    outputs = stacked_forward(skeleton, weights, images)
    assert runs_as_one_batch(skeleton), "the heads use their weights in a way that the fast path does not know"
    gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()))
    for k, model in enumerate(models):
        output = model(images[k])
        torch.testing.assert_close(outputs[k], output, rtol=1e-10, atol=1e-11)
        expected = torch.autograd.grad(output.square().sum(), list(model.parameters()))
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient[k], wanted, rtol=1e-9, atol=1e-10)


def test_who_is_asked_what_happens_between_the_projections() -> None:
    """Tensors of a kind of their own, all of it. Whoever watches torch's functions sees the attention within."""

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    asked: list[Any] = []
    seen: list[Any] = []
    model = cells(prr=False)[0]
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    expected = model(images)
    with Watching():
        assert torch.equal(model(images), expected)
    assert seen.count(attend) == 2
    assert attend_locally not in seen
    assert torch.equal(model(images.as_subclass(Own)).as_subclass(Tensor), expected)
    assert asked.count(attend_locally) == 2


def test_with_products_in_bfloat16() -> None:
    models = [model.float() for model in cells()]
    images = torch.randn(2, 3, 3, 32, 32)
    weights = stack_weights([dict(model.named_parameters()) for model in models], torch.device("cpu"))
    reduced = stacked_forward(weightless(models[0]), weights, images, reduced=True)
    exact = torch.stack([model(batch) for model, batch in zip(models, images, strict=True)])
    assert reduced.dtype == torch.float32
    assert (reduced - exact).norm() / exact.norm() < 0.05
