"""Models of vit-pytorch whose patches look at the whole image."""

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from vit_references.checking import CLASS, TALKING

from foreign_references.case import Case
from foreign_references.places import but_not_itself, patches

EVERY = r".*"
SMALL = {"patch_size": 16, "num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 64, "dim_head": 16}
WIDE = {**SMALL, "image_size": (64, 96)}
SQUARE = {**SMALL, "image_size": 64}
SQUARE_IMAGE = (64, 64)


def model(name: str, settings: Mapping[str, Any], **case: Any) -> Case:
    """`module.Class` of vit_pytorch; what follows a comma in its name tells variants apart."""
    return Case("vit-pytorch", name, partial(_build, name.partition(",")[0], settings), **case)


def _build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    module, _, kind = name.rpartition(".")
    built: nn.Module = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**settings)
    return built


def plain(name: str, prefix: int = 0, settings: Mapping[str, Any] = WIDE, **case: Any) -> Case:
    """Patches behind some other tokens."""
    size = (64, 96) if settings.get("image_size") != 64 else SQUARE_IMAGE
    return model(name, settings, **{"layers": {EVERY: patches(prefix=prefix)}, "image_size": size, **case})


def shifted(name: str, **case: Any) -> Case:
    """Patches of an image and of its shifted copies."""
    words = "no patch looks at itself; patches of shifted images"
    return plain(name, layers={EVERY: but_not_itself(patches(prefix=1))}, gain=2, note=words, **case)


def with_memories() -> nn.Module:
    """A ViT with an adapter that adds learned keys to every layer."""
    from vit_pytorch.learnable_memory_vit import Adapter, ViT

    adapter: nn.Module = Adapter(vit=ViT(**WIDE), num_memories_per_layer=3, num_classes=5)
    return adapter


def mixed_alone() -> nn.Module:
    """DeepViT mixes the maps of its heads; without the norm behind that, nothing else tells it from a plain ViT."""
    from vit_pytorch.deepvit import DeepViT

    built: nn.Module = DeepViT(**SQUARE)
    for part in built.modules():
        if hasattr(part, "reattn_weights"):
            part.reattn_norm = nn.Identity()
            part.reattn_weights.data = part.reattn_weights.data.softmax(0)
    return built


def by_torch() -> nn.Module:
    """vit-pytorch's frame around an encoder of torch."""
    from vit_pytorch.efficient import ViT

    layer = nn.TransformerEncoderLayer(48, 3, 64, batch_first=True)
    built: nn.Module = ViT(
        image_size=(64, 96), patch_size=16, num_classes=5, dim=48, transformer=nn.TransformerEncoder(layer, 2)
    )
    return built


def as_list(model: nn.Module, images: Tensor) -> Any:
    """NaViT takes images of any size, one by one."""
    return model(list(images))


