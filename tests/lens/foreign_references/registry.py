"""All cases, in the order of the tables."""

from typing import NamedTuple

from foreign_references import (
    huggingface_detectors,
    huggingface_heads,
    huggingface_inputs,
    huggingface_packed,
    huggingface_pooled,
    huggingface_text,
    huggingface_towers,
    huggingface_whole,
    huggingface_windows,
    open_clip_models,
    segment_anything_models,
    torchvision_models,
    videos,
    vit_pytorch_parts,
    vit_pytorch_whole,
)
from foreign_references.case import Case


class Library(NamedTuple):
    module: str
    """What it is called in Python."""
    package: str
    """What its package is called."""
    what: str
    """What was looked at, in words."""


LIBRARIES = {
    "transformers": Library(
        "transformers",
        "transformers",
        "Backbones, image towers of multimodal models, detectors, models for depth and segmentation, and video models.",
    ),
    "vit-pytorch": Library("vit_pytorch", "vit-pytorch", "Its models that take images or videos."),
    "open_clip": Library("open_clip", "open_clip_torch", "Its image towers, and whole models."),
    "segment_anything": Library("segment_anything", "segment-anything", "Its image encoder, and a whole SAM."),
    "torchvision": Library("torchvision", "torchvision", "Its transformers for images and videos."),
}

CASES: list[Case] = [
    *huggingface_whole.CASES,
    *huggingface_windows.CASES,
    *huggingface_pooled.CASES,
    *huggingface_heads.CASES,
    *huggingface_detectors.CASES,
    *huggingface_towers.CASES,
    *huggingface_packed.CASES,
    *huggingface_text.CASES,
    *huggingface_inputs.CASES,
    *vit_pytorch_whole.CASES,
    *vit_pytorch_parts.CASES,
    *open_clip_models.CASES,
    *segment_anything_models.CASES,
    *torchvision_models.CASES,
    *videos.CASES,
]
