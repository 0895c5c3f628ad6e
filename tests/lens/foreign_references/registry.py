"""All cases, in the order of the tables."""

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

LIBRARIES = {
    "transformers": ("transformers", "transformers"),
    "vit-pytorch": ("vit_pytorch", "vit-pytorch"),
    "open_clip": ("open_clip", "open_clip_torch"),
    "segment_anything": ("segment_anything", "segment-anything"),
    "torchvision": ("torchvision", "torchvision"),
}
"""What each library is called in Python, and what its package is called."""

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
