"""Models of transformers for images and text: a batch is a dictionary, as their processors make it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foreign_references.case import Case
from foreign_references.huggingface_inputs import ANY, CLS, EVERY, VISION, images, whole
from foreign_references.huggingface_whole import SMALL
from foreign_references.huggingface_windows import SWIN
from foreign_references.places import causal, patches

LANGUAGE = {name: value for name, value in SMALL.items() if name != "patch_size"}
TEXT = {**LANGUAGE, "vocab_size": 40, "max_position_embeddings": 32}
IMAGE_TOKEN = 31


def words() -> Tensor:
    return torch.randint(3, 30, (2, 6))


def dual(name: str, **text: Any) -> Callable[[Any], nn.Module]:
    """Two towers side by side."""

    def build(library: Any) -> nn.Module:
        vision = {**VISION, "initializer_range": 0.02} if name.startswith("Blip") else VISION
        settings = {"text_config": {**TEXT, **text}, "vision_config": vision}
        if not name.startswith("Siglip"):
            settings["projection_dim"] = 32
        built: nn.Module = getattr(library, name)(getattr(library, name.replace("Model", "Config"))(**settings))
        return built

    return build


def pair() -> dict[str, Tensor]:
    return {"input_ids": words(), "pixel_values": images()}


def captioning(encoder: Callable[[Any], Any]) -> Callable[[Any], nn.Module]:
    def build(library: Any) -> nn.Module:
        config = library.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            encoder(library), library.BertConfig(**TEXT)
        )
        built: nn.Module = library.VisionEncoderDecoderModel(config)
        return built

    return build


def to_caption() -> dict[str, Tensor]:
    return {"pixel_values": images(), "decoder_input_ids": words()}


def llava(library: Any) -> nn.Module:
    config = library.LlavaConfig(
        vision_config=library.CLIPVisionConfig(**VISION),
        text_config=library.LlamaConfig(**TEXT, num_key_value_heads=3),
        image_token_id=IMAGE_TOKEN,
    )
    built: nn.Module = library.LlavaModel(config)
    return built


BESIDE_TEXT = {r".*vision_model.*": CLS}
OF_TEXT = {r".*text_model.*": ANY}

CASES: list[Case] = [
    whole("CLIPModel", dual("CLIPModel", eos_token_id=2), pair, layers=BESIDE_TEXT, skipped=OF_TEXT, note="with text"),
    whole(
        "CLIPModel, its images",
        dual("CLIPModel", eos_token_id=2),
        images,
        layers=BESIDE_TEXT,
        call=lambda model, batch: model.get_image_features(pixel_values=batch),
        note="images alone",
    ),
    whole(
        "SiglipModel",
        dual("SiglipModel"),
        pair,
        layers={r".*vision_model\.encoder.*": patches()},
        skipped={**OF_TEXT, r".*head.*": ANY},
        note="with text",
    ),
    whole(
        "BlipModel",
        dual("BlipModel", encoder_hidden_size=48, projection_dim=32),
        pair,
        layers=BESIDE_TEXT,
        skipped=OF_TEXT,
        unspoken=OF_TEXT,
        note="with text",
    ),
    whole("OwlViTModel", dual("OwlViTModel"), pair, layers=BESIDE_TEXT, skipped=OF_TEXT, note="with text"),
    whole(
        "ViltModel",
        lambda library: library.ViltModel(
            library.ViltConfig(**VISION, vocab_size=40, max_position_embeddings=16, max_image_length=16)
        ),
        pair,
        skipped={EVERY: ANY},
        refused="elsewhere in one image than in another",
        note="its patches come in random order",
    ),
    whole(
        "LayoutLMv3Model",
        lambda library: library.LayoutLMv3Model(
            library.LayoutLMv3Config(**TEXT, input_size=64, patch_size=16, coordinate_size=8, shape_size=8)
        ),
        lambda: {**pair(), "bbox": torch.randint(0, 99, (2, 6, 1)).expand(-1, -1, 4).contiguous()},
        layers={EVERY: patches(prefix=7)},
        note="behind words and CLS",
    ),
    whole(
        "LlavaModel",
        llava,
        lambda: {
            "input_ids": torch.tensor([[1, *[IMAGE_TOKEN] * 16, 4, 5]] * 2),
            "pixel_values": images(),
            "use_cache": False,
        },
        layers={r"vision_tower.*": CLS, r"language_model.*": causal(patches(prefix=1, suffix=2))},
        is_eager=False,
        quick=True,
        note="patches again among the words, where none looks ahead",
    ),
    whole(
        "VisionEncoderDecoderModel, ViT",
        captioning(lambda library: library.ViTConfig(**VISION)),
        to_caption,
        layers={r"encoder.*": CLS},
        skipped={r"decoder.*": ANY},
        note="as TrOCR",
    ),
    whole(
        "VisionEncoderDecoderModel, Donut",
        captioning(
            lambda library: library.DonutSwinConfig(
                image_size=(64, 64), patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 3], window_size=4
            )
        ),
        to_caption,
        layers={r"encoder.*": SWIN},
        skipped={r"decoder.*": ANY},
        note="as Donut and Nougat",
    ),
]
