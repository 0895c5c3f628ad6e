"""How inducers of locality live in a model: starts, training, files, copies, removal, what is refused."""

import copy
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from changed_attention import FAMILIES, output_of
from local_attention import bisected
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from nearsight import add_locality, add_locat, attention_maps, create_model, intervene, measure, remove_locality
from nearsight.errors import InputError
from nearsight.lens import Zero, induced, localities
from nearsight.locat import GaussianHeads
from nearsight.locat.inducers import LOCALITIES, Asked, Inducer, inducer_of, register_locality
from nearsight.locat.inducers.normalisers import entmax15

STARTING = [name for name, kind in LOCALITIES.items() if kind.starts_plain]
ABRUPT = [name for name, kind in LOCALITIES.items() if not kind.starts_plain]
SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 5}


def vit(name: str = "vit_tiny_patch16_224", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **{**SMALL, **settings})
    return model.eval()


def images(num: int = 4, side: int = 32) -> Tensor:
    return torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(1))


def seen(model: nn.Module, given: Tensor) -> Tensor:
    with torch.no_grad():
        return output_of(model(given))


# Starts


# "cpe" and "prr" know these alone.
OF_TIMM = ("vit", "vit-unfused", "registers", "eva", "swin")
MODELS = (*OF_TIMM, "pvt", "torchvision", "encoder-layers", "hf-ViT-sdpa", "hf-Beit-eager")


def on_models(quick: Sequence[str], names: Iterable[str]) -> list[Any]:
    """Each name on each model; some models with every run of the tests."""
    return [
        pytest.param(model, name, marks=() if model in quick else pytest.mark.slow)
        for model in MODELS
        for name in names
        if model in OF_TIMM or name not in ("cpe", "prr")
    ]


def known_model(family: str) -> nn.Module:
    if family.startswith("hf-"):
        pytest.importorskip("transformers")
    return FAMILIES[family].build().eval()


@pytest.mark.parametrize(("family", "name"), on_models(["vit", "swin", "torchvision", "encoder-layers"], STARTING))
def test_at_first_nothing_changes_and_soon_the_gate_does(family: str, name: str) -> None:
    known = FAMILIES[family]
    torch.manual_seed(0)
    model, pixels = known_model(family), known.images(4).float()
    before, names = seen(model, pixels), set(model.state_dict())
    assert add_locality(model, name, image_size=known.image_size) is model
    assert float((seen(model, pixels) - before).abs().max()) <= 1e-6 * float(before.abs().max())
    assert names < set(model.state_dict())
    gates = {
        name: weight
        for name, weight in model.named_parameters()
        if name not in names and name.endswith((".gate", ".table", "cpe.conv.weight"))
    }
    assert gates
    assert all(not weight.any() for weight in gates.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    toward = torch.randn(before.shape, generator=torch.Generator().manual_seed(2))
    model.train()
    for _ in range(10):
        optimizer.zero_grad()
        F.mse_loss(output_of(model(pixels)), toward).backward()
        optimizer.step()
    for weight in gates.values():
        assert weight.abs().max() > 1e-4


def test_those_without_such_a_start_say_so() -> None:
    assert set(STARTING) == {"gaug", "alibi2d", "gaussian", "relpos", "cpe"}
    for name in ABRUPT:
        model, pixels = vit(), images()
        before = seen(model, pixels)
        add_locality(model, name)
        assert float((seen(model, pixels) - before).abs().max()) > 1e-6, name
        said = " ".join((LOCALITIES[name].__doc__ or "").split())
        assert "at once" in said or "never 0" in said


# GAug on the models that add_locat knows


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_gaug_on_timms_models_is_that_of_add_locat(name: str) -> None:
    settings = {"window_size": 4, "patch_size": 4, "depths": (2,), "num_heads": (3,)} if "swin" in name else {}
    made = [
        timm.create_model(
            name, **{**({"img_size": 32, "num_classes": 5, "embed_dim": 24} if settings else SMALL), **settings}
        )
        for _ in range(2)
    ]
    ours, theirs = (model.eval() for model in made)
    theirs.load_state_dict(ours.state_dict())
    plain = seen(ours, images())
    add_locality(ours, "gaug", gate=1.0)
    add_locat(theirs, prr=False)
    assert {type(module) for module in ours.modules()} == {type(module) for module in theirs.modules()}
    theirs.load_state_dict({key: value for key, value in ours.state_dict().items() if not key.endswith("gaug.gate")})
    assert torch.allclose(seen(ours, images()), seen(theirs, images()), atol=1e-6)
    assert not torch.allclose(seen(ours, images()), plain, atol=1e-6)
    assert torch.equal(seen(remove_locality(ours), images()), plain)
    assert not any(isinstance(module, GaussianHeads) for module in ours.modules())


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_cpe_is_a_convolution_of_the_patches(name: str) -> None:
    is_swin = "swin" in name
    model = (
        timm.create_model(
            name, img_size=32, num_classes=5, embed_dim=24, window_size=4, depths=(2,), num_heads=(3,)
        ).eval()
        if is_swin
        else vit()
    )
    add_locality(model, "cpe", layers=[1])
    block: Any = model.layers[0].blocks[1] if is_swin else model.blocks[1]
    block.cpe.conv.weight.data.normal_()
    block.cpe.conv.bias.data.normal_()
    given, got = [], []
    block.norm1.register_forward_pre_hook(lambda _, args: got.append(args[0]))
    before: Any = model.layers[0].blocks[0] if is_swin else model.blocks[0]
    before.register_forward_hook(lambda _, args, output: given.append(output))
    seen(model, images(2))
    patches = given[0] if is_swin else given[0][:, 1:].unflatten(1, (4, 4))
    padded = F.pad(patches, (0, 0, 1, 1, 1, 1))
    rows, cols = patches.shape[1:3]
    expected = patches + block.cpe.conv.bias
    for down in range(3):
        for right in range(3):
            shifted = padded[:, down : down + rows, right : right + cols]
            expected = expected + block.cpe.conv.weight[:, 0, down, right] * shifted
    if not is_swin:
        expected = torch.cat([given[0][:, :1], expected.flatten(1, 2)], dim=1)
    assert torch.allclose(got[0], expected, atol=1e-5)


# Entmax


def test_entmax_is_that_of_bisection() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 10.0, 200.0):
        logits = scale * torch.randn(40, 17, generator=generator, dtype=torch.float64)
        logits[:20, 3:5] = -torch.inf
        logits[5] = 0.0
        found = entmax15(logits)
        assert torch.allclose(found, bisected(logits), atol=1e-12)
        assert torch.allclose(found.sum(-1), torch.ones(40, dtype=torch.float64))
        assert torch.allclose(entmax15(logits.float()), found.float(), atol=1e-5)
    assert not entmax15(torch.full((2, 3), -torch.inf)).any()


