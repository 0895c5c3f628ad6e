"""Student and teacher: a backbone that takes images of several sizes, and a projection head.

Both are one code with different weights. It runs as a stack of one model, so that what the stacked engine has for
blocks (fused kernels in bfloat16) serves here too.

Shape suffixes: K cells, here one; V views, B samples, C channels, H rows, W columns, D features, P prototypes; N tokens
of a global crop, n of a local one.
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.func import functional_call

from nearsight.errors import InputError
from nearsight.randomness import Draws
from nearsight.train.dino.config import DinoConfig
from nearsight.train.dino.head import DinoHead
from nearsight.train.stacked import Weights, bring_constants, stacked_forward, verify_stacking, weightless
from nearsight.train.step import PathDropping

_POSITIONS = "pos_embed"


class DinoNetwork(nn.Module):
    """A backbone and a head with weights: what a run begins with, and what it leaves."""

    def __init__(self, backbone: nn.Module, head: DinoHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Cosines with the prototypes [B, P]."""
        cosines_BP: Tensor = self.head(self.backbone(images_BCHW))
        return cosines_BP


def build_network(config: DinoConfig, image_size: tuple[int, int]) -> DinoNetwork:
    """The network with the initial weights of its seed, made on the CPU so that they are the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        backbone: Any = config.model.build(image_size, num_classes=0)
        protocol = config.protocol
        head = DinoHead(
            backbone.num_features,
            hidden=protocol.hidden,
            bottleneck=protocol.bottleneck,
            num_prototypes=protocol.num_prototypes,
        )
    return DinoNetwork(backbone, head)


class NetworkCode:
    """What a network does with its weights, which are brought along: by name, each with a leading axis of 1."""

    def __init__(
        self, network: DinoNetwork, config: DinoConfig, image_size: tuple[int, int], device: torch.device
    ) -> None:
        self._reduced = config.precision == "bf16"
        self._backbones = {image_size: _BackboneCode.of(network.backbone, image_size, device)}
        if config.crops.num_local:
            size = (config.crops.local_size, config.crops.local_size)
            self._backbones[size] = _resampled(network.backbone, size, config.model.name, device)
        self._head = weightless(network.head)
        self._dropping: PathDropping | None = None
        if config.protocol.drop_path > 0:
            for backbone in self._backbones.values():
                self._dropping = PathDropping.install(backbone.skeleton, [config.protocol.drop_path], device)

    def __call__(self, weights: Weights, batches: Sequence[Tensor], drop_by: Sequence[Draws] | None = None) -> Tensor:
        """Cosines with the prototypes [V, B, P] of views of one size [V, B, C, H, W] after those of another.

        Args:
            drop_by: for each of them, the randomness of stochastic depth; None: nothing is dropped.
        """
        of_backbone, of_head = (_of_part(weights, part) for part in ("backbone.", "head."))
        features = []
        for number, views_VBCHW in enumerate(batches):
            factors = {}
            if drop_by is not None and self._dropping is not None:
                factors = {name: factor.reshape(1, -1) for name, factor in self._dropping(drop_by[number]).items()}
            height, width = views_VBCHW.shape[-2:]
            images_KBCHW = views_VBCHW.flatten(0, 1).unsqueeze(0)
            backbone = self._backbones[height, width]
            features.append(backbone(of_backbone | factors, images_KBCHW, reduced=self._reduced)[0])
        with self._precision(features[0].device):
            own = {name: weight[0] for name, weight in of_head.items()}
            cosines: Tensor = functional_call(self._head, own, (torch.cat(features),))
        by_view: Tensor = cosines.unflatten(0, (-1, batches[0].shape[1]))
        return by_view

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self._reduced else contextlib.nullcontext()


@dataclass(frozen=True)
class _BackboneCode:
    """That of a backbone for images of one size."""

    skeleton: nn.Module
    resampling_nN: Tensor | None = None
    """What makes positions for this size of the learned ones; None: they are for this size."""

    @classmethod
    def of(
        cls, backbone: nn.Module, size: tuple[int, int], device: torch.device, resampling_nN: Tensor | None = None
    ) -> "_BackboneCode":
        """`backbone` takes images of this size; its weights do not matter."""
        skeleton = weightless(backbone)
        verify_stacking(skeleton, [backbone], size)
        bring_constants(skeleton, device)
        return cls(skeleton, resampling_nN)

    def __call__(self, weights: Weights, images_KBCHW: Tensor, *, reduced: bool) -> Tensor:
        """Features [K, B, D]."""
        if self.resampling_nN is not None:
            weights = weights | {_POSITIONS: self.resampling_nN @ weights[_POSITIONS]}
        return stacked_forward(self.skeleton, weights, images_KBCHW, reduced=reduced)


def _resampled(backbone: Any, size: tuple[int, int], name: str, device: torch.device) -> _BackboneCode:
    """That for images of another size: positions are resampled to their grid, as timm does."""
    resized = copy.deepcopy(backbone)
    try:
        resized.set_input_size(img_size=size)
        with torch.no_grad():
            resized(torch.zeros(1, 3, *size))
    except (InputError, RuntimeError, ValueError, AssertionError) as error:
        raise InputError(
            f"{name} takes images of one size, and not local crops of {size[0]} pixels; do without them "
            f"(--crops.num-local 0), or take another model ({str(error).splitlines()[0]})"
        ) from error
    if backbone.pos_embed is None:
        return _BackboneCode.of(resized, size, device)
    # Resampling is linear: of unit vectors in the place of positions it gives its matrix. A product is the same numbers
    # every time; the gradient of timm's interpolation adds up on a GPU in any order.
    units_1NN = torch.eye(backbone.pos_embed.shape[1]).unsqueeze(0)
    resampling_1nN = resample_abs_pos_embed(
        units_1NN,
        new_size=resized.patch_embed.grid_size,
        old_size=backbone.patch_embed.grid_size,
        num_prefix_tokens=0 if backbone.no_embed_class else backbone.num_prefix_tokens,
    )
    return _BackboneCode.of(resized, size, device, resampling_1nN[0].to(device))


def _of_part(weights: Weights, prefix: str) -> Weights:
    """The weights of a part of the network, by their names in it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
