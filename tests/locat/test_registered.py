"""Names: every one of them builds, and every row of S2's tables in docs/locat.md is what it says, with its costs."""

import ast
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nearsight
from nearsight.errors import InputError
from nearsight.locat import BACKBONES, GaussianConfig, GaussianHeads, add_locat

DOCUMENT = Path(__file__).parents[2] / "docs" / "locat.md"
_ROW = re.compile(r"\| (\d) \| (.+?) \| `(.+?)` \| ([\d,]+) \| `(.+?)` \| ([\d,]+) \|")
ROWS = [
    (f"{table}: {row}", call, int(number.replace(",", "")))
    for table, row, tiny, of_tiny, base, of_base in _ROW.findall(DOCUMENT.read_text(encoding="utf-8"))
    for call, number in ((tiny, of_tiny), (base, of_base))
]
MILLIONS = {"ViT": (6, 86), "Swin": (28, 88), "RegViT": (6, 86), "RoPEViT": (6, 86), "Jumbo": (17, 260)}
"""S2, Table 1: of Tiny and Base, the same with LocAt."""


def call_of(text: str) -> tuple[str, dict[str, Any]]:
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Name):
        return node.id, {}
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_all_rows_are_there() -> None:
    assert [len([row for row, _, _ in ROWS if row.startswith(f"{table}:")]) for table in (1, 5, 7, 8)] == [
        20,
        12,
        10,
        8,
    ]


@pytest.mark.parametrize(("row", "call", "number"), ROWS, ids=[f"{row} {call}" for row, call, _ in ROWS])
def test_a_row_has_the_parameters_it_says(row: str, call: str, number: int) -> None:
    name, settings = call_of(call)
    with torch.device("meta"):
        assert num_parameters(timm.create_model(name, **settings)) == number
    if row.startswith("1:"):
        method = row.removeprefix("1: ").removesuffix(" + LocAt")
        # The paper cuts the decimals off for ViT-Base (86.57), and rounds them for Swin-Base (87.77).
        assert abs(number / 1e6 - MILLIONS[method]["_base_" in name]) < 0.6


ADDED = {
    **{backbone: 12 * 3 * 65 for backbone in BACKBONES if backbone.startswith("vit_")},
    "swin_tiny_patch4_window7_224": 12 * 3 * 33,
    "swin_base_patch4_window7_224": 24 * 3 * 33,
    "jumbo_vit_tiny_patch16_224": 12 * 3 * 65 + 2 * 192,
    "jumbo_vit_base_patch16_224": 12 * 3 * 65 + 2 * 768,
    "compact_vit": 8 * 3 * 25,
    "compact_jumbo_vit": 8 * 3 * 25 + 2 * 192,
}
"""Parameters: three outputs of a head's queries and of 1 in every block; Jumbo gets a norm of its patches, too."""


def test_the_document_has_all_names() -> None:
    before_the_tables, _ = DOCUMENT.read_text(encoding="utf-8").split("## Every row")
    written = set()
    for short in re.findall(r"`((?:locat_|\[locat_\]).+?)`", before_the_tables):
        parts = [part.split(",") for part in re.split("[{}]", short.replace("[locat_]", "{,locat_}"))]
        written |= {"".join(choice) for choice in itertools.product(*parts)}
    jumbos = {backbone for backbone in BACKBONES if "jumbo" in backbone}
    assert written == {f"locat_{backbone}" for backbone in BACKBONES} | jumbos


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_name_is_the_backbone_with_locat(backbone: str) -> None:
    with torch.device("meta"):
        model, plain = timm.create_model(f"locat_{backbone}"), timm.create_model(backbone)
    names = dict(plain.named_parameters())
    new = {name: parameter for name, parameter in model.named_parameters() if name not in names}
    assert all(".attn.gaug." in name for name in new if not name.startswith("norm.patches."))
    assert sum(parameter.numel() for parameter in new.values()) == ADDED[backbone]
    assert num_parameters(model) - num_parameters(plain) == ADDED[backbone]
    assert model.pretrained_cfg["architecture"] == f"locat_{backbone}"
    assert model.pretrained_cfg["mean"] == plain.pretrained_cfg["mean"]


