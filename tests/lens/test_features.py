"""What the tokens of each layer are like: the block's outputs, found in whatever shape they come; and CKA of layers,
streamed over batches, against the metric on features that hooks collected.
"""

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import layer_similarity, measure
from nearsight.lens.tokens import block_of, has_class_token
from nearsight.metrics import linear_cka


def images(num: int = 3, size: tuple[int, int] = (32, 32)) -> Tensor:
    return torch.randn(num, 3, *size, generator=torch.Generator().manual_seed(0))


def outputs_of(model: nn.Module, names: list[str], batch: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_hook(
            lambda _module, _inputs, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        for name in names
    ]
    with torch.no_grad():
        model.eval()(batch)
    for hook in hooks:
        hook.remove()
    return [output.double() for output in seen]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


def score_by_loop(grid_BHWC: Tensor) -> float:
    """Mean over patches of the mean similarity to the neighbours that exist; then over images."""
    batch, rows, cols = grid_BHWC.shape[:3]
    means = []
    for image in grid_BHWC:
        for row in range(rows):
            for col in range(cols):
                near = [
                    cosine(image[row, col], image[r, c])
                    for r in range(max(row - 1, 0), min(row + 2, rows))
                    for c in range(max(col - 1, 0), min(col + 2, cols))
                    if (r, c) != (row, col)
                ]
                means.append(sum(near) / len(near))
    assert len(means) == batch * rows * cols
    return sum(means) / len(means)


def towards_cls_by_loop(tokens_BNC: Tensor, prefix: int) -> float:
    return float(np.mean([cosine(patch, tokens[0]) for tokens in tokens_BNC for patch in tokens[prefix:]]))


@pytest.mark.parametrize("registers", [0, 2])
def test_tokens_with_a_prefix(registers: int) -> None:
    torch.manual_seed(0)
    settings = {
        "img_size": (16, 24),
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "reg_tokens": registers,
    }
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **settings)
    batch = images(size=(16, 24))
    table = measure(model, batch, batch_size=2, what=["features"])
    for layer, tokens in enumerate(outputs_of(model, ["blocks.0", "blocks.1"], batch)):
        grid = tokens[:, 1 + registers :].unflatten(1, (2, 3))
        assert table.extra["locality_score"][layer] == pytest.approx(score_by_loop(grid), rel=1e-5)
        expected = towards_cls_by_loop(tokens, 1 + registers)
        assert table.extra["patch_cls_similarity"][layer] == pytest.approx(expected, rel=1e-5)


def test_maps_with_channels_last_and_no_cls() -> None:
    torch.manual_seed(0)
    model = SwinTransformer(img_size=24, window_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 2), num_classes=3)
    batch = images(2, (24, 24))
    table = measure(model, batch, what=["features"])
    names = ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]
    for layer, grid in enumerate(outputs_of(model, names, batch)):
        assert table.extra["locality_score"][layer] == pytest.approx(score_by_loop(grid), rel=1e-5)
    assert np.isnan(table.extra["patch_cls_similarity"]).all()


