"""Weights that were learned at another size, made to fit: what timm does under a backbone's own name."""

from collections.abc import Callable, Mapping
from typing import Any

from timm.models import eva, swin_transformer, vision_transformer
from torch import Tensor, nn

_FAMILIES: tuple[tuple[type[nn.Module], Callable[[Any, nn.Module], dict[str, Tensor]]], ...] = (
    (vision_transformer.VisionTransformer, vision_transformer.checkpoint_filter_fn),
    (eva.Eva, eva.checkpoint_filter_fn),
    (swin_transformer.SwinTransformer, swin_transformer.checkpoint_filter_fn),
)


def fitted(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """`weights` with positions, patch embedding and biases of windows resampled for the size of `model`'s."""
    own = model.state_dict()
    # timm takes a Swin without a classifier for one of an old release, and renames what it should leave.
    if all(name in own and own[name].shape == weight.shape for name, weight in weights.items()):
        return weights
    return next((fit(weights, model) for family, fit in _FAMILIES if isinstance(model, family)), weights)