def test_the_gradient_of_entmax() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: entmax15(2 * z), logits)
    hidden = logits.detach().masked_fill(torch.eye(6, 9, dtype=torch.bool), -torch.inf).requires_grad_()
    entmax15(hidden)[:, 0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


# Files, copies, removal


@pytest.mark.parametrize(("family", "name"), on_models(["vit", "torchvision"], LOCALITIES))
def test_weights_are_saved_and_loaded_and_models_copied(family: str, name: str, tmp_path: Any) -> None:
    known = FAMILIES[family]

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = known_model(family)
        add_locality(model, name, image_size=known.image_size, **settings_on(family, name))
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        return model

    model, other, third = made(0), made(1), made(2)
    pixels = known.images().float()
    expected = seen(model, pixels)
    assert not torch.allclose(seen(other, pixels), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(seen(other, pixels), expected)
    save_model(model, str(tmp_path / "weights.safetensors"))
    load_model(third, str(tmp_path / "weights.safetensors"))
    assert torch.equal(seen(third, pixels), expected)
    twin = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    assert torch.equal(seen(twin, pixels), expected)
    assert localities(twin) == [name]
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(seen(loaded, pixels), expected)
    remove_locality(loaded)
    assert localities(loaded) == []
    assert torch.equal(seen(twin, pixels), expected)


def settings_on(family: str, name: str) -> dict[str, Any]:
    return {"radius": 9.0} if (family, name) == ("pvt", "neighborhood") else {}  # its keys are pooled from 8×8 patches


@pytest.mark.parametrize(("family", "name"), on_models(["vit", "torchvision"], LOCALITIES))
def test_a_model_is_afterwards_what_it_was(family: str, name: str) -> None:
    known, model = FAMILIES[family], known_model(family)
    pixels = known.images().float()
    names, hooks = list(model.state_dict()), hooks_of(model)
    before = seen(model, pixels)
    add_locality(model, name, image_size=known.image_size, **settings_on(family, name))
    assert localities(model) == [name]
    output_of(model.train()(pixels)).sum().backward()
    model.eval()
    remove_locality(model)
    assert torch.equal(seen(model, pixels), before)
    assert list(model.state_dict()) == names
    assert hooks_of(model) == hooks
    assert localities(model) == []
    assert not [key for module in model.modules() for key in vars(module) if key in ("forward", "_nearsight_locality")]


def hooks_of(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


def test_several_add_up() -> None:
    model, pixels = vit(), images()
    add_locality(model, "alibi2d", gate=1.0)
    alone = seen(model, pixels)
    add_locality(model, "neighborhood", radius=1.5)
    add_locality(model, "prr")
    assert localities(model) == ["prr", "alibi2d", "neighborhood"]
    assert not torch.allclose(seen(model, pixels), alone, atol=1e-6)
    with pytest.raises(InputError, match="has alibi2d already"):
        add_locality(model, "alibi2d")
    add_locality(model, "lsa")
    with pytest.raises(InputError, match="in place of its softmax already"):
        add_locality(model, "entmax15")


# Looking at what became local


def test_the_lens_sees_the_local_attention() -> None:
    model, pixels = vit(), images()
    plain = measure(model, pixels)
    add_locality(model, "neighborhood", radius=1.0)
    for maps in attention_maps(model, pixels):
        weights = maps.full()[:, :, 1:, 1:].unflatten(-1, (4, 4)).unflatten(2, (4, 4))
        assert not weights[:, :, 0, 0, 1:, 1:].any()
        assert weights[:, :, 0, 0, 0, 1].all()
    table = measure(model, pixels)
    assert table.layer_names == plain.layer_names
    assert (table.mad < plain.mad).all()
    local = seen(model, pixels)
    with intervene(model, Zero({1: None})):
        assert not torch.allclose(seen(model, pixels), local)
    assert torch.equal(seen(model, pixels), local)


@pytest.mark.parametrize("name", ["gpsa", "lsa", "entmax15"])
def test_the_lens_sees_what_stands_for_the_softmax(name: str) -> None:
    model, pixels = vit(), images()
    plain = measure(model, pixels)
    add_locality(model, name)
    table = measure(model, pixels)
    assert table.layer_names == plain.layer_names
    assert abs(table.mad - plain.mad).max() > 1e-4
    (first, _) = attention_maps(model, pixels)
    if name == "lsa":
        assert not first.full()[:, :, 1:, 1:].diagonal(dim1=-2, dim2=-1).any()
    if name == "entmax15":
        assert torch.allclose(first.full().sum(-1), torch.ones(4, 3, 17), atol=1e-5)


class Unshuffled(nn.Module):
    """Its first convolution has other channels than its images."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit(in_chans=12)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.vit(F.pixel_unshuffle(pixels, 2))
        return found


def test_images_may_be_transformed_before_the_first_convolution() -> None:
    model, pixels = Unshuffled().eval(), images(2, 64)
    before = seen(model, pixels)
    add_locality(model, "alibi2d", image_size=64, gate=1.0)
    assert not torch.allclose(seen(model, pixels), before, atol=1e-6)
    assert torch.equal(seen(remove_locality(model), pixels), before)


@torch.no_grad()
def test_parts_of_a_model_can_be_called() -> None:
    model: Any = vit(dynamic_img_size=True)
    add_locality(model, "alibi2d", gate=1.0)
    whole = seen(model, images())
    assert torch.equal(model.forward_head(model.forward_features(images())), whole)
    larger = model.forward_intermediates(images(2, 48))[0]
    assert torch.equal(model.forward_features(images()), model.forward_features(images()))
    again = model.forward_intermediates(images(2, 48))[0]
    assert all(torch.equal(*pair) for pair in zip(larger, again, strict=True))


# Circumstances


@pytest.mark.parametrize("name", ["gaug", "alibi2d", "gpsa"])
def test_many_queries_are_computed_some_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = vit(), images()
    layers = ["blocks.0.attn", "blocks.1.attn"]  # by name: not those of add_locat
    add_locality(model, name, layers=layers, gate=0.5)

    def results() -> list[Tensor]:
        given = pixels.clone().requires_grad_()
        output = model(given)
        weights = [weight for key, weight in model.named_parameters() if ".locality." in key]
        return [output, *torch.autograd.grad(output.square().sum(), [given, *weights])]

    whole = results()
    monkeypatch.setattr(induced, "TILE_BYTES", 2**10)
    calls = []
    kept: Callable[..., Any] = induced.asked_of_place
    monkeypatch.setattr(induced, "asked_of_place", lambda *args, **tokens: calls.append(args) or kept(*args, **tokens))
    for found, expected in zip(results(), whole, strict=True):
        assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4)
    assert len(calls) > 4


def test_blocks_that_run_again_in_the_backward_pass() -> None:
    model: Any = vit(dynamic_img_size=True)
    add_locality(model, "relpos")
    for key, weight in model.named_parameters():
        if key.endswith("table"):
            weight.data.normal_()
    weights = [weight for key, weight in model.named_parameters() if key.endswith("table")]
    expected = torch.autograd.grad(model(images()).square().sum(), weights)
    model.set_grad_checkpointing()
    model.train()
    output = model(images()).square().sum()
    seen(model, images(2, 48))  # images of another size in between
    found = torch.autograd.grad(output, weights)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))


def test_under_autocast_biases_are_in_full_precision() -> None:
    model, pixels = vit(), images()
    add_locality(model, "gpsa")
    full = seen(model, pixels)
    with torch.autocast("cpu", torch.bfloat16):
        half = seen(model, pixels)
    assert torch.allclose(half.float(), full, atol=0.05)


def test_after_inference_mode_a_model_can_be_trained() -> None:
    model = vit()
    add_locality(model, "alibi2d")
    with torch.inference_mode():
        model(images())
    model(images()).sum().backward()


# What is refused


def test_refusals_name_the_thing_and_the_way_out() -> None:
    with pytest.raises(InputError, match="did you mean 'alibi2d'"):
        add_locality(vit(), "alibi")
    with pytest.raises(InputError, match="alibi2d has no option 'radius'; it has gate"):
        add_locality(vit(), "alibi2d", radius=2)
    with pytest.raises(InputError, match=r"layer 7 is not one of the 2 layers"):
        add_locality(vit(), "alibi2d", layers=[7])
    with pytest.raises(InputError, match=r"2 radii were given, but blocks\.0\.attn is one of 3 heads"):
        add_locality(vit(), "neighborhood", radius=(1.0, 2.0), by="head")
    with pytest.raises(InputError, match="at least 0"):
        add_locality(vit(), "neighborhood", radius=-1)
    with pytest.raises(InputError, match="weights of VisionTransformer are on the meta device"):
        add_locality(vit().to("meta"), "alibi2d")
    convit = timm.create_model("convit_tiny", img_size=32, depth=2, embed_dim=24, num_heads=3, patch_size=8)
    with pytest.raises(InputError, match="changed after their softmax"):
        add_locality(convit, "alibi2d")
    resnet = create_model("compact_resnet18", channels=4)
    with pytest.raises(InputError, match="no attention was seen"):
        add_locality(resnet, "alibi2d", image_size=32)
    assert not hasattr(convit, "_nearsight_locality")
    shared: Any = vit()
    shared.blocks[1] = shared.blocks[0]
    with pytest.raises(InputError, match="its module runs 2 times in a forward"):
        add_locality(shared, "alibi2d")


def test_a_skipped_layer_is_refused_by_name_and_otherwise_left() -> None:
    model = timm.create_model("gcvit_xxtiny", img_size=64, window_size=(2, 2, 4, 2), num_classes=5).eval()
    table = measure(model, images(2, 64))
    skipped = next(iter(table.skipped))
    with pytest.raises(InputError, match=f"{skipped} is skipped: all windows share the same queries"):
        add_locality(model, "alibi2d", layers=[skipped], image_size=64)
    add_locality(model, "alibi2d", image_size=64)
    assert sum(isinstance(module, induced.Locality) for module in model.modules()) == len(table.layer_names)


def test_dropout_of_weights_in_memory_is_refused_when_it_happens() -> None:
    model: Any = vit(attn_drop_rate=0.2)
    for block in model.blocks:
        block.attn.fused_attn = False
    add_locality(model, "alibi2d", gate=1.0)
    assert seen(model, images()).isfinite().all()
    with pytest.raises(InputError, match="set the dropout of its attention to 0"):
        model.train()(images())


def test_another_way_to_compute_it_is_noticed() -> None:
    model: Any = vit()
    add_locality(model, "alibi2d")
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(InputError, match="in another way than when it was made local"):
        model(images())


def test_missing_patches_are_noticed() -> None:
    model: Any = vit()
    add_locality(model, "alibi2d")
    with pytest.raises(InputError, match="needs all patches of an image"):
        model.blocks[0](torch.randn(1, 9, 24))


# By name


def test_names_with_options() -> None:
    assert inducer_of("alibi2d") == LOCALITIES["alibi2d"]()
    found: Any = inducer_of("neighborhood:radius=(1.5,2),by=head")
    assert (found.radius, found.by) == ((1.5, 2.0), "head")
    for text in ("neighborhood:radius", "neighborhood:=1", "gaug:kernel=cubic"):
        with pytest.raises(InputError):
            inducer_of(text)


def test_a_new_one_is_one_class() -> None:
    @register_locality
    class Rows(Inducer):
        """Only keys of the same row; takes effect at once."""

        name = "rows"
        about = "keys of the same row"
        starts_plain = False

        def shown(self, own: Any, asked: Asked) -> Tensor:
            return (asked.steps[..., 0] == 0)[:, None]

    try:
        model = add_locality(vit(), "rows")
        (first, _) = attention_maps(model, images())
        to_row_1 = first.full()[:, :, 1:5, 5:]
        assert not to_row_1.any()
        with pytest.raises(ValueError, match="already"):
            register_locality(Rows)
    finally:
        del LOCALITIES["rows"]