class ChannelsFirst(nn.Module):
    """A block on [B, C, H, W] that returns other things as well."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        tokens = grid.flatten(2).transpose(1, 2)[:, None]
        attn = (tokens @ tokens.transpose(-2, -1)).softmax(-1)
        out = (attn @ tokens)[:, 0].transpose(1, 2).view_as(grid)
        return grid.mean((1, 2, 3)), grid + out


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, 8)
        self.stage = nn.ModuleList([nn.ModuleDict({"mixer": ChannelsFirst(8)}) for _ in range(depth)])
        self.block1 = nn.Sequential()
        self.block1.add_module("attention", ChannelsFirst(8))
        self.block1.forward = self.block1.attention.forward  # type: ignore[method-assign]

    def forward(self, pixels: Tensor) -> Tensor:
        grid = self.embed(pixels)
        for part in self.stage:
            grid = part["mixer"](grid)[1]
        return self.block1.attention(self.block1.attention(grid)[1])[1]


def test_a_layer_whose_block_returns_nothing_has_no_numbers() -> None:
    """A list of modules is never called; a block that runs twice has two outputs."""
    table = measure(Stack(1), images(), what=["features"])
    assert len(table.layer_names) == 3
    assert np.isnan(table.extra["locality_score"]).all()


def test_tokens_in_an_order_of_the_images_own_have_no_numbers() -> None:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = ChannelsFirst(8)

        def forward(self, grid: Tensor) -> Tensor:
            tokens = self.attn(grid)[1].flatten(2)
            return tokens.gather(2, tokens.norm(dim=1, keepdim=True).argsort().expand_as(tokens))

    model = nn.Sequential(nn.Conv2d(3, 8, 8, 8), Sorting())
    table = measure(model, images(size=(24, 32)), what=["features"])
    assert table.layer_names == ("1.attn",)
    assert np.isnan(table.extra["locality_score"]).all()


def test_maps_with_channels_first_in_a_tuple() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = ChannelsFirst(8)

        def forward(self, grid: Tensor) -> tuple[Tensor, Tensor]:
            return self.attn(grid)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer0 = nn.Conv2d(3, 8, 8, 8), Block()

        def forward(self, pixels: Tensor) -> Tensor:
            self.seen = self.layer0(self.embed(pixels))[1]
            return self.seen

    torch.manual_seed(0)
    model = Model()
    table = measure(model, images(size=(24, 32)), what=["features"])
    model(images(size=(24, 32)))
    expected = score_by_loop(model.seen.detach().double().permute(0, 2, 3, 1))
    assert table.layer_names == ("layer0.attn",)
    assert float(table.extra["locality_score"][0]) == pytest.approx(expected, rel=1e-5)


def test_torchvision() -> None:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=3)
    names = [f"encoder.layers.encoder_layer_{number}" for number in (0, 1)]
    table = measure(model, images(), what=["features"])
    for layer, tokens in enumerate(outputs_of(model, names, images())):
        expected = score_by_loop(tokens[:, 1:].unflatten(1, (4, 4)))
        assert table.extra["locality_score"][layer] == pytest.approx(expected, rel=1e-5)
        assert table.extra["patch_cls_similarity"][layer] == pytest.approx(towards_cls_by_loop(tokens, 1), rel=1e-5)


def test_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**sizes)).eval()
    table = measure(model, images(), what=["features", "shares"])
    with torch.no_grad():
        states = model(images(), output_hidden_states=True).hidden_states[1:]
    for layer, tokens in enumerate(states):
        tokens = tokens.double()
        expected = score_by_loop(tokens[:, 5:].unflatten(1, (4, 4)))
        assert table.extra["locality_score"][layer] == pytest.approx(expected, rel=1e-5)
        assert table.extra["patch_cls_similarity"][layer] == pytest.approx(towards_cls_by_loop(tokens, 5), rel=1e-5)
    assert (table.extra["share_registers"] > 0).all()


def test_the_same_forward_with_and_without() -> None:
    """What is computed on the side must not be taken for the model's own attention."""
    torch.manual_seed(0)
    model = timm.create_model("compact_vit", depth=2, embed_dim=24, num_heads=2)
    model.blocks[0].attn.fused_attn = False
    plain, more = measure(model, images()), measure(model, images(), what=["features"])
    assert plain.layer_names == more.layer_names
    np.testing.assert_array_equal(plain.mad, more.mad)


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        ("blocks.0.attn", "blocks.0"),
        ("blocks.0.attn#2", "blocks.0"),
        ("encoder.layers.encoder_layer_11.self_attention", "encoder.layers.encoder_layer_11"),
        ("stages.2.blocks.1.attn.attn1", "stages.2.blocks.1"),
        ("attn", None),
        ("", None),
    ],
)
def test_blocks_are_the_nearest_numbered_ancestors(layer: str, block: str | None) -> None:
    assert block_of(layer) == block


@pytest.mark.parametrize(
    ("name", "has_one"),
    [("cls_token", True), ("class_embedding", True), ("class_token", True), ("classifier", False), ("bicls", False)],
)
def test_class_tokens_are_known_by_their_names(name: str, has_one: bool) -> None:
    model = nn.Module()
    model.embeddings = nn.Module()
    model.embeddings.register_parameter(name, nn.Parameter(torch.zeros(1, 1, 4)))
    model.class_head = nn.Linear(2, 2)
    assert has_class_token(model) is has_one


def vit(seed: int = 0, depth: int = 3, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "reg_tokens": 1} | settings
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=depth, **settings)
    for block in model.blocks:  # so that layers differ
        block.mlp.fc2.weight.data *= 20
        block.attn.proj.weight.data *= 20
    return model


