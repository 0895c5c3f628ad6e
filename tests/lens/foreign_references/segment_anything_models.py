"""Image encoders of segment_anything, and a whole SAM."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from vit_references.mechanisms import plain_windows, tokens, windows, windows_unless_whole

from foreign_references.case import Case

EVERY = r".*"
ENCODER = {
    "img_size": 96,
    "patch_size": 16,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio": 2.0,
    "out_chans": 32,
}


def window_size(block: Any) -> Any:
    return block.window_size


WINDOWS = windows_unless_whole(windows(plain_windows, window_size, axes="bwh"), tokens(axes="bh"), window_size)


def encoder(**settings: Any) -> nn.Module:
    from segment_anything.modeling import ImageEncoderViT

    built: nn.Module = ImageEncoderViT(**ENCODER, **settings)
    return built


def sam() -> nn.Module:
    from segment_anything.modeling import MaskDecoder, PromptEncoder, Sam, TwoWayTransformer

    prompts = PromptEncoder(embed_dim=32, image_embedding_size=(6, 6), input_image_size=(96, 96), mask_in_chans=4)
    transformer = TwoWayTransformer(depth=1, embedding_dim=32, mlp_dim=32, num_heads=2)
    decoder = MaskDecoder(transformer_dim=32, transformer=transformer, num_multimask_outputs=3)
    built: nn.Module = Sam(encoder(use_rel_pos=True, window_size=4, global_attn_indexes=(1,)), prompts, decoder)
    return built


def encode(model: Any, images: Tensor) -> Any:
    return model.image_encoder(images)


def segment(model: Any, images: Tensor) -> Any:
    """As SAM is called: a list of images, here without prompts."""
    return model([{"image": image, "original_size": (96, 96)} for image in images], multimask_output=True)


def case(name: str, **settings: Any) -> Case:
    more = {name: settings.pop(name) for name in ("note", "quick") if name in settings}
    return Case(
        "segment_anything", name, partial(encoder, **settings), layers={EVERY: WINDOWS}, image_size=(96, 96), **more
    )


CASES: list[Case] = [
    case("ImageEncoderViT", note="the whole image"),
    case(
        "ImageEncoderViT, windows",
        window_size=4,
        global_attn_indexes=(1,),
        use_rel_pos=True,
        quick=True,
        note="windows with padding, then the whole image; relative positions",
    ),
    case("ImageEncoderViT, windows of 3", window_size=3, use_rel_pos=True, use_abs_pos=False, note="windows alone"),
    Case(
        "segment_anything",
        "Sam, its encoder",
        sam,
        layers={EVERY: WINDOWS},
        image_size=(96, 96),
        call=encode,
        note="as the ViT-B, L and H of SAM",
    ),
    Case(
        "segment_anything",
        "Sam",
        sam,
        layers={r"image_encoder.*": WINDOWS},
        skipped={r"mask_decoder.*": ""},
        image_size=(96, 96),
        call=segment,
        note="with its mask decoder, whose tokens and patches look at each other",
    ),
]
