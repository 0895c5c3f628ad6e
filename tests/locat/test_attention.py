"""Models with LocAt against the paper written down in float64, in every family and variant, at two resolutions; and in
the stacked engine, where two at once give what each gives alone, gradients included.
"""

from typing import Any

import pytest
import timm
import torch
from locat_models import FAMILIES, attention_names, excite, papers, plain_model
from locat_paper import refined, written_down
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nearsight import add_locat
from nearsight.locat.attend import attend
from nearsight.locat.attention import attend_locally
from nearsight.train.stacked import runs_as_one_batch, stack_weights, stacked_forward, weightless

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def expected_logits(local: Any, batch: Tensor, plain: Any, **variant: Any) -> Tensor:
    model = written_down(local, plain, papers(local, batch, **variant))
    features = model.forward_features(batch)
    if features.dim() == 4:
        num_heads = model.layers[-1].blocks[-1].attn.attention.num_heads
        return model.head.fc(refined(features.flatten(1, 2), num_heads).mean(1))
    # Where a model normalises what it has pooled, that norm comes first (S2 §4.2: refinement is of normalised tokens).
    tokens = refined(model.fc_norm(features), model.blocks[-1].attn.attention.num_heads)
    pooled = tokens[:, 0] if model.global_pool == "token" else tokens[:, model.num_prefix_tokens :].mean(1)
    return model.head(pooled)


@pytest.mark.parametrize("size", [(40, 40), (64, 48)], ids=["training size", "larger"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "swin"])
def test_every_vit(family: str, size: tuple[int, int]) -> None:
    plain = plain_model(family)
    local = add_locat(plain_model(family)).double()
    excite(local)
    batch = images(*size)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain), **CLOSE)


@pytest.mark.parametrize("size", [(56, 56), (112, 84)], ids=["training size", "larger"])
def test_swin(size: tuple[int, int]) -> None:
    plain = plain_model("swin")
    local = add_locat(plain_model("swin")).double()
    excite(local)
    batch = images(*size)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain), **CLOSE)


def test_swin_with_another_window() -> None:
    plain, local = plain_model("swin"), add_locat(plain_model("swin")).double()
    excite(local)
    for model in (plain, local):
        model.set_input_size((40, 40), window_size=(5, 5))
    batch = images(40, 40)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain, initial=(7, 7)), **CLOSE)


VARIANTS: dict[str, dict[str, Any]] = {
    "laplace": {"kernel": "laplace"},
    "inverse": {"kernel": "inverse"},
    "input": {"width": "input"},
    "fixed": {"width": 1.5},
    "isotropic": {"isotropic": True},
    "isotropic laplace": {"isotropic": True, "kernel": "laplace"},
    "isotropic from the input": {"isotropic": True, "width": "input"},
    "no scale": {"scale": "none"},
    "auto": {"scale": "auto"},
    "fixed and automatic": {"width": 2.0, "scale": "auto", "kernel": "inverse"},
    "squared": {"resolution": "squared"},
}


@pytest.mark.parametrize("size", [(40, 40), (64, 48)], ids=["training size", "larger"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, size: tuple[int, int]) -> None:
    plain = plain_model("registers")
    local = add_locat(plain_model("registers"), **VARIANTS[variant]).double()
    excite(local)
    batch = images(*size)
    expected = expected_logits(local, batch, plain, **VARIANTS[variant])
    torch.testing.assert_close(local(batch), expected, **CLOSE)
    if size == (64, 48):
        default = expected_logits(add_locat(plain_model("registers")).double(), batch, plain)
        assert not torch.allclose(expected, default), "the variant changes nothing"


def test_variants_of_swin() -> None:
    plain = plain_model("swin")
    variant = {"kernel": "laplace", "width": "input", "scale": "auto"}
    local = add_locat(plain_model("swin"), **variant).double()
    excite(local)
    batch = images(56, 56)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain, **variant), **CLOSE)


def test_the_grid_that_widths_were_learned_on() -> None:
    plain = plain_model("vit")
    local = add_locat(plain_model("vit"), initial_grid=(3, 4)).double()
    excite(local)
    batch = images(40, 40)
    torch.testing.assert_close(local(batch), expected_logits(local, batch, plain, initial=(3, 4)), **CLOSE)


def test_a_grid_as_large_as_to_need_another_eps() -> None:
    """From 27 patches on EPS doubles, and from 116 on distances are clamped, too."""
    settings = {"patch_size": 1, "img_size": (2, 120), "depth": 1}
    plain = plain_model("vit", **settings)
    local = add_locat(plain_model("vit", **settings)).double()
    assert local.blocks[0].attn.gaug.eps == pytest.approx(0.8)
    excite(local)
    batch = images(2, 120)
    reference = written_down(
        local, plain, {name: paper.__class__((2, 120), (2, 120), 1) for name, paper in papers(local, batch).items()}
    )
    torch.testing.assert_close(local.forward_features(batch), reference.forward_features(batch), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_without_strength_and_refinement(family: str) -> None:
    plain = plain_model(family).double()
    local = add_locat(plain_model(family), prr=False).double()
    with torch.no_grad():
        for name in attention_names(local):
            head = local.get_submodule(name).gaug.log_alpha
            head.weight.zero_()
            head.bias.fill_(-1e4)
    batch = images(56, 56)
    torch.testing.assert_close(local(batch), plain(batch), rtol=1e-12, atol=1e-12)


def test_some_blocks_alone() -> None:
    plain, local = plain_model("vit", depth=3), add_locat(plain_model("vit", depth=3), blocks=[1]).double()
    assert [hasattr(block.attn, "gaug") for block in local.blocks] == [False, True, False]
    excite(local)
    batch = images(40, 40)
    reference = written_down(local, plain, {"blocks.1.attn": papers(local, batch)["blocks.1.attn"]})
    torch.testing.assert_close(local.forward_features(batch), reference.forward_features(batch), **CLOSE)


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
    reduced = stacked_forward(weightless(models[0]), weights, images, dtype=torch.bfloat16)
    exact = torch.stack([model(batch) for model, batch in zip(models, images, strict=True)])
    assert reduced.dtype == torch.float32
    assert (reduced - exact).norm() / exact.norm() < 0.05
