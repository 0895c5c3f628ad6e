"""CKA between layers, streamed over batches, against the metric on features that hooks collected."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import layer_similarity
from nearsight.metrics import linear_cka


def vit(seed: int = 0, depth: int = 3, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "reg_tokens": 1} | settings
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=depth, **settings)
    for block in model.blocks:  # so that layers differ
        block.mlp.fc2.weight.data *= 20
        block.attn.proj.weight.data *= 20
    return model


def images(num: int, size: int = 32) -> Tensor:
    return torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(0))


def features_of(model: nn.Module, batch: Tensor, *, flat: bool, prefix: int = 2) -> list[Tensor]:
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output[:, prefix:].double()))
        for block in model.blocks
    ]
    with torch.no_grad():
        model.eval()(batch)
    for hook in hooks:
        hook.remove()
    return [patches.flatten(1) if flat else patches.mean(1) for patches in seen]


def unbiased_hsic(x: Tensor, y: Tensor) -> float:
    """Song et al. (2012), Eq. 5, as it stands there."""
    n = len(x)
    k, v = x @ x.T, y @ y.T
    k.fill_diagonal_(0)
    v.fill_diagonal_(0)
    one = torch.ones(n, dtype=torch.float64)
    total = (
        torch.trace(k @ v) + (one @ k @ one) * (one @ v @ one) / (n - 1) / (n - 2) - 2 * (one @ k @ v @ one) / (n - 2)
    )
    return float(total) / n / (n - 3)


@pytest.mark.parametrize("tokens", ["mean", "flat"])
def test_one_batch_is_the_metric(tokens: str) -> None:
    model, batch = vit(), images(9)
    names, other_names, matrix = layer_similarity(model, batch, tokens=tokens)
    features = features_of(model, batch, flat=tokens == "flat")
    expected = [[float(linear_cka(x, y, unbiased=True)) for y in features] for x in features]
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    assert names == other_names == ("blocks.0", "blocks.1", "blocks.2")
    np.testing.assert_allclose(np.diag(matrix), 1)
    assert matrix.min() < 0.9


def test_batches_are_averaged_before_the_division() -> None:
    model, batch = vit(), images(14)
    matrix = layer_similarity(model, batch, batch_size=6).matrix  # 6 + 6 + 2, of which the last is too small
    parts = [features_of(model, part, flat=False) for part in (batch[:6], batch[6:12])]

    def mean_hsic(i: int, j: int) -> float:
        return sum(unbiased_hsic(part[i], part[j]) for part in parts)

    for i in range(3):
        for j in range(3):
            expected = mean_hsic(i, j) / (mean_hsic(i, i) * mean_hsic(j, j)) ** 0.5
            assert matrix[i, j] == pytest.approx(expected, rel=1e-6)
    streamed = layer_similarity(model, iter([batch[:6], batch[6:12]]), batch_size=10).matrix
    np.testing.assert_allclose(streamed, matrix)


@pytest.mark.parametrize("tokens", ["mean", "flat"])
@pytest.mark.parametrize("constant", [1e3, 1e4])
def test_a_feature_that_is_large_and_constant_does_not_count(tokens: str, constant: float) -> None:
    """As ViTs have them: against features without it, in two batches."""
    model, batch = vit(embed_dim=48), images(16)
    model.pos_embed.data[..., 5] += constant
    matrix = layer_similarity(model, batch, tokens=tokens, batch_size=8).matrix
    parts = [features_of(model, part, flat=tokens == "flat") for part in (batch[:8], batch[8:])]
    parts = [[features - features.mean(0) for features in part] for part in parts]
    hsic = np.array([[sum(unbiased_hsic(p[i], p[j]) for p in parts) for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(matrix, hsic / np.sqrt(np.outer(hsic.diagonal(), hsic.diagonal())), rtol=1e-9)


def test_layers_in_which_all_images_are_alike() -> None:
    model, batch = vit(), images(1).expand(6, -1, -1, -1)
    with pytest.raises(InputError, match="the images are all alike in them"):
        layer_similarity(model, batch)
    model.blocks[2].register_forward_pre_hook(lambda _module, inputs: inputs[0] * 0 + 0.1)
    found = np.isnan(layer_similarity(model, images(6)).matrix)
    assert found.tolist() == [[False, False, True], [False, False, True], [True, True, True]]


def test_two_models_of_different_sizes() -> None:
    model, other = vit(), vit(1, depth=2, img_size=48, embed_dim=16, num_heads=2)
    small, large = images(8), nn.functional.interpolate(images(8), size=48)
    names, other_names, matrix = layer_similarity(model, small, other, other_images=large)
    rows, cols = features_of(model, small, flat=False), features_of(other, large, flat=False)
    expected = [[float(linear_cka(x, y, unbiased=True)) for y in cols] for x in rows]
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    assert (len(names), len(other_names)) == (3, 2)
    with pytest.raises(InputError, match="different batches of images: one of 8 stands against 7"):
        layer_similarity(model, small, other, other_images=large[:7])
    with pytest.raises(InputError, match="one of 4 stands against 0"):
        layer_similarity(model, small, other, other_images=large[:4], batch_size=4)


def test_two_architectures_on_the_same_images() -> None:
    torch.manual_seed(0)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 2), num_heads=(1, 2)
    )
    similarity = layer_similarity(vit(), images(6), swin)
    assert similarity.matrix.shape == (3, 3)
    assert similarity.other_names == ("layers.0.blocks.0", "layers.1.blocks.0", "layers.1.blocks.1")


def test_any_modules_can_be_layers() -> None:
    """Also of a model without attention, which Raghu et al. compare ViTs with."""
    torch.manual_seed(0)
    resnet = timm.create_model("resnet10t", num_classes=3)
    similarity = layer_similarity(vit(), images(6), resnet, other_layers=["layer1", "layer2.0"])
    assert similarity.other_names == ("layer1", "layer2.0")
    assert np.isfinite(similarity.matrix).all()
    with pytest.raises(InputError, match="has no module 'layer9'"):
        layer_similarity(vit(), images(6), resnet, other_layers=["layer9"])
    with pytest.raises(InputError, match="fc of ResNet does not return one grid"):
        layer_similarity(vit(), images(6), resnet, other_layers=["fc"])


def test_as_a_frame() -> None:
    similarity = layer_similarity(vit(), images(5))
    frame = similarity.to_frame()
    assert list(frame.columns) == ["layer", "layer_name", "other_layer", "other_layer_name", "cka"]
    assert len(frame) == 9
    row = frame[(frame["layer"] == 2) & (frame["other_layer"] == 1)].iloc[0]
    assert (row["layer_name"], row["other_layer_name"]) == ("blocks.2", "blocks.1")
    assert row["cka"] == similarity.matrix[2, 1]


def test_the_model_is_left_as_it_was() -> None:
    model = vit().train()
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    state = torch.random.get_rng_state()
    layer_similarity(model, images(4))
    assert model.training
    assert all(module.training for module in model.modules())
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    assert torch.equal(torch.random.get_rng_state(), state)


def test_bad_input() -> None:
    model = vit(depth=1)
    with pytest.raises(InputError, match="batches of at least 4"):
        layer_similarity(model, images(3))
    with pytest.raises(InputError, match="batch_size is 3"):
        layer_similarity(model, images(8), batch_size=3)
    with pytest.raises(InputError, match="'mean' or 'flat'"):
        layer_similarity(model, images(4), tokens="cls")
    with pytest.raises(InputError, match="second model"):
        layer_similarity(model, images(4), other_images=images(4))
    with pytest.raises(InputError, match="no attention was seen"):
        layer_similarity(timm.create_model("resnet10t"), images(4))
