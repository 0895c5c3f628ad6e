"""Measuring an unmodified model: right numbers, and nothing left behind."""

import random
import sys

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.lens import HeadTable, attention_maps, measure
from nearsight.lens.mapsfile import size_of_maps
from nearsight.metrics import attention_distance, attention_entropy


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    vit = timm.create_model("compact_vit", depth=3, embed_dim=48, num_heads=4, num_classes=5, position_std=1.0)
    for block in vit.blocks:  # sharp enough that heads and images differ
        block.attn.qkv.weight.data *= 20
    return vit


def global_hooks() -> list[object]:
    hooks = torch.nn.modules.module
    return [*hooks._global_forward_hooks, *hooks._global_forward_pre_hooks]


def images(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def attention_by_timms_own_code(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """Every block's attention from timm's unfused path, read off the input of its dropout layer."""
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    with torch.no_grad():
        model.eval()(batch)
    return seen


def test_numbers_equal_timms_unfused_attention(model: nn.Module) -> None:
    batch = images(6)
    table = measure(model, batch, batch_size=4)
    maps = attention_by_timms_own_code(model, batch)
    mad = torch.stack([attention_distance(attn, (8, 8)) for attn in maps], dim=1).numpy()
    entropy = torch.stack([attention_entropy(attn) for attn in maps], dim=1).numpy()
    np.testing.assert_allclose(table.mad, mad.mean(0), rtol=1e-5)
    np.testing.assert_allclose(table.mad_std, mad.std(0), rtol=1e-3)
    np.testing.assert_allclose(table.entropy, entropy.mean(0), rtol=1e-5)
    np.testing.assert_allclose(table.entropy_std, entropy.std(0), rtol=1e-3)
    assert table.layer_names == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert table.num_images == 6
    assert table.mad.std() > 0.01  # the model was made so that heads differ


def test_explicit_softmax_is_seen_as_fused_attention_is(model: nn.Module) -> None:
    fused = measure(model, images(3))
    for block in model.blocks:
        block.attn.fused_attn = False
    unfused = measure(model, images(3))
    np.testing.assert_allclose(fused.mad, unfused.mad, rtol=1e-5)
    assert fused.layer_names == unfused.layer_names


def test_registers_and_a_grid_that_is_not_square() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=1, reg_tokens=4, num_classes=0)
    batch = torch.randn(2, 3, 32, 64)
    table = measure(vit, batch)
    (attn,) = attention_by_timms_own_code(vit, batch)
    expected = attention_distance(attn, (2, 4), num_prefix_tokens=5).mean(0)
    np.testing.assert_allclose(table.mad[0], expected.numpy(), rtol=1e-5)


def test_batching_and_streaming_change_nothing(model: nn.Module) -> None:
    batch = images(7)
    whole = measure(model, batch, batch_size=7)
    streamed = measure(model, iter([batch[:3], batch[3:3], batch[3:]]), batch_size=2)
    np.testing.assert_allclose(streamed.mad, whole.mad, rtol=1e-6)
    np.testing.assert_allclose(streamed.mad_std, whole.mad_std, rtol=1e-4)
    assert streamed.num_images == 7


def test_tables_of_parts_merge_to_the_table_of_all(model: nn.Module) -> None:
    batch = images(8)
    whole = measure(model, batch, batch_size=1)
    merged = HeadTable.merge([measure(model, batch[:3], batch_size=1), measure(model, batch[3:], batch_size=1)])
    for name in ("mad", "mad_std", "entropy", "entropy_std"):
        np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-9, atol=1e-15)
    assert merged.num_images == 8


def test_the_model_and_the_world_are_left_as_found(model: nn.Module) -> None:
    model.train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    grad_enabled = torch.is_grad_enabled()
    measure(model, images(2))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert torch.is_grad_enabled() == grad_enabled
    assert not global_hooks()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__


