"""Learned positions are found in the models of three libraries, patch by patch, and what has none is told so."""

import math

import pandas as pd
import pytest
import timm
import torch
import torchvision
from scipy.stats import spearmanr
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.lens import WHAT, PositionGram, position_gram
from nearsight.models import ModelConfig, create_model
from nearsight.models.shuffledtiles import ShuffledTiles

ROWS, COLS, PATCH = 3, 4, 16
SIZE = (ROWS * PATCH, COLS * PATCH)


def marked(shape: tuple[int, ...], num_others: int) -> Tensor:
    """Positions whose first channel is the number of their patch; −1 for other tokens."""
    positions = torch.randn(shape)
    numbers = torch.tensor([-1.0] * num_others + [float(patch) for patch in range(ROWS * COLS)])
    positions.view(-1, shape[-1])[:, 0] = numbers
    return positions


def timm_vit(name: str = "vit_tiny_patch16_224", **settings: object) -> nn.Module:
    return timm.create_model(name, img_size=SIZE, depth=1, **settings)


TIMM = {
    "ordinary": (timm_vit, 1),
    "without a position of CLS": (lambda: timm_vit(no_embed_class=True), 0),
    "registers with positions": (lambda: timm_vit(reg_tokens=4), 5),
    "registers without": (lambda: timm_vit("vit_tiny_patch16_reg4_224"), 0),
    "no CLS": (lambda: timm_vit(class_token=False, global_pool="avg"), 0),
    "any size": (lambda: timm_vit(dynamic_img_size=True), 1),
    "distilled": (lambda: timm_vit("deit_tiny_distilled_patch16_224"), 2),
    "beside RoPE": (lambda: timm_vit("vit_tiny_patch16_rope_mixed_224", use_abs_pos_emb=True), 1),
    "Jumbo": (lambda: timm_vit("jumbo_vit_tiny_patch16_224"), 0),
    "compact": (lambda: create_model("compact_vit", img_size=SIZE, patch_size=PATCH, depth=1), 1),
    "positional": (lambda: create_model("compact_vit_positional", img_size=SIZE, patch_size=PATCH, depth=1), 1),
    "SAM, on a grid": (lambda: timm_vit("samvit_base_patch16", embed_dim=48, num_heads=2, use_rel_pos=False), 0),
}


@pytest.mark.parametrize("which", TIMM)
def test_positions_of_patches_in_timm(which: str) -> None:
    build, num_others = TIMM[which]
    model = build()
    model.pos_embed.data = marked(tuple(model.pos_embed.shape), num_others)
    found = position_gram(model)
    assert (found.name, found.grid_size) == ("pos_embed", (ROWS, COLS))
    assert found.positions_PC[:, 0].tolist() == list(range(ROWS * COLS))
    assert found.positions_PC.dtype == torch.float64


def test_positions_of_torchvision() -> None:
    model = torchvision.models.VisionTransformer(48, 16, 1, 2, 8, 16)
    found = position_gram(model)
    assert (found.name, found.grid_size) == ("encoder.pos_embedding", (3, 3))
    assert torch.equal(found.positions_PC, model.encoder.pos_embedding[0, 1:].double())


HUGGING_FACE = {
    "ViT": ("embeddings.position_embeddings", {}, 1),
    "DeiT": ("embeddings.position_embeddings", {}, 2),
    "Dinov2": ("embeddings.position_embeddings", {}, 1),
    "Dinov2WithRegisters": ("embeddings.position_embeddings", {}, 1),
    "Beit": ("embeddings.position_embeddings", {"use_absolute_position_embeddings": True}, 1),
    "CLIPVision": ("embeddings.position_embedding.weight", {}, 1),
    "SiglipVision": ("embeddings.position_embedding.weight", {}, 0),
}


