"""The zoo: three trained compact ViTs that come with the package. README.md beside this file is their card.

Each has a folder, called by its name in timm, that is a run folder: weights (half precision), config, history, heads,
layers, result and provenance. timm knows them by their tags:

    timm.create_model("compact_vit.modern_cifar100", pretrained=True)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS = {
    "compact_vit.baseline_cifar100": "Baseline: random crops and flips",
    "compact_vit.modern_cifar100": "Modern: also AutoAugment, CutMix in every batch and label smoothing of 0.1",
    "locat_compact_vit.modern_cifar100": "LocAt: trained as Modern, with LocAt (GAug and PRR) in the model",
}
"""Name → how it was trained, in one line."""
IMAGES = "cifar100-sample"
"""The data set that they are measured on where no other is named."""
CARD = Path(__file__).with_name("README.md")


def folder(name: str) -> Path:
    """The run folder of a model of the zoo."""
    return Path(__file__).parent / name


def pretrained_cfgs(architecture: str, images: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For timm's `generate_default_cfgs`: the zoo's weights of an architecture, and the name without a tag, which has
    none: the models are conditions of one experiment, and none of them is the default."""
    trained = {
        name: {**images, "file": str(folder(name) / "model.safetensors"), "description": about}
        for name, about in MODELS.items()
        if name.partition(".")[0] == architecture
    }
    return {**trained, f"{architecture}.*": dict(images)}  # timm's mark of the default, which has to come last
