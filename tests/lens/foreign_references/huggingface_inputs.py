"""Models of transformers that take something else than images of three channels, or take them in another way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Size

from foreign_references.case import Case
from foreign_references.huggingface_whole import SMALL
from foreign_references.huggingface_windows import whole_or_windows
from foreign_references.places import in_windows, patches, with_axes

EVERY = r".*"
ANY = ""
CLS = patches(prefix=1)
VISION = {**SMALL, "image_size": 64}


def images(side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side)


def whole(name: str, build: Callable[[Any], nn.Module], inputs: Callable[[], Any], **case: Any) -> Case:
    """`build` is given the library, when it is there."""

    def make() -> nn.Module:
        import transformers

        return build(transformers)

    return Case("transformers", name, make, inputs=inputs, **{"image_size": (64, 64), **case})


def sam(library: Any) -> nn.Module:
    vision = {
        **SMALL,
        "image_size": 96,
        "window_size": 4,
        "global_attn_indexes": [1],
        "output_channels": 32,
        "num_pos_feats": 16,
        "mlp_dim": 64,
    }
    prompts = {"hidden_size": 32, "image_size": 96, "patch_size": 16, "image_embedding_size": 6}
    decoder = {
        "hidden_size": 32,
        "mlp_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }
    built: nn.Module = library.SamModel(
        library.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    )
    return built


def matting(library: Any) -> nn.Module:
    backbone = {**SMALL, "num_channels": 4, "image_size": 64, "pretrain_image_size": 64, "out_indices": [2]}
    config = library.VitMatteConfig(
        backbone_config=library.VitDetConfig(**backbone, window_block_indices=[0], window_size=2),
        hidden_size=48,
        convstream_hidden_sizes=[8, 8, 8],
        fusion_hidden_sizes=[8, 8, 8, 8],
    )
    built: nn.Module = library.VitMatteForImageMatting(config)
    return built


def vit(library: Any) -> nn.Module:
    built: nn.Module = library.ViTModel(library.ViTConfig(**VISION))
    return built


def timm_wrapper(library: Any) -> nn.Module:
    config = library.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args={"img_size": 64, "depth": 2})
    built: nn.Module = library.TimmWrapperModel(config)
    return built


def depth_pro(library: Any) -> nn.Module:
    vision = {**VISION, "image_size": 32, "patch_size": 8, "mlp_ratio": 2, "model_type": "dinov2"}
    parts = {f"{part}_model_config": vision for part in ("image", "patch", "fov")}
    config = library.DepthProConfig(
        patch_size=32,
        intermediate_hook_ids=[1, 0],
        intermediate_feature_dims=[8, 8],
        scaled_images_ratios=[0.5, 1.0],
        scaled_images_overlap_ratios=[0.0, 0.2],
        scaled_images_feature_dims=[8, 8],
        fusion_hidden_size=8,
        **parts,
    )
    built: nn.Module = library.DepthProModel(config)
    return built


def seggpt(library: Any) -> nn.Module:
    config = library.SegGptConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        patch_size=16,
        image_size=[128, 64],
        pretrain_image_size=64,
        mlp_dim=64,
        merge_index=0,
        intermediate_hidden_state_indices=[0, 1, 2],
    )
    built: nn.Module = library.SegGptModel(config)
    return built


def prompted() -> dict[str, Tensor]:
    return {name: images() for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}


def beside_masks(found: Recorded, image_size: Size) -> Layer:
    """SegGPT's first layer: images below their prompts, and as a second half of the batch what is known of masks."""
    layer = patches(prefix=16)(found, image_size)
    both = torch.cat([layer.keys_WM2, torch.full_like(layer.keys_WM2, torch.nan)])
    return Layer(layer.grid_size, both, both, "wbh")


CASES: list[Case] = [
    whole("ViTModel, dictionary", vit, lambda: {"pixel_values": images()}, layers={EVERY: CLS}),
    whole("ViTModel, by name", vit, images, layers={EVERY: CLS}, call="pixel_values"),
    whole("TimmWrapperModel", timm_wrapper, images, layers={EVERY: CLS}),
    whole(
        "SamModel",
        sam,
        lambda: {"pixel_values": images(96), "input_points": torch.rand(2, 1, 1, 2) * 90},
        layers={r"vision_encoder.*": whole_or_windows("bw h", "b h")},
        skipped={r"mask_decoder.*": ANY},
        image_size=(96, 96),
        note="with points",
    ),
    whole(
        "VitMatteForImageMatting",
        matting,
        lambda: torch.randn(2, 4, 64, 64),
        layers={r".*layer\.0.*": with_axes(in_windows(16, 2), "bwh"), r".*layer\.1.*": patches(axes="bh")},
        note="four channels",
    ),
    whole(
        "DepthProModel",
        depth_pro,
        images,
        layers={r".*image_encoder.*": patches(prefix=1)},
        skipped={r".*patch_encoder.*": ANY},
        note="parts of the image at several sizes, and the whole made small",
    ),
    whole(
        "GroupViTVisionModel",
        lambda library: library.GroupViTVisionModel(
            library.GroupViTVisionConfig(
                **VISION, depths=[2, 1, 1], num_group_tokens=[4, 2, 0], num_output_groups=[4, 2, 0]
            )
        ),
        images,
        layers={r".*stages\.0\.layers.*": patches(suffix=4, axes="bh")},
        skipped={EVERY: ANY},
        note="group tokens behind the patches; after the first stage no token is a patch",
    ),
    whole(
        "PerceiverForImageClassificationConvProcessing",
        lambda library: library.PerceiverForImageClassificationConvProcessing(
            library.PerceiverConfig(
                num_latents=8,
                d_latents=32,
                d_model=322,
                num_blocks=1,
                num_self_attends_per_block=1,
                num_self_attention_heads=2,
                num_cross_attention_heads=1,
                num_labels=3,
            )
        ),
        lambda: torch.randn(2, 3, 224, 224),
        skipped={EVERY: ANY},
        image_size=(224, 224),
        call="inputs",
        refused="has no spatial attention that can be measured",
        note="a few learned queries look at all pixels",
    ),
    whole(
        "SegGptModel",
        seggpt,
        prompted,
        skipped={EVERY: ANY},
        refused="call='…'",
        note="two images, one above the other",
    ),
    whole(
        "SegGptModel, by name",
        seggpt,
        prompted,
        layers={r".*layers\.0.*": beside_masks, EVERY: patches(prefix=16, axes="bh")},
        call="pixel_values",
        note="an image below another, whose patches have no place on it",
    ),
]
