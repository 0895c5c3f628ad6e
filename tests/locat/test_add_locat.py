"""`add_locat` on the models people have: what stays, what comes, what is refused, and what goes on working."""

import copy
import inspect
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.multiprocessing as mp
from locat_models import FAMILIES, excite, local_vit, plain_model, write_gradients
from safetensors.torch import load, save
from timm.models.eva import Eva
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nearsight
from nearsight import add_locat
from nearsight.errors import InputError


def local_model(family: str = "vit", **options: Any) -> Any:
    model = add_locat(plain_model(family), **options)
    excite(model)
    return model


def images_for(family: str = "vit", num: int = 2) -> Tensor:
    size = 56 if family == "swin" else 40
    return torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(5))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_object_with_the_same_weights(family: str) -> None:
    model = plain_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    hook = model.register_forward_hook(lambda *_: None)
    assert add_locat(model) is model
    after = model.state_dict()
    for name, weight in before.items():
        assert torch.equal(after.pop(name), weight), name
    assert {name.split(".attn.")[1] for name in after} == {
        f"gaug.{head}.{part}" for head in ("log_var", "log_alpha") for part in ("weight", "bias")
    }
    hook.remove()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_base_patch16_224", {}, 2340),
        ("vit_tiny_patch16_224", {}, 2340),
        ("vit_base_patch16_224", {"isotropic": True}, 12 * (65 + 65)),
        ("vit_base_patch16_224", {"scale": "auto"}, 12 * 130),
        ("vit_base_patch16_224", {"scale": "none"}, 12 * 130),
        ("vit_base_patch16_224", {"width": 5.0}, 12 * 65),
        ("vit_base_patch16_224", {"width": 5.0, "scale": "none"}, 0),
        ("vit_base_patch16_224", {"width": "input"}, 12 * (769 * 24 + 65)),
        ("vit_base_patch16_224", {"gaug": False}, 0),
        ("vit_base_patch16_224", {"blocks": (0, 3, 0)}, 2 * 195),
        ("swin_tiny_patch4_window7_224", {}, 12 * 3 * 33),
    ],
)
def test_parameter_counts(name: str, options: dict[str, Any], expected: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
        before = count(model)
        add_locat(model, **options)
    assert count(model) - before == expected


def test_heads_start_near_a_variance_of_one_and_a_strength_of_ln_two() -> None:
    torch.manual_seed(0)
    model = add_locat(timm.create_model("vit_tiny_patch16_224", depth=1))
    gaug = model.blocks[0].attn.gaug
    assert gaug.log_var.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert not gaug.log_var.bias.any()
    assert not gaug.log_alpha.bias.any()
    extra = nearsight.measure(model.eval(), torch.randn(1, 3, 224, 224), what=["gaussians"]).extra
    assert extra["sigma_rows"].flatten() == pytest.approx([1.0] * 3, rel=0.02)
    assert extra["alpha"].flatten() == pytest.approx([0.6931] * 3, rel=0.02)


@pytest.mark.parametrize("family", ["vit", "rope", "swin"])
def test_files_copies_and_pickles(family: str) -> None:
    model, batch = local_model(family).eval(), images_for(family)
    expected = model(batch)
    other = add_locat(plain_model(family)).eval()
    assert not torch.allclose(other(batch), expected)
    other.load_state_dict(load(save(model.state_dict())))
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for again in (other, copied, pickled):
        assert torch.equal(again(batch), expected)
    if family == "swin":
        return
    # A copy keeps its own record of grids.
    larger = torch.randn(1, 3, 64, 48)
    assert torch.equal(copied(larger), pickled(larger))
    assert torch.equal(copied(larger), model(larger))
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    assert torch.equal(torch.load(written, weights_only=False)(batch), expected)


def test_images_of_two_shapes_with_as_many_patches() -> None:
    model = local_model().eval()
    wide, tall = torch.randn(1, 3, 32, 64), torch.randn(1, 3, 64, 32)
    alone = [copy.deepcopy(model)(batch) for batch in (wide, tall)]
    for batch, expected in ((wide, alone[0]), (tall, alone[1]), (wide, alone[0])):
        assert torch.equal(model(batch), expected)
    turned = copy.deepcopy(model).blocks[0].attn
    assert turned.grids.grid(33) == nearsight.locat.Grid(4, 8, 1)


def test_one_compiled_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = local_model(), images_for()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (compiled, model):
        output = run(batch)
        results.append((output, torch.autograd.grad(output.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    compiled(batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["vit", "qk-norm", "rope", "eva", "swin"])
def test_autocast(family: str, dtype: torch.dtype) -> None:
    model, batch = local_model(family), images_for(family)
    expected = model(batch)
    with torch.autocast("cpu", dtype):
        output = model(batch)
    assert output.dtype == dtype
    output.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert (output - expected).norm() / expected.norm() < (0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize("family", ["vit", "rope", "swin"])
def test_activation_checkpointing(family: str) -> None:
    """Also when images of another size have passed in between."""
    model = local_model(family).train()
    batches = [images_for(family)] + (
        [] if family == "swin" else [torch.randn(1, 3, 64, 48), torch.randn(1, 3, 24, 40)]
    )
    gradients = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        loss = sum(model(batch).square().sum() for batch in batches)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(("family", "every"), [("vit", 1), ("vit", 2), ("rope", 1)])
def test_activation_checkpointing_of_shapes_with_as_many_patches(family: str, every: int) -> None:
    model = local_model(family).train()
    batches = [torch.randn(1, 3, *size) for size in ((32, 64), (64, 32), (16, 128))]

    def gradients() -> tuple[Tensor, ...]:
        loss = sum(model(batch).square().sum() for batch in batches)
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    if every == 1:
        model.set_grad_checkpointing(True)
    else:  # both blocks as one
        model.blocks = nn.Sequential(Together(model.blocks))
    torch.testing.assert_close(gradients(), expected)


class Together(nn.Module):
    """Blocks that run again together."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks, x, use_reentrant=False)


def test_reentrant_checkpointing_of_such_shapes_is_refused() -> None:
    """It runs blocks again on copies, which cannot say whose patches they are."""
    model = local_model("vit").train()
    model.set_grad_checkpointing(True)
    was = timm.layers.use_reentrant_ckpt()
    timm.layers.set_reentrant_ckpt(True)
    try:
        (model(torch.randn(1, 3, 32, 64)).sum() + model(torch.randn(1, 3, 40, 40)).sum()).backward()
        loss = model(torch.randn(1, 3, 32, 64)).sum() + model(torch.randn(1, 3, 64, 32)).sum()
        with pytest.raises(InputError, match="that is not reentrant"):
            loss.backward()
    finally:
        timm.layers.set_reentrant_ckpt(was)


def test_traced_and_vmapped() -> None:
    """By torch's own tools."""
    model, batch = local_model("vit").eval(), images_for("vit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, batch)
    torch.testing.assert_close(traced(batch), model(batch))
    models = [local_model("vit"), local_model("vit")]
    excite(models[1], seed=2)
    params, buffers = torch.func.stack_module_state(models)

    def run(params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Tensor) -> Tensor:
        return torch.func.functional_call(models[0], (params, buffers), (batch,))

    both = torch.vmap(run, in_dims=(0, 0, None))(params, buffers, batch)
    torch.testing.assert_close(both, torch.stack([each(batch) for each in models]), rtol=1e-4, atol=1e-5)
    name = "blocks.0.attn.gaug.log_var.weight"
    (found,) = torch.autograd.grad(both.square().sum(), params[name])
    expected = [torch.autograd.grad(each(batch).square().sum(), each.get_parameter(name))[0] for each in models]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["vit", "rope", "swin"])
def test_exported_for_batches_of_any_size(family: str) -> None:
    model = local_model(family).eval()
    any_size = {"x": {0: torch.export.Dim("images")}}
    program = torch.export.export(model, (images_for(family),), dynamic_shapes=any_size).module()
    for num in (1, 5):
        batch = images_for(family, num=num)
        torch.testing.assert_close(program(batch), model(batch))


@pytest.mark.parametrize("family", ["vit", "registers", "rope", "swin"])
def test_intermediate_features(family: str) -> None:
    model, batch = local_model(family).eval(), images_for(family)
    final, maps = model.forward_intermediates(batch)
    torch.testing.assert_close(final, model.forward_features(batch))
    last: list[Tensor] = []
    model.get_submodule("layers.1" if family == "swin" else "blocks.1").register_forward_hook(
        lambda _module, _inputs, output: last.append(output)
    )
    model(batch)
    if family == "swin":
        torch.testing.assert_close(maps[-1], last[0].movedim(-1, 1))
    else:
        patches = last[0][:, model.num_prefix_tokens :].transpose(1, 2).unflatten(2, (5, 5))
        torch.testing.assert_close(maps[-1], patches)


def test_another_image_size_for_good() -> None:
    """`set_input_size` makes the grid larger; the heads still know which one they were made for."""
    model = add_locat(plain_model("vit", dynamic_img_size=False)).eval()
    dynamic = add_locat(plain_model("vit")).eval()
    for each in (model, dynamic):
        excite(each)
    model.set_input_size((64, 48))
    dynamic.load_state_dict({**model.state_dict(), "pos_embed": dynamic.pos_embed})
    batch = torch.randn(1, 3, 64, 48)
    torch.testing.assert_close(model(batch), dynamic(batch), rtol=1e-4, atol=1e-5)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    batch = images_for(num=4)
    other = mp.get_context("spawn").Process(target=write_gradients, args=(1, batch, tmp_path))
    other.start()
    write_gradients(0, batch, tmp_path)
    other.join()
    model = local_vit()
    (model(batch).square().sum() / 2).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "locat", "message"),
    [
        ("resnet18", {}, {}, "LocAt cannot be added to ResNet"),
        ("swinv2_tiny_window8_256", {}, {}, "SwinTransformerV2: "),
        ("vit_relpos_small_patch16_224", {}, {}, "VisionTransformerRelPos: "),
        ("vit_base_patch16_siglip_224", {}, {}, r"pools by attention \(AttentionPoolLatent\).*prr=False"),
        ("deit_tiny_distilled_patch16_224", {}, {}, "VisionTransformerDistilled has a head of its own.*prr=False"),
        ("vit_tiny_patch16_224", {"patch_drop_rate": 0.5}, {}, "patch_drop_rate"),
        ("vit_dlittle_patch16_reg1_gap_256", {}, {}, "DiffAttention"),
        ("vit_tiny_patch16_224", {}, {"blocks": [12]}, "no block 12 in VisionTransformer: it has 0 to 11"),
        ("vit_tiny_patch16_224", {}, {"kernel": "gauss"}, "did you mean 'gaussian'"),
        ("vit_tiny_patch16_224", {}, {"scale": "automatic"}, "not a known scale"),
        ("vit_tiny_patch16_224", {}, {"resolution": "cubic"}, "not a known resolution"),
        ("vit_tiny_patch16_224", {}, {"width": "key"}, "width is 'key'"),
        ("vit_tiny_patch16_224", {}, {"width": 0.0}, "above 0"),
        ("vit_tiny_patch16_224", {}, {"width": None}, "width is None, but must be 'query', 'input' or a number"),
        ("vit_tiny_patch16_224", {}, {"width": True}, "width is True"),
        ("vit_tiny_patch16_224", {}, {"isotropic": "no"}, "isotropic is 'no', but must be True or False"),
        ("vit_tiny_patch16_224", {}, {"gaug": "no"}, "gaug is 'no', but must be True or False"),
        ("vit_tiny_patch16_224", {}, {"prr": "False"}, "prr is 'False', but must be True or False"),
        ("vit_tiny_patch16_224", {}, {"initial_grid": (14, 0)}, "a side of initial_grid is 0"),
        *(
            ("vit_tiny_patch16_224", {}, {"initial_grid": grid}, r"must be two numbers: \(rows, columns\)")
            for grid in (14, "14", (14,), (14, 14, 14), (14.5, 14))
        ),
        *(
            ("vit_tiny_patch16_224", {}, {"blocks": blocks}, r"must be numbers of blocks, such as \[0, 1\]")
            for blocks in (3.5, [1.0], ["0"], [])
        ),
        ("vit_tiny_patch16_224", {}, {"gaug": False, "kernel": "laplace"}, "with gaug=False there is none"),
        ("vit_tiny_patch16_224", {}, {"gaug": False, "blocks": [0]}, "with gaug=False there is none"),
    ],
)
def test_refused(name: str, options: dict[str, Any], locat: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    modules = {module: type(module) for module in model.modules()}
    with pytest.raises(InputError, match=message):
        add_locat(model, **locat)
    assert {module: type(module) for module in model.modules()} == modules


def test_models_that_were_changed() -> None:
    shared = plain_model("vit")
    shared.blocks = nn.Sequential(shared.blocks[0], shared.blocks[0])
    add_locat(shared)(images_for()).sum().backward()
    assert shared.blocks[0].attn.gaug.log_var.weight.grad is not None
    pruned = plain_model("vit")
    pruned.blocks[-1] = nn.Identity()
    assert add_locat(pruned, blocks=[0])(images_for()).shape == (2, 7)
    assert pruned.attn_pool.num_heads == 3
    with pytest.raises(InputError, match="with blocks of Identity"):
        add_locat(pruned)
    bare = plain_model("vit")
    bare.blocks = nn.Sequential(nn.Identity())
    with pytest.raises(InputError, match="has no attention"):
        add_locat(bare, gaug=False)


def test_it_says_which_one_it_is() -> None:
    text = repr(add_locat(plain_model("vit"), kernel="laplace", width=2.0, isotropic=True))
    assert "kernel='laplace', width=2.0, isotropic=True, scale='learned', resolution='linear', grid_size=(5, 5)" in text


def test_added_once() -> None:
    model = local_model()
    with pytest.raises(InputError, match="local attention already"):
        add_locat(model, prr=False)
    with pytest.raises(InputError, match=r"pools by attention \(RefinedPool\)"):
        add_locat(model, gaug=False)
    swin = local_model("swin")
    with pytest.raises(InputError, match="RefinedMapPool"):
        add_locat(swin, gaug=False)


@pytest.mark.skipif(
    "num_kv_heads" not in inspect.signature(Eva).parameters,
    reason=f"timm {timm.__version__} has no attention whose heads share keys and values",
)
def test_heads_that_share_keys_and_values() -> None:
    settings = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 4, "num_classes": 3}
    torch.manual_seed(0)
    model = Eva(**settings, attn_type="rope", qkv_fused=False, num_kv_heads=2, use_rot_pos_emb=True).eval()
    batch = torch.randn(2, 3, 32, 32)
    expected = model(batch)
    add_locat(model, prr=False)
    assert not torch.allclose(model(batch), expected)
    nn.init.constant_(model.blocks[0].attn.gaug.log_alpha.bias, -1e4)
    torch.testing.assert_close(model(batch), expected)


def test_two_attentions_in_a_block() -> None:
    model = add_locat(timm.create_model("vit_small_patch16_18x2_224", depth=2, img_size=32), blocks=[1])
    assert sum(".gaug.log_var.weight" in name for name, _ in model.named_parameters()) == 2


def test_attention_that_is_not_between_all_patches() -> None:
    model = local_model()
    with pytest.raises(InputError, match="cannot be causal"):
        model(images_for(), is_causal=True)
    with pytest.raises(InputError, match="needs all patches of an image"):
        model.blocks[0](torch.randn(1, 11, 48))


def test_masks_go_to_the_logits() -> None:
    model, batch = local_model(prr=False).eval(), images_for()
    assert torch.equal(model(batch, attn_mask=torch.zeros(26, 26)), model(batch))
    hidden = torch.ones(26, 26, dtype=torch.bool)
    hidden[0, 1:] = False  # CLS sees itself alone
    torch.testing.assert_close(model(batch, attn_mask=hidden)[0], model(batch[1:], attn_mask=hidden)[0])