SMALL: dict[str, dict[str, Any]] = {
    "locat_vit_tiny_patch16_224": {"depth": 2, "img_size": 64},
    "locat_vit_tiny_patch16_reg4_224": {"depth": 2, "img_size": 64},
    "locat_vit_tiny_patch16_rope_mixed_224": {"depth": 2, "img_size": 64},
    "locat_swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1), "img_size": 56},
    "locat_jumbo_vit_tiny_patch16_224": {"depth": 2, "img_size": 64, "num_jumbo": 2},
    "locat_compact_vit": {"depth": 2},
    "locat_compact_jumbo_vit": {"depth": 2, "num_jumbo": 2},
}


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("flags", [{}, {"pos_embed": "none"}, {"global_pool": "avg"}, {"gaug": False}], ids=str)
def test_names_and_flags_go_together(name: str, flags: dict[str, Any]) -> None:
    settings = {**SMALL[name], "num_classes": 3, **flags}
    if "pos_embed" in flags and ("swin" in name or "rope" in name):
        with pytest.raises(InputError, match="has no positions to leave out"):
            nearsight.create_model(name, **settings)
        return
    model = nearsight.create_model(name, **settings).eval()
    side = settings.get("img_size", 32)
    images = torch.randn(2, 3, side, side)
    assert model(images).shape == (2, 3)
    assert getattr(model, "pos_embed", None) is None or "pos_embed" not in flags
    features, maps = model.forward_intermediates(images)
    assert torch.isfinite(features).all()
    assert all(torch.isfinite(each).all() for each in maps)


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "compact_jumbo_vit"])
def test_a_name_does_what_add_locat_does(name: str) -> None:
    options: dict[str, Any] = {"kernel": "laplace", "width": 2.0, "scale": "auto"}
    options |= {"resolution": "squared", "blocks": [1], "initial_grid": (3, 5)}
    settings = {"depth": 2, "num_classes": 3}
    torch.manual_seed(0)
    named = timm.create_model(f"locat_{name}", **settings, **options).eval()
    torch.manual_seed(0)
    plain = timm.create_model(name, **settings, **({"patch_norm": True} if "jumbo" in name else {}))
    for parameter in plain.parameters():  # the classifier of a Jumbo starts at 0, and would hide everything
        parameter.add_(0.05)
    named.load_state_dict(plain.state_dict())
    images = torch.randn(2, *named.pretrained_cfg["input_size"])
    torch.testing.assert_close(named(images), add_locat(plain, **options).eval()(images))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_option_and_image_size_goes_with_every_name(backbone: str) -> None:
    """Those of `add_locat`, and the backbone's own, of images that it was not made for, on all grids."""
    options = {"kernel": "inverse", "width": "input", "isotropic": True, "scale": "none", "resolution": "squared"}
    if "swin" in backbone:
        settings: dict[str, Any] = {"strict_img_size": False, "depths": (2, 1, 1, 1)}
    else:
        settings = {"dynamic_img_size": True, "depth": 2}
    settings |= {"img_size": 112, "num_classes": 7, "blocks": [1], "initial_grid": (3, 5)}
    with torch.device("meta"):
        model = nearsight.create_model(f"locat_{backbone}", **settings, **options)
        heads = {name: part for name, part in model.named_modules() if isinstance(part, GaussianHeads)}
        assert list(heads) == ["layers.0.blocks.1.attn.gaug" if "swin" in backbone else "blocks.1.attn.gaug"]
        (gaug,) = heads.values()
        assert gaug.config == GaussianConfig(**options)
        assert gaug.grid_size == (3, 5)
        patch_height, patch_width = model.patch_embed.patch_size
        assert model.patch_embed.grid_size == (112 // patch_height, 112 // patch_width)
        assert model(torch.zeros(1, 3, 112, 112)).shape == (1, 7)
        assert model(torch.zeros(1, 3, 224, 336)).shape == (1, 7)


def test_options_that_add_locat_refuses() -> None:
    with pytest.raises(InputError, match="no block 9 in CompactViT"):
        timm.create_model("locat_compact_vit", blocks=[9])
    with pytest.raises(InputError, match="'cubed' is not a known resolution"):
        timm.create_model("locat_compact_vit", resolution="cubed")


@torch.no_grad()
def test_the_refinement_of_jumbo_reaches_its_wide_token() -> None:
    """S2's order: norm of the wide token and of the patches, refinement of all, then the wide token to the head."""
    settings = {"depth": 1, "num_jumbo": 2, "num_classes": 3}
    model = timm.create_model("locat_compact_jumbo_vit", gaug=False, **settings).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    heads = tokens.unflatten(-1, (8, 24)).transpose(1, 2)
    weights = (heads @ heads.mT / 24**0.5).softmax(-1)
    refined = (weights @ heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(model(images), model.head(refined[:, :2].flatten(1)), rtol=1e-4, atol=1e-5)


def test_maps_as_timm_gives_them() -> None:
    model = timm.create_model("locat_compact_vit", features_only=True, out_indices=(0, 7))
    assert [each.shape for each in model(torch.randn(1, 3, 32, 32))] == 2 * [(1, 192, 8, 8)]


def test_maps_of_swin_are_as_many_as_its_backbones() -> None:
    options = {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)}
    swin, local = (
        timm.create_model(name, features_only=True, **options)
        for name in ("swin_tiny_patch4_window7_224", "locat_swin_tiny_patch4_window7_224")
    )
    assert local.feature_info.channels() == swin.feature_info.channels() == [12, 24, 48, 96]
    assert [each.shape[1] for each in local(torch.randn(1, 3, 64, 64))] == [12, 24, 48, 96]


def test_weights_of_ones_own(tmp_path: Path) -> None:
    """By timm's ways to load them."""
    options = {"depth": 1, "embed_dim": 24, "num_heads": 2, "kernel": "laplace"}
    model = timm.create_model("locat_compact_vit", **options).eval()
    images = torch.randn(1, 3, 32, 32)
    save_for_hf(model, str(tmp_path), model_args=options)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images), model(images))
    (tmp_path / "own.safetensors").write_bytes(save(model.state_dict()))
    file = {"file": str(tmp_path / "own.safetensors")}
    again = timm.create_model("locat_compact_vit", pretrained=True, pretrained_cfg_overlay=file, **options).eval()
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("local", ["", "locat_"])
@pytest.mark.parametrize(
    ("backbone", "other"),
    [
        ("vit_tiny_patch16_224", {"img_size": 96}),
        ("vit_tiny_patch16_224", {"patch_size": 8}),
        ("vit_tiny_patch16_reg4_224", {"img_size": 96}),
        ("vit_tiny_patch16_rope_mixed_224", {"patch_size": 8}),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": (4, 4)}),
        ("jumbo_vit_tiny_patch16_224", {"img_size": 96}),
        ("compact_vit", {"img_size": 96}),
    ],
)
def test_weights_of_ones_own_at_another_size(local: str, backbone: str, other: dict[str, Any], tmp_path: Path) -> None:
    swin = {"img_size": 56, "embed_dim": 12, "depths": (2, 1), "num_heads": (2, 4)}
    vit = {"img_size": 64, "embed_dim": 24, "depth": 1, "num_heads": 2}
    options = {**(swin if "swin" in backbone else vit), "num_classes": 7}
    model = timm.create_model(local + backbone, **options).eval()
    save_for_hf(model, str(tmp_path), model_args=options)
    learned_on = (7, 7) if "swin" in backbone else model.patch_embed.grid_size
    others = {**other, "initial_grid": learned_on} if local else other
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **others).eval()
    # What timm does to a model that is there already is the same resampling.
    model.set_input_size(**other)
    images = torch.randn(1, 3, *again.patch_embed.img_size)
    torch.testing.assert_close(again.forward_features(images), model.forward_features(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("classifier", [True, False])
def test_weights_of_a_swin_of_ones_own_stay_as_they_are(classifier: bool, tmp_path: Path) -> None:
    options = {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (1, 1, 1), "num_heads": (1, 2, 3)}
    options["num_classes"] = 7 if classifier else 0
    model = timm.create_model("locat_swin_tiny_patch4_window7_224", **options).eval()
    save_for_hf(model, str(tmp_path), model_args=options)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **options).eval()
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(again(images), model(images))


def test_there_are_no_published_weights() -> None:
    with pytest.raises(InputError, match=r"add_locat\(timm\.create_model\('vit_base_patch16_224', pretrained=True\)\)"):
        timm.create_model("locat_vit_base_patch16_224", pretrained=True)


PRINTED = {
    "vit_tiny_patch16_224": (1.26, 1.27),
    "vit_base_patch16_224": (17.58, 17.64),
    "swin_tiny_patch4_window7_224": (4.50, 4.51),
    "swin_base_patch4_window7_224": (15.46, 15.47),
    "vit_tiny_patch16_reg4_224": (1.29, 1.30),
    "vit_base_patch16_reg4_224": (17.95, 18.02),
    "vit_tiny_patch16_rope_mixed_224": (1.26, 1.27),
    "vit_base_patch16_rope_mixed_224": (17.58, 17.64),
    "jumbo_vit_tiny_patch16_224": (1.40, 1.42),
    "jumbo_vit_base_patch16_224": (19.74, 19.81),
}
"""Billions, without and with LocAt."""
CLOSE = 0.0056
"""Half of the last digit, and the angles of RoPE (0.002), which the paper does not count."""


@functools.cache
def multiply_adds(name: str) -> float:
    """In billions, as the paper's tool (ptflops) counts them: beside the products, 2 for every number that is
    normalised and 1 for every number through a GELU.
    """
    others = 0

    def count(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal others
        others += output.numel() * (2 if isinstance(module, nn.LayerNorm) else 1)

    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.zeros(1, 3, 224, 224)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.GELU):
            module.register_forward_hook(count)
    with torch.no_grad(), FlopCounterMode(display=False) as products:
        model(images)
    return (products.get_total_flops() / 2 + others) / 1e9


@pytest.mark.parametrize("backbone", PRINTED)
def test_as_printed(backbone: str) -> None:
    plain, local = multiply_adds(backbone), multiply_adds(f"locat_{backbone}")
    assert (plain, local) == pytest.approx(PRINTED[backbone], abs=CLOSE)
    # What LocAt adds, to the same digit.
    assert local - plain == pytest.approx(PRINTED[backbone][1] - PRINTED[backbone][0], abs=2 * CLOSE)


def test_what_locat_adds_to_vit_base() -> None:
    """Its heads on all queries, three numbers from each, and one attention of tokens with themselves."""
    heads, refinement = 12 * 197 * 12 * 64 * 3, 2 * 197**2 * 768
    added = multiply_adds("locat_vit_base_patch16_224") - multiply_adds("vit_base_patch16_224")
    assert added * 1e9 == pytest.approx(heads + refinement)
