"""Heads under plans, against maps that are changed row by row by hand (`changed_attention`), in float64."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from changed_attention import (
    FAMILIES,
    Family,
    by_hand,
    changed_map,
    expected_output,
    maps_by_hand,
    output_of,
    sinks_of,
)
from torch import Tensor, nn

from nearsight import attention_maps, intervene, measure
from nearsight.errors import InputError
from nearsight.lens import DropSinks, Identity, Mean, Offsets, OnlySinks, Plan, Reach, Uniform, Zero, average_maps
from nearsight.lens.intervene import intervening
from nearsight.metrics import attention_distance

BASE: dict[str, Callable[..., Plan]] = {
    "zero": lambda family, heads: Zero(heads),
    "identity": lambda family, heads: Identity(heads),
    "uniform": lambda family, heads: Uniform(heads),
    "reach": lambda family, heads: Reach(family.reach, heads),
    "beyond": lambda family, heads: Reach(1.5, heads, beyond=True),
    "mean": lambda family, heads: Mean(family.images(3, seed=5), heads),
    "offsets": lambda family, heads: Offsets(family.images(3, seed=5), heads),
    "drop-sinks": lambda family, heads: DropSinks(heads),
    "only-sinks": lambda family, heads: OnlySinks(heads),
}
OPTIONS: dict[str, Callable[..., Plan]] = {
    "identity, drop": lambda family, heads: Identity(heads, prefix="drop"),
    "uniform, drop": lambda family, heads: Uniform(heads, prefix="drop"),
    "uniform, all rows": lambda family, heads: Uniform(heads, rows="all"),
    "reach, share": lambda family, heads: Reach(family.reach, heads, prefix="share"),
    "reach, drop": lambda family, heads: Reach(family.reach, heads, prefix="drop"),
    "beyond, share": lambda family, heads: Reach(1.5, heads, beyond=True, prefix="share"),
    "mean, drop, all rows": lambda family, heads: Mean(family.images(3, seed=5), heads, prefix="drop", rows="all"),
    "offsets, drop": lambda family, heads: Offsets(family.images(3, seed=5), heads, prefix="drop"),
    "drop-sinks, share, all rows": lambda family, heads: DropSinks(heads, prefix="share", rows="all"),
    "drop-sinks, drop": lambda family, heads: DropSinks(heads, prefix="drop"),
    "only-sinks, share": lambda family, heads: OnlySinks(heads, prefix="share"),
    "only-sinks, drop, all rows": lambda family, heads: OnlySinks(heads, prefix="drop", rows="all"),
}
CASES = [(name, plan) for name, family in FAMILIES.items() for plan in BASE if plan not in family.without]
CASES += [(name, plan) for name in ("vit", "vit-unfused", "registers", "torchvision") for plan in OPTIONS]
VIT = FAMILIES["vit"]


def made(name: str) -> tuple[Family, nn.Module, Tensor]:
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    family = FAMILIES[name]
    return family, family.model(), family.images()


def under(model: nn.Module, plans: Plan | list[Plan], images: Tensor) -> Tensor:
    with torch.no_grad(), intervene(model, plans):
        return output_of(model(images))


def plain(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return output_of(model(images))


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= tolerance * scale


# Exactness


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_outputs_are_those_of_maps_changed_by_hand(name: str, plan: str) -> None:
    family, model, images = made(name)
    one = {**BASE, **OPTIONS}[plan](family, family.chosen)
    with torch.no_grad():
        expected = expected_output(family, model, images, [one])
    before = plain(model, images)
    assert float((expected - before).abs().max()) > 1e-4 * float(before.abs().max())  # a wrong plan would show
    assert_same(under(model, one, images), expected, family.tolerance)
    assert torch.equal(plain(model, images), before)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "drop-sinks" not in family.without])
def test_there_are_sinks_to_drop(name: str) -> None:
    family, model, images = made(name)
    maps = maps_by_hand(family, model, images)
    found = [
        sum(map(len, sinks_of(maps[int(layer)][image, :, head], *family.places(int(layer)))))
        for layer, heads in family.chosen.items()
        for head in heads or []
        for image in range(len(images))
    ]
    assert any(found)


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_all_heads_of_all_layers(name: str) -> None:
    family, model, images = made(name)
    with torch.no_grad():
        expected = expected_output(family, model, images, [Identity()])
    assert_same(under(model, Identity(), images), expected)


@pytest.mark.parametrize(
    "plan", ["reach", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("zero", "uniform", "drop-sinks"))]
)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "drop-sinks" not in family.without])
def test_plans_for_images_of_a_batch_are_each_alone(name: str, plan: str) -> None:
    """Those of other heads go on from one another and are changed as one; the next to last one does not."""
    family, model, images = made(name)
    layer = next(iter(family.chosen))
    heads = [*range(np.isfinite(measure(model, images).mad[int(layer)]).sum())][:3]
    plans = [BASE[plan](family, {layer: [head]}) for head in (*heads, heads[0])]
    plans.insert(-1, Reach(1.5, {layer: [0]}, beyond=True))
    size = len(images)
    groups = [(one, slice(number * size, (number + 1) * size)) for number, one in enumerate(plans)]
    with torch.no_grad(), intervening(model, groups):
        found = output_of(model(images.repeat(len(plans), 1, 1, 1)))
    for one, (_, its) in zip(plans, groups, strict=True):
        assert_same(found[its], under(model, one, images), family.tolerance)


@pytest.mark.parametrize("plan", [Reach(2.0, {0: [1], 1: [0, 2]}), Identity({0: [1], 1: None})])
@pytest.mark.parametrize("name", ["vit", "vit-unfused", "eva", "torchvision", "encoder-layers"])
def test_gradients_are_those_of_maps_changed_by_hand(name: str, plan: Plan) -> None:
    family, model, images = made(name)
    weights = list(model.parameters())
    direction = torch.randn_like(plain(model, images))

    def gradients(output: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad((output * direction).sum(), weights, allow_unused=True))

    expected = gradients(expected_output(family, model, images, [by_number(plan)]))
    with intervene(model, plan):
        found = gradients(model(images))
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def by_number(plan: Plan) -> Plan:
    """With all heads of a layer spelled out, as the reference takes them."""
    assert plan.heads is not None
    plan.heads = {layer: [0, 1, 2] if heads is None else heads for layer, heads in plan.heads.items()}
    return plan


@pytest.mark.parametrize("name", ["vit", "vit-unfused", "swin", "pvt", "torchvision", "registers", "locat"])
def test_average_maps_are_means_of_maps(name: str) -> None:
    family, model, images = made(name)
    maps = attention_maps(model, images, dtype=torch.float64)
    by_hand = maps_by_hand(family, model, images)
    found = average_maps(model, images, batch_size=1)
    assert found.num_images == len(images)
    for number, layer in enumerate(maps):
        average_WHNM = torch.stack([found.weights[layer.name][head] for head in sorted(found.weights[layer.name])], 1)
        torch.testing.assert_close(average_WHNM, by_hand[number].mean(0), rtol=0, atol=1e-12)
        if average_WHNM.shape[0] == 1:
            torch.testing.assert_close(average_WHNM[0], torch.as_tensor(layer.full()).mean(0), rtol=0, atol=1e-12)


# Leaving


def state_of(model: nn.Module) -> list[Any]:
    """What a module is, but for the values of its weights."""
    return [
        (
            name,
            type(module),
            module.training,
            {k: v for k, v in vars(module).items() if not k.startswith("_")},
            *(dict(hooks) for hook, hooks in vars(module).items() if "_hooks" in hook and hooks is not None),
        )
        for name, module in model.named_modules()
    ]


@pytest.fixture(params=["vit", "vit-unfused", "swin", "torchvision", "encoder-layers", "locat"])
def left(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Tensor]]:
    """A model to change, which is afterwards as it was."""
    _, model, images = made(request.param)
    model.train()
    next(model.children()).eval()
    state, weights = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    yield model, images
    assert state_of(model) == state
    assert list(weights) == list(model.state_dict())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_nothing_stays(left: tuple[nn.Module, Tensor]) -> None:
    model, images = left
    generator = torch.get_rng_state()
    with intervene(model, Identity({1: [0]})):
        model(images)
    torch.set_rng_state(generator)  # a model in training draws from it


def test_nothing_stays_after_an_error(left: tuple[nn.Module, Tensor]) -> None:
    model, images = left
    with pytest.raises(ZeroDivisionError), intervene(model, Identity({1: [0]})):
        1 / 0  # noqa: B018
    with pytest.raises(InputError), intervene(model, Identity({1: [77]})):
        model(images)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["vit", "torchvision", "encoder-layers"])
def test_nothing_stays_after_an_interrupt_in_a_layer(name: str, error: type[BaseException]) -> None:
    _, model, images = made(name)
    before, state = plain(model, images), state_of(model)
    plan = Identity({0: [0]})
    expected = under(model, plan, images)
    last = [module for module in model.modules() if isinstance(module, nn.LayerNorm)][-1]

    def stop(*_: Any) -> None:
        raise error

    with torch.no_grad(), intervene(model, plan):
        model(images)
        handle = last.register_forward_pre_hook(stop)
        with pytest.raises(error):
            model(images)
        handle.remove()
        assert torch.equal(output_of(model(images)), expected)  # and it goes on
    assert torch.equal(plain(model, images), before)
    assert state_of(model) == state


@pytest.mark.parametrize("name", ["vit", "eva", "swin", "locat"])
def test_other_heads_are_the_same_to_the_bit(name: str) -> None:
    family, model, images = made(name)
    attention = next(filter(family.is_attention, model.modules()))
    seen: list[Tensor] = []
    attention.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    plain(model, images)
    seen_plain = seen[-1].unflatten(-1, (attention.num_heads, -1))
    under(model, Uniform({0: [1]}), images)
    changed = seen[-1].unflatten(-1, (attention.num_heads, -1))
    others = [head for head in range(attention.num_heads) if head != 1]
    assert torch.equal(changed[..., others, :], seen_plain[..., others, :])
    assert not torch.equal(changed[..., 1, :], seen_plain[..., 1, :])


# Nested, in threads, compiled


@pytest.mark.parametrize(
    "name", ["vit", "vit-unfused", "registers", "swin", "torchvision", "encoder-layers", "hf-ViT-sdpa"]
)
@pytest.mark.parametrize("layer", [0, 1])
def test_nested_is_both_plans(name: str, layer: int) -> None:
    """On other heads of the same layer, and on another layer."""
    _, model, images = made(name)
    outer, inner = Identity({0: [0]}), Reach(2.0, {layer: [1]})
    together = under(model, [outer, inner], images)
    with torch.no_grad(), intervene(model, outer):
        alone = output_of(model(images))
        with intervene(model, inner):
            assert_same(output_of(model(images)), together)
        assert torch.equal(output_of(model(images)), alone)
        with pytest.raises(InputError, match="head 0 is in two plans"), intervene(model, Zero({0: [0]})):
            model(images)
    assert not torch.equal(alone, together)


@pytest.mark.parametrize("name", ["vit", "vit-unfused", "torchvision", "encoder-layers"])
@pytest.mark.parametrize("ran_before", [True, False])
def test_measure_sees_what_the_change_does_to_later_layers(name: str, ran_before: bool) -> None:
    """And of the changed heads their own maps."""
    family, model, images = made(name)
    plan, before = Uniform({0: [0, 1, 2]}), measure(model, images, precision="float64")
    maps: dict[int, Tensor] = {}

    def change(layer: int, weights_BWHNM: Tensor) -> Tensor:
        maps[layer] = weights_BWHNM
        return weights_BWHNM if layer else changed_map(plan, [0, 1, 2], weights_BWHNM, *family.places(0), None)

    with torch.no_grad(), by_hand(family, model, change):
        model(images)
    with intervene(model, plan):
        if ran_before:
            model(images)
        found = measure(model, images, precision="float64")
    rows, cols = (side // 8 for side in family.image_size)
    for layer, weights_BWHNM in maps.items():
        expected = attention_distance(weights_BWHNM[:, 0], (rows, cols)).mean(0)
        np.testing.assert_allclose(found.mad[layer], expected.numpy(), rtol=1e-9)
    assert np.abs(found.mad[1] - before.mad[1]).max() > 1e-6
    np.testing.assert_array_equal(measure(model, images, precision="float64").mad, before.mad)


@pytest.mark.parametrize("name", ["vit", "torchvision"])
@pytest.mark.parametrize("others", ["plain", "another plan"])
def test_threads(name: str, others: str) -> None:
    """Threads that run the same model at once get each what it asked for."""
    _, model, images = made(name)
    plans: list[Plan | None] = [Identity({0: [0]}), None if others == "plain" else Reach(2.0, {0: [1], 1: None})]
    expected = [plain(model, images) if plan is None else under(model, plan, images) for plan in plans]
    ready = threading.Barrier(2)

    def run(which: int) -> list[Tensor]:
        ready.wait()
        plan = plans[which]
        if plan is None:
            return [plain(model, images) for _ in range(40)]
        found = []
        for _ in range(2):
            with torch.no_grad(), intervene(model, plan):
                found += [output_of(model(images)) for _ in range(5)]
        return found

    with ThreadPoolExecutor(2) as pool:
        for found, wanted in zip(pool.map(run, range(2)), expected, strict=True):
            assert all(torch.equal(one, wanted) for one in found)


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_a_compiled_model(name: str) -> None:
    _, model, images = made(name)
    compiled = torch.compile(model, backend="eager")
    before, plan = plain(compiled, images), Identity({0: [0]})
    expected = under(model, plan, images)
    assert torch.equal(under(compiled, plan, images), expected)
    assert torch.equal(plain(compiled, images), before)


# Sizes, types and calls


@pytest.mark.parametrize("fused", [True, False])
def test_images_of_several_sizes(fused: bool) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, dynamic_img_size=True)
    model = model.double().eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    batches = [torch.randn(count, 3, *size).double() for count, size in ((1, (64, 96)), (3, (96, 64)), (2, (64, 96)))]
    plan = Reach(1.5, {0: [0], 1: None})
    expected = [under(model, plan, batch) for batch in batches]
    with torch.no_grad(), intervene(model, plan):
        for _ in range(2):
            for batch, wanted in zip(batches, expected, strict=True):
                assert torch.equal(model(batch), wanted)


@pytest.mark.parametrize("plan", ["identity", "reach", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "autocast"])
@pytest.mark.parametrize("name", ["vit", "vit-unfused", "torchvision"])
def test_other_types(name: str, dtype: torch.dtype | str, plan: str) -> None:
    """As far from float64 as the plain model is, or a little more."""
    family = replace(FAMILIES[name], gain=1.0 if name == "torchvision" else 4.0)
    model, images, maker = family.model(), family.images(), BASE[plan]
    exact, exact_plain = under(model, maker(family, family.chosen), images), plain(model, images)
    autocast = dtype == "autocast"
    kind = torch.float32 if not isinstance(dtype, torch.dtype) else dtype
    model, images = model.to(kind), images.to(kind)
    one = maker(family, family.chosen)
    if isinstance(one, Mean):
        assert isinstance(one.reference, Tensor)
        one.reference = one.reference.to(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, found_plain = under(model, one, images), plain(model, images)
    assert found.dtype == found_plain.dtype
    usual = float((found_plain.double() - exact_plain).abs().max())
    assert float((found.double() - exact).abs().max()) < 10 * usual + 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_of_huggingface_called_by_name(implementation: str) -> None:
    _, model, images = made(f"hf-ViT-{implementation}")
    plan = Uniform({0: [1]}, prefix="drop", rows="all")
    expected = under(model, plan, images)
    with torch.no_grad(), intervene(model, plan):
        assert torch.equal(model(pixel_values=images).last_hidden_state, expected)
        assert torch.equal(model(images, output_hidden_states=True).last_hidden_state, expected)


def test_weights_that_torch_returns_are_the_changed_ones() -> None:
    """`nn.MultiheadAttention` with `need_weights`."""
    family, model, images = made("torchvision")
    seen: list[Tensor] = []
    attention = next(filter(family.is_attention, model.modules()))
    forward = attention.forward
    attention.forward = lambda *args, **_: forward(*args, need_weights=True, average_attn_weights=False)  # type: ignore[assignment]
    attention.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
    with torch.no_grad(), intervene(model, Identity({0: [1]}, prefix="drop")):
        model(images)
    torch.testing.assert_close(seen[-1][:, 1, 1:, 1:], torch.eye(36).double().expand(2, -1, -1))
    torch.testing.assert_close(seen[-1].sum(-1), torch.ones(2, 3, 37).double())


# Errors


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: Identity({0: [3]}), "has 3 heads, which count from 0: there is no head 3"),
        (lambda: Identity({0: [-1]}), "there is no head -1"),
        (lambda: Identity({2: [0]}), "2"),
        (lambda: Identity({"nowhere": [0]}), "nowhere"),
        (lambda: Identity([0]), "mapping from layers to heads"),
        (lambda: Identity(prefix="share"), "nothing to share"),
        (lambda: Identity(rows="all"), "leave out rows='all'"),
        (lambda: Identity(prefix="lose"), "prefix is one of keep, share, drop"),
        (lambda: Uniform(rows="some"), "rows is one of patches, all"),
        (lambda: Reach(float("nan")), "0 or more"),
        (lambda: Reach(-1), "0 or more"),
        (lambda: Reach({0: [1]}), "Reach\\(1.5"),
        (lambda: Reach("far"), "0 or more"),
        (lambda: Reach(50, beyond=True), "take another reach"),
        (lambda: Mean(None), "images to average over"),
        (lambda: Mean({0: [1]}), "images to average over"),
        (lambda: Mean(average_maps(VIT.model(), VIT.images(), {0: [0]}), {0: [1]}), "no average map of its head 1"),
        (lambda: [Identity({0: [0]}), Uniform({0: None})], "head 0 is in two plans"),
        (lambda: "identity", "a plan is one of nearsight.lens"),
        (lambda: [Identity, Zero()], "a plan is one of nearsight.lens"),
        (lambda: Identity({0: 1}), "heads"),
        (lambda: Identity({0: ["a"]}), "heads"),
    ],
)
def test_errors_say_what_to_do(plan: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        under(VIT.model(), plan(), VIT.images())
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_changed() -> None:
    pvt = FAMILIES["pvt"]
    with pytest.raises(InputError, match="keys are pooled; use Reach"):
        under(pvt.model(), Identity(), pvt.images())
    with pytest.raises(InputError, match="no patch within 1 to attend to"):
        under(pvt.model(), Reach(1.0), pvt.images())
    with pytest.raises(InputError, match="no attention"):
        under(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), Identity(), VIT.images().float())
    with pytest.raises(InputError, match="model"):
        under("vit", Identity(), VIT.images())  # type: ignore[arg-type]


@pytest.mark.parametrize("ran_before", [True, False])
def test_calls_that_go_around_the_model_are_refused(ran_before: bool) -> None:
    model, images = VIT.model(), VIT.images()
    with torch.no_grad(), intervene(model, Zero({0: [0]})):
        if ran_before:
            model(images)
        for call in (model.forward, model.forward_features, model.patch_embed):
            with pytest.raises(InputError, match="when it is called itself"):
                call(images)
    model.forward_features(images)


def test_average_maps_of_another_size() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, dynamic_img_size=True).eval()
    averages = average_maps(model, torch.randn(1, 3, 64, 96))
    with pytest.raises(InputError, match="of another size"):
        under(model, Mean(averages), torch.randn(1, 3, 64, 64))
    with pytest.raises(InputError, match="images of one size"):
        average_maps(model, [torch.randn(1, 3, 64, 96), torch.randn(1, 3, 64, 64)])
