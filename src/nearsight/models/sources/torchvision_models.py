"""Models of torchvision, by their name there."""

from typing import Any

from torch import nn
from torchvision.models import VisionTransformer, get_model, get_model_weights, list_models
from torchvision.models.vision_transformer import interpolate_embeddings

from nearsight.errors import InputError, unknown_name
from nearsight.models.sources.base import ImageSizeError, downloading, one_line, preparation


def load_torchvision(name: str, *, pretrained: bool, image_size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    if name not in list_models():
        raise unknown_name("torchvision model", name, list_models())
    weights = getattr(get_model_weights(name), "DEFAULT", None)
    if weights is None and pretrained:
        raise InputError(f"torchvision has no published weights for {name}; leave out --pretrained")
    config = _preparation(name, weights, image_size)
    return _build(name, weights if pretrained else None, config["input_size"][-1]), config


def _preparation(name: str, weights: Any, image_size: int | None) -> dict[str, Any]:
    """From the weights' entry, whether or not they are loaded: a random model is compared with the trained one."""
    transforms: Any = None if weights is None else weights.transforms()
    if not hasattr(transforms, "crop_size"):
        if image_size is None:
            raise ImageSizeError(f"torchvision does not say which images {name} takes; say so with --image-size")
        return preparation((image_size, image_size))
    (crop,), (resize,) = transforms.crop_size, transforms.resize_size
    side = crop if image_size is None else image_size
    return preparation(
        (side, side),
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        interpolation=transforms.interpolation.value,
        resize_to=round(resize * side / crop),
    )


def _build(name: str, weights: Any, image_size: int) -> nn.Module:
    # Only the plain ViT is built for one size. Its default is 224, even where its published weights are for 518.
    is_vit = name.startswith("vit_")
    try:
        model: nn.Module = get_model(name, weights=None, **({"image_size": image_size} if is_vit else {}))
    except Exception as error:
        raise InputError(f"torchvision cannot build {name}: {one_line(error)}") from error
    if weights is not None:
        state = downloading(f"torchvision:{name}", lambda: weights.get_state_dict(progress=False, check_hash=True))
        if isinstance(model, VisionTransformer):
            state = interpolate_embeddings(image_size, model.patch_size, state)
        model.load_state_dict(state)
    return model