def test_hooks_go_even_when_the_forward_fails(model: nn.Module) -> None:
    with pytest.raises(
        InputError, match=r"VisionTransformer|CompactViT.* fails on images of 48×48 pixels: Input height"
    ):
        measure(model, torch.randn(1, 3, 48, 48))
    assert not global_hooks()


def test_choosing_layers(model: nn.Module) -> None:
    every = measure(model, images(2))
    some = measure(model, images(2), layers=[-1, "blocks.0.attn"])
    assert some.layer_names == ("blocks.2.attn", "blocks.0.attn")
    np.testing.assert_array_equal(some.mad, every.mad[[2, 0]])
    for wrong in ([7], ["blocks.9.attn"]):
        with pytest.raises(InputError, match="is not one of the 3 layers"):
            measure(model, images(1), layers=wrong)


def test_a_model_without_attention_says_what_was_looked_at() -> None:
    with pytest.raises(InputError, match=r"no attention was seen.*Conv2d"):
        measure(timm.create_model("resnet10t", num_classes=2), torch.randn(1, 3, 64, 64))


def test_bad_images_are_named() -> None:
    model = timm.create_model("compact_vit", depth=1)
    with pytest.raises(InputError, match="fails on images of 32×32 pixels and 1 channels"):
        measure(model, torch.randn(4, 1, 32, 32))
    with pytest.raises(InputError, match="no images"):
        measure(model, [])
    with pytest.raises(InputError, match=r"attention of blocks\.0\.attn is NaN"):
        measure(model, torch.full((1, 3, 32, 32), torch.nan))


class Bare(nn.Module):
    """A user's own attention, without any of timm's attributes: pixels of the image are its tokens."""

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(2).transpose(1, 2)[:, None]
        attn = (x @ x.transpose(-2, -1)).softmax(-1)
        return attn @ x


def test_a_second_attention_in_a_module_is_a_second_layer() -> None:
    class Twice(Bare):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + super().forward(images * 3)

    table = measure(Twice(), torch.randn(2, 3, 8, 6))
    assert table.layer_names == ("", "#2")
    assert not np.allclose(table.mad[0], table.mad[1])


def test_both_precisions(model: nn.Module) -> None:
    single, double = (measure(model, images(3), precision=precision) for precision in ("float32", "float64"))
    np.testing.assert_allclose(single.mad, double.mad, rtol=1e-6)
    np.testing.assert_allclose(single.entropy, double.entropy, rtol=1e-6)
    assert not np.array_equal(single.mad, double.mad)


def test_distances_in_patches_and_pixels() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=1, num_classes=0)
    table = measure(vit, torch.randn(2, 3, 32, 64))
    np.testing.assert_array_equal(table.extra["grid_size"], [[2, 4]])
    np.testing.assert_array_equal(table.extra["cell_size"], [[16, 16]])
    np.testing.assert_allclose(table.mad_in("patches"), table.mad * np.hypot(1, 3))
    np.testing.assert_allclose(table.mad_in("pixels"), table.mad * np.hypot(16, 48))


def test_a_model_that_computes_otherwise_for_other_images() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Bare(), Bare()

        def forward(self, images: Tensor) -> Tensor:
            return (self.one if images.mean() > 0 else self.other)(images)

    batches = [torch.ones(1, 3, 4, 4), -torch.ones(1, 3, 4, 4)]
    with pytest.raises(InputError, match=r"other attentions for these images than for the first \(one is missing\)"):
        measure(Fickle(), batches)


def test_a_compiled_model_is_measured_as_what_it_was_compiled_from(model: nn.Module) -> None:
    np.testing.assert_array_equal(measure(torch.compile(model), images(2)).mad, measure(model, images(2)).mad)


def test_the_public_name_is_the_same_function() -> None:
    assert nearsight.measure is measure
    assert nearsight.HeadTable is HeadTable


