"""Inducers that do not change an attention but what is around it: refinement (PRR) and convolutional positions (CPE).

They attach themselves to timm's ViTs, Eva, Swin and GCViT, whose blocks and grids are known.

Shape suffixes: B images, N tokens, P patches, C channels, R rows, c columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearsight.errors import InputError
from nearsight.locat.inducers.base import Inducer, Layers, register_locality

if TYPE_CHECKING:
    from torch import nn


@register_locality
@dataclass(frozen=True, kw_only=True)
class PatchRefinement(Inducer):
    """PRR (S2): one more attention before the pooling, without weights, so that the loss reaches every patch.

    It has nothing to learn and takes effect at once.
    """

    name = "prr"
    about = "refined patches before the pooling (LocAt); takes effect at once"
    starts_plain = False
    changes_attention = False

    def add_itself(self, model: nn.Module, layers: Layers) -> bool:
        from nearsight.locat.attach import add_locat

        if layers is not None:
            raise InputError("prr comes once, before the pooling: leave out layers")
        add_locat(model, gaug=False, prr=True)
        return True

    def remove_itself(self, model: nn.Module) -> bool:
        from nearsight.locat.attach import remove_prr

        return remove_prr(model)


@register_locality
@dataclass(frozen=True, kw_only=True)
class ConvolutionalPositions(Inducer):
    """CPE (Chu et al. 2023, CPVT's PEG): a depthwise convolution over 3×3 patches, added to what comes to a block.

    It begins as zeros, and so without effect; tokens that are not patches pass.
    """

    name = "cpe"
    about = "a depthwise 3×3 convolution of the patches, added before a block; zeros at first"
    changes_attention = False

    def add_itself(self, model: nn.Module, layers: Layers) -> bool:
        from nearsight.locat.convolved import add_convolutions

        add_convolutions(model, [1] if layers is None else layers)
        return True

    def remove_itself(self, model: nn.Module) -> bool:
        from nearsight.locat.convolved import remove_convolutions

        return remove_convolutions(model)


def attached_by_themselves(model: Any) -> list[str]:
    """Names of those that a model has."""
    from nearsight.locat.attention import LOCAL_CLASSES
    from nearsight.locat.convolved import PatchConvolution
    from nearsight.locat.refine import RefinedMapPool, RefinedPool

    kinds = {"gaug": tuple(LOCAL_CLASSES.values()), "prr": (RefinedPool, RefinedMapPool), "cpe": (PatchConvolution,)}
    return [name for name, kind in kinds.items() if any(isinstance(module, kind) for module in model.modules())]