def hugging_face(name: str, **settings: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = getattr(transformers, f"{name}Config")(image_size=48, patch_size=16, **small, **settings)
    model: nn.Module = getattr(transformers, f"{name}Model")._from_config(config)
    return model


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_positions_of_transformers(name: str) -> None:
    parameter, settings, num_others = HUGGING_FACE[name]
    model = hugging_face(name, **settings)
    found = position_gram(model)
    assert (found.name, found.grid_size) == (parameter, (3, 3))
    own = dict(model.named_parameters())[parameter].detach()
    assert torch.equal(found.positions_PC, own.reshape(9 + num_others, 8)[num_others:].double())


def test_the_tower_that_sees_is_chosen_by_its_grid() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {"image_size": 48, "patch_size": 16, **small}
    config = transformers.CLIPConfig(text_config={"vocab_size": 9, **small}, vision_config=vision)
    found = position_gram(transformers.CLIPModel._from_config(config))
    assert (found.name, found.grid_size) == ("vision_model.embeddings.position_embedding.weight", (3, 3))


WITHOUT = {
    "a ViT − PE": (lambda: timm_vit(pos_embed="none"), "VisionTransformer.*is called pos_embed"),
    "RoPE": (lambda: timm_vit("vit_tiny_patch16_rope_mixed_224"), r"rotates queries and keys \(RoPE\)"),
    "Swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)), "positions are relative"),
    "a convolutional network": (lambda: timm.create_model("resnet10t"), "ResNet.*is called pos_embed"),
    "sines in a parameter": (lambda: hugging_face("ViTMAE"), "position_embeddings is not learned"),
}


@pytest.mark.parametrize("which", WITHOUT)
def test_models_without_learned_positions_are_told_why(which: str) -> None:
    build, said = WITHOUT[which]
    with pytest.raises(InputError, match="has no learned absolute positions") as caught:
        position_gram(build())
    assert caught.match(said)


def test_a_grid_that_is_not_stated_can_be_given() -> None:
    model = nn.Module()
    model.pos_embed = nn.Parameter(torch.randn(1, 13, 5))
    with pytest.raises(InputError, match=r"pos_embed \[1, 13, 5\]\) fit no grid.*give position_gram its grid_size"):
        position_gram(model)
    assert torch.equal(position_gram(model, grid_size=(3, 4)).positions_PC, model.pos_embed[0, 1:].double())
    model.second = nn.Module()
    model.second.pos_embed = nn.Parameter(torch.randn(1, 12, 5))
    with pytest.raises(InputError, match=r"positions in 2 places \(pos_embed, second.pos_embed\)"):
        position_gram(model, grid_size=(3, 4))


def test_the_gram_matrix_and_what_is_read_off_it() -> None:
    positions = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = PositionGram("pos_embed", (3, 4), positions)
    largest = max(abs(float(positions[i] @ positions[j])) for i in range(12) for j in range(12))
    frame = found.to_frame()
    pairs = [(i, j) for i in range(12) for j in range(12) if i != j]
    for i, j in pairs:
        product = float(positions[i] @ positions[j])
        assert float(found.gram[i, j]) == pytest.approx(product / largest, abs=1e-12)
        lengths = math.sqrt(float(positions[i] @ positions[i]) * float(positions[j] @ positions[j]))
        assert float(found.cosine[i, j]) == pytest.approx(product / lengths, abs=1e-12)
    distances = [math.dist(divmod(i, 4), divmod(j, 4)) for i, j in pairs]
    entries = [float(positions[i] @ positions[j]) for i, j in pairs]
    # Whether an entry and its mirror image tie depends on the last bit of a product.
    assert found.distance_correlation == pytest.approx(spearmanr(entries, distances).statistic, abs=1e-4)
    assert list(zip(frame["row"], frame["col"], strict=True)) == [divmod(patch, 4) for patch in range(12)]
    assert frame["neighbour_association"].mean() == pytest.approx(float(found.neighbours.fraction))
    assert frame["norm"].tolist() == pytest.approx([math.sqrt(float(p @ p)) for p in positions])
    assert isinstance(frame, pd.DataFrame)
    nothing = PositionGram("pos_embed", (3, 4), torch.zeros(12, 5, dtype=torch.float64))
    assert not nothing.gram.any()


def test_it_is_told_where_to_go_and_what_there_is() -> None:
    assert "positions" in WHAT
    with pytest.raises(InputError, match=r"use nearsight\.lens\.position_gram"):
        nearsight.measure(timm_vit(), torch.zeros(1, 3, *SIZE), what=["positions"])


def test_positions_follow_the_pixels_of_shuffled_tiles() -> None:
    """Positions that know where their patches come from are found to know it, however tiles were shuffled."""
    side, patch = 8, 4
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2) / 1.0
    # Bumps over the grid: positions are the more alike, the nearer they are.
    known_PC = torch.exp(-torch.cdist(places, places).square() / 4)
    found = {}
    for tiles in (1, 2, 4):
        shuffled = ModelConfig(depth=1, shuffled_tiles=tiles).build((32, 32), 5)
        # An image of the numbers of its patches, as the model gets to see it.
        numbers = torch.arange(side**2).view(side, side).repeat_interleave(patch, 0).repeat_interleave(patch, 1)
        for module in shuffled.modules():
            numbers = module(numbers) if isinstance(module, ShuffledTiles) else numbers
        order = numbers[::patch, ::patch].flatten()
        assert (tiles == 1) == torch.equal(order, torch.arange(side**2))
        learned = next(p for name, p in shuffled.named_parameters() if name.endswith("pos_embed"))
        with torch.no_grad():
            learned.zero_()[0, 1:, : side**2] = known_PC[order]
        found[tiles] = position_gram(shuffled).neighbours.fraction
    assert found[1] > 0.9
    assert found[2] == found[4] == found[1]
    with pytest.raises(InputError, match="finer than the patches"):
        position_gram(ModelConfig(depth=1, shuffled_tiles=32).build((32, 32), 5))