class TestKeptMaps:
    def test_they_are_the_attention_maps_of_the_first_pictures(self, model: nn.Module) -> None:
        table = measure(model, images(6), batch_size=5, keep="maps")
        assert table.maps is not None
        for kept, expected in zip(table.maps.layers, attention_maps(model, images(6)[:4]), strict=True):
            assert kept.name == expected.name
            torch.testing.assert_close(kept.weights_BHQK, expected.weights_BHQK, rtol=1e-5, atol=1e-7)
        assert table.maps.pictures_BHWC.shape == (4, 32, 32, 3)
        assert measure(model, images(2)).maps is None
        np.testing.assert_array_equal(table.mad, measure(model, images(6), batch_size=5).mad)

    def test_they_are_of_the_chosen_layers_and_of_batches_of_the_first_size(self, model: nn.Module) -> None:
        vit = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, depth=2)
        sizes = (32, 48, 32, 32, 32, 32)
        batches = [torch.randn(1, 3, size, size) for size in sizes]
        table = measure(vit, batches, keep="maps", layers=[1])
        assert table.maps is not None
        assert [layer.name for layer in table.maps.layers] == ["blocks.1.attn"]
        expected = attention_maps(vit, torch.cat([batches[at] for at in (0, 2, 3, 4)]), layers=[1])[0].weights_BHQK
        torch.testing.assert_close(table.maps.layers[0].weights_BHQK, expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize(("limit", "num_pictures", "grid"), [(2.5, 2, (8, 8)), (0.5, 4, (4, 4))])
    def test_their_memory_is_bounded(
        self, model: nn.Module, limit: float, num_pictures: int, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = size_of_maps(attention_maps(model, images(1)), 1)
        monkeypatch.setattr("nearsight.lens.maps.MOST_KEPT_BYTES", int(limit * one))
        monkeypatch.setattr("nearsight.lens.maps._FEW_LINES", 4)
        kept = measure(model, images(4), keep="maps").maps
        assert kept is not None
        assert len(kept.pictures_BHWC) == num_pictures
        assert {(len(layer.weights_BHQK), layer.key_grid) for layer in kept.layers} == {(num_pictures, grid)}

    def test_pictures_are_as_people_see_them(self, model: nn.Module) -> None:
        pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        mean, std = (torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
        kept = measure(model, (pixels / 255 - mean) / std, keep="maps").maps
        assert kept is not None
        np.testing.assert_array_equal(kept.pictures_BHWC, pixels.permute(0, 2, 3, 1))
        # Normalised in another way: from the darkest to the brightest value.
        kept = measure(model, pixels / 10.0, keep="maps").maps
        assert kept is not None
        lowest, highest = (
            extreme(pixels.flatten(1).float(), 1).view(2, 1, 1, 1) for extreme in (torch.amin, torch.amax)
        )
        expected = (255 * (pixels - lowest) / (highest - lowest)).permute(0, 2, 3, 1)
        np.testing.assert_allclose(kept.pictures_BHWC, expected, atol=0.51)

    def test_what_cannot_be_kept_is_refused(self, model: nn.Module) -> None:
        with pytest.raises(InputError, match=r"^keep is 'maps' or None, not 'map'$"):
            measure(model, images(1), keep="map")  # type: ignore[arg-type]
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, in_chans=5, depth=1)
        with pytest.raises(InputError, match=r"keep='maps' is for pictures \[B, 3, H, W\], not for \[2, 5, 32, 32\]"):
            measure(vit, torch.randn(2, 5, 32, 32), keep="maps")


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_counts_the_images_and_is_silent_unless_asked_for(
    model: nn.Module, with_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    plain = measure(model, images(5), batch_size=2)
    assert capsys.readouterr() == ("", "")
    shown = measure(model, images(5), batch_size=2, progress=True, label="my ViT")
    captured = capsys.readouterr()
    assert "my ViT" in captured.out + captured.err
    assert ("5/5" if with_tqdm else "100%") in captured.out + captured.err
    np.testing.assert_array_equal(shown.mad, plain.mad)
    assert (shown.label, plain.label) == ("my ViT", "compact_vit")