WITHOUT_FLEX: dict[str, Any] = {
    "environment": {"ATEN_CPU_CAPABILITY": "default"},
    "note": "with `ATEN_CPU_CAPABILITY=default`, for which it has unfused code",
}
LOOPED = {
    "image_size": (64, 96),
    "patch_size": 16,
    "num_classes": 5,
    "dim": 48,
    "heads": 3,
    "dim_head": 16,
    "mlp_dim": 64,
    "pre_loop_depth": 1,
    "num_looped_blocks": 1,
    "post_loop_depth": 1,
    "loop_depth": 2,
}
COMPACT = {
    "img_size": (64, 96),
    "embedding_dim": 48,
    "n_conv_layers": 2,
    "kernel_size": 3,
    "stride": 2,
    "padding": 1,
    "num_layers": 2,
    "num_heads": 3,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
SCORES = "no queries"
NOTHING = "has no spatial attention that can be measured"
ANY = ""
"""Whatever reason the lens gives."""
SLOW_ROPE = {"rope_max_freq": 10.0}
"""Angles of 10,000 have errors of 5e-4 in float32, which is the model's own affair."""
ND = {**SMALL, "ndim": 2, "input_shape": (64, 96)}

CASES: list[Case] = [
    plain("vit.ViT", 1, quick=True, note="CLS"),
    plain("simple_vit.SimpleViT", quick=True),
    plain("simple_flash_attn_vit.SimpleViT", note="fused"),
    plain(
        "simple_uvit.SimpleUViT", settings=WIDE, layers={EVERY: patches(suffix=4)}, note="registers behind the patches"
    ),
    plain("simple_vit_attn_residual.SimpleViTAttnResidual", layers={r".*\.fn": patches()}, skipped={r".*attn": ANY}),
    plain("attn_residual_with_dca_simple_vit.SimpleViT", layers={r".*\.attn": patches()}, skipped={r".*attn_res": ANY}),
    plain("simple_vit_orthog_residual_update.SimpleViT"),
    plain("simple_vit_with_fft.SimpleViT", 24, {**WIDE, "freq_patch_size": 16}, note="behind tokens of the spectrum"),
    plain(
        "simple_vit_with_hyper_connections.SimpleViT",
        settings={**WIDE, "num_residual_streams": 2},
        layers={EVERY: patches(suffix=4)},
        note="several residual streams, registers",
    ),
    plain("simple_vit_with_patch_dropout.SimpleViT", note="no dropout in eval mode"),
    plain("simple_vit_with_qk_norm.SimpleViT", gain=1),
    plain("simple_vit_with_register_tokens.SimpleViT", layers={EVERY: patches(suffix=4)}, quick=True, note="registers"),
    plain("simple_vit_with_relative_proj_pos_bias.SimpleViT", note="position bias from queries"),
    plain("simple_vit_with_sparse_gating.SimpleViTWithSparseGating", 4, note="registers; gates for patches alone"),
    plain("simple_vit_with_specialized_cls.SimpleViT", 1, note="other projections for CLS"),
    plain("simple_vit_with_value_residual.SimpleViT"),
    plain("jet_vit.JetViT", settings={**WIDE, "window_size": 2}),
    plain("jumbo_vit.JumboViT", 6, note="six CLS tokens"),
    plain("learnable_memory_vit.ViT", 1),
    plain("looped_vit.LoopedViT", 1, LOOPED, note="one block twice"),
    plain("mp3.ViT"),
    plain("normalized_vit.nViT", gain=1),
    plain("parallel_vit.ViT", 1, note="two attentions side by side"),
    plain("rvt.RvT", settings=SQUARE, layers={EVERY: patches(prefix=1, axes="bh")}, note="axial RoPE, convolutions"),
    plain("vit_5.ViT", 5, SQUARE, gain=1, note="RoPE, registers"),
    plain("vit_detpool.ViTDetPool", 1),
    plain("vit_with_decorr.ViT", 1),
    plain("vit_with_keel_post_ln.ViT", 1),
    plain("vit_with_patch_dropout.ViT", 1),
    shifted("vit_for_small_dataset.ViT"),
    shifted("vit_for_small_dataset.ViT, told its grid", options={"grid": (4, 6), "prefix": 1}),
    Case(
        "vit-pytorch",
        "learnable_memory_vit.Adapter",
        with_memories,
        layers={EVERY: patches(prefix=2, more_keys=3)},
        note="learned keys in every layer, for which CLS has a mask",
    ),
    plain(
        "cct.CCT",
        settings=COMPACT,
        layers={r".*self_attn": patches()},
        skipped={"classifier": SCORES},
        unspoken=["classifier"],
        note="behind convolutions; pooling by scores",
    ),
    plain("xcit.XCiT", settings={**SQUARE, "cls_depth": 1}, layers={}, skipped={EVERY: ANY}, refused="channels"),
    plain("cait.CaiT", settings={**SQUARE, "cls_depth": 1}, layers={}, skipped={EVERY: ANY}, refused=TALKING),
    plain("deepvit.DeepViT", settings=SQUARE, layers={}, skipped={EVERY: ANY}, refused=TALKING, note="re-attention"),
    Case(
        "vit-pytorch",
        "deepvit.DeepViT, mixed alone",
        mixed_alone,
        layers={EVERY: patches(prefix=1)},
        after="reattn_norm",
        image_size=SQUARE_IMAGE,
        note="re-attention whose mixtures are still distributions",
    ),
    plain(
        "ats_vit.ViT",
        settings={**WIDE, "max_tokens_per_depth": (20, 10)},
        layers={},
        skipped={EVERY: ANY},
        refused="elsewhere in one image than in another",
        note="tokens are sampled by their attention",
    ),
    plain(
        "vit_with_patch_merger.ViT",
        settings={**WIDE, "patch_merge_num_tokens": 4},
        layers={r".*layers\.0\.0": patches()},
        skipped={r".*merger": ANY, r".*layers\.1\.0.*": ANY},
        note="after the merger tokens have no place",
    ),
    Case("vit-pytorch", "efficient.ViT", by_torch, layers={EVERY: patches(prefix=1)}, note="encoder of torch"),
    plain(
        "na_vit.NaViT",
        layers={r"transformer.*": patches()},
        skipped={"attn_pool": CLASS},
        call=as_list,
        packing="together",
        gain=1,
        note="all images in one sequence, kept apart by a mask",
    ),
    plain("na_vit_nested_tensor.NaViT", layers={}, call=as_list, refused="nested tensors", note="nested tensors"),
    plain("vit_nd.ViTND", settings=ND, layers={}, refused="flex", note="flex attention"),
    plain("vit_nd_rotary.ViTND", settings=ND, layers={}, refused="flex", note="flex attention"),
    plain("vit_nd_pope.ViTND", settings=ND, layers={}, refused="flex", note="flex attention"),
    plain("vit_nd.ViTND, without flex", 1, ND, **WITHOUT_FLEX),
    plain("vit_nd_rotary.ViTND, without flex", settings={**ND, **SLOW_ROPE}, **WITHOUT_FLEX),
    plain("vit_nd_pope.ViTND, without flex", settings={**ND, "pope_max_freq": 10.0}, **WITHOUT_FLEX),
    plain("wwt.WWT", settings={**WIDE, "num_slots": 4}, layers={}, skipped={EVERY: ANY}, refused=NOTHING, note="slots"),
]