def pictures(num: int, size: int = 32) -> Tensor:
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
    model, batch = vit(), pictures(9)
    names, other_names, matrix = layer_similarity(model, batch, tokens=tokens)
    features = features_of(model, batch, flat=tokens == "flat")
    expected = [[float(linear_cka(x, y, unbiased=True)) for y in features] for x in features]
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    assert names == other_names == ("blocks.0", "blocks.1", "blocks.2")
    np.testing.assert_allclose(np.diag(matrix), 1)
    assert matrix.min() < 0.9


def test_batches_are_averaged_before_the_division() -> None:
    model, batch = vit(), pictures(14)
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
    model, batch = vit(embed_dim=48), pictures(16)
    model.pos_embed.data[..., 5] += constant
    matrix = layer_similarity(model, batch, tokens=tokens, batch_size=8).matrix
    parts = [features_of(model, part, flat=tokens == "flat") for part in (batch[:8], batch[8:])]
    parts = [[features - features.mean(0) for features in part] for part in parts]
    hsic = np.array([[sum(unbiased_hsic(p[i], p[j]) for p in parts) for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(matrix, hsic / np.sqrt(np.outer(hsic.diagonal(), hsic.diagonal())), rtol=1e-9)


def test_layers_in_which_all_images_are_alike() -> None:
    model, batch = vit(), pictures(1).expand(6, -1, -1, -1)
    with pytest.raises(InputError, match="all images are equal in them"):
        layer_similarity(model, batch)
    model.blocks[2].register_forward_pre_hook(lambda _module, inputs: inputs[0] * 0 + 0.1)
    found = np.isnan(layer_similarity(model, pictures(6)).matrix)
    assert found.tolist() == [[False, False, True], [False, False, True], [True, True, True]]


def test_two_models_of_different_sizes() -> None:
    model, other = vit(), vit(1, depth=2, img_size=48, embed_dim=16, num_heads=2)
    small, large = pictures(8), nn.functional.interpolate(pictures(8), size=48)
    names, other_names, matrix = layer_similarity(model, small, other, other_images=large)
    rows, cols = features_of(model, small, flat=False), features_of(other, large, flat=False)
    expected = [[float(linear_cka(x, y, unbiased=True)) for y in cols] for x in rows]
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    assert (len(names), len(other_names)) == (3, 2)
    with pytest.raises(InputError, match="different batches of images: one of 8 images, one of 7"):
        layer_similarity(model, small, other, other_images=large[:7])
    with pytest.raises(InputError, match="one of 4 images, one of 0"):
        layer_similarity(model, small, other, other_images=large[:4], batch_size=4)


def test_two_architectures_on_the_same_images() -> None:
    torch.manual_seed(0)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 2), num_heads=(1, 2)
    )
    similarity = layer_similarity(vit(), pictures(6), swin)
    assert similarity.matrix.shape == (3, 3)
    assert similarity.other_names == ("layers.0.blocks.0", "layers.1.blocks.0", "layers.1.blocks.1")


def test_any_modules_can_be_layers() -> None:
    """Also of a model without attention, which Raghu et al. compare ViTs with."""
    torch.manual_seed(0)
    resnet = timm.create_model("resnet10t", num_classes=3)
    similarity = layer_similarity(vit(), pictures(6), resnet, other_layers=["layer1", "layer2.0"])
    assert similarity.other_names == ("layer1", "layer2.0")
    assert np.isfinite(similarity.matrix).all()
    with pytest.raises(InputError, match="has no module 'layer9'"):
        layer_similarity(vit(), pictures(6), resnet, other_layers=["layer9"])
    with pytest.raises(InputError, match="fc of ResNet does not return one grid"):
        layer_similarity(vit(), pictures(6), resnet, other_layers=["fc"])


def test_as_a_frame() -> None:
    similarity = layer_similarity(vit(), pictures(5))
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
    layer_similarity(model, pictures(4))
    assert model.training
    assert all(module.training for module in model.modules())
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    assert torch.equal(torch.random.get_rng_state(), state)


def test_bad_input() -> None:
    model = vit(depth=1)
    with pytest.raises(InputError, match="batches of at least 4"):
        layer_similarity(model, pictures(3))
    with pytest.raises(InputError, match="batch_size is 3"):
        layer_similarity(model, pictures(8), batch_size=3)
    with pytest.raises(InputError, match="'mean' or 'flat'"):
        layer_similarity(model, pictures(4), tokens="cls")
    with pytest.raises(InputError, match="second model"):
        layer_similarity(model, pictures(4), other_images=pictures(4))
    with pytest.raises(InputError, match="no attention was seen"):
        layer_similarity(timm.create_model("resnet10t"), pictures(4))
