"""Student and teacher: a backbone that takes images of several sizes, and a projection head.

Shape suffixes: V views, B samples, C channels, H rows, W columns, P prototypes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import Format
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.train.dino.config import DinoConfig
from nearsight.train.dino.head import DinoHead
from nearsight.train.dino.views import Views
from nearsight.train.droppath import PathDropping


class DinoNetwork(nn.Module):
    """A backbone and a head."""

    def __init__(self, backbone: nn.Module, head: DinoHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, batches: list[Tensor], factors: list[Mapping[str, Tensor]] | None = None) -> Tensor:
        """Cosines with the prototypes [V, B, P] of views of one size [V, B, C, H, W] after those of another.

        Args:
            factors: for each of them, what branches are multiplied by (`PathDropping`), [V, B].
        """
        num_samples = batches[0].shape[1]
        features = []
        for position, views_VBCHW in enumerate(batches):
            for buffer, factor_VB in (factors[position] if factors else {}).items():
                place, _, name = buffer.rpartition(".")
                setattr(self.backbone.get_submodule(place), name, factor_VB.flatten())
            features.append(self.backbone(views_VBCHW.flatten(0, 1)))
        cosines_VBP: Tensor = self.head(torch.cat(features)).unflatten(0, (-1, num_samples))
        return cosines_VBP


class Student:
    """The network that learns, with stochastic depth."""

    def __init__(self, network: DinoNetwork, drop_path: float, device: torch.device) -> None:
        self.network = network
        self._dropping = PathDropping.install(network.backbone, [drop_path], device) if drop_path > 0 else None

    def __call__(self, views: Views) -> Tensor:
        """Of all views, the global ones first: [V, B, P]."""
        batches, draws = [views.global_GBCHW], [views.global_draws]
        if views.local_LBChw is not None:
            batches.append(views.local_LBChw)
            draws.append(views.local_draws)
        cosines: Tensor = self.network(batches, [self._dropping(drawn) for drawn in draws] if self._dropping else None)
        return cosines


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
    if config.crops.num_local:
        _take_other_sizes(backbone, config)
    return DinoNetwork(backbone, head)


def _take_other_sizes(backbone: Any, config: DinoConfig) -> None:
    """Let a model take local crops: positions are resampled to their grid, as timm does with `dynamic_img_size`.

    Set here and not when it is built, so that what is saved is the model as its config describes it.
    """
    backbone.dynamic_img_size = True
    embedding = backbone.patch_embed
    embedding.strict_img_size, embedding.flatten, embedding.output_fmt = False, False, Format.NHWC
    side = config.crops.local_size
    try:
        with torch.no_grad():
            backbone(torch.zeros(1, 3, side, side))
    except (InputError, RuntimeError, ValueError, AssertionError) as error:
        raise InputError(
            f"{config.model.name} takes images of one size, and not local crops of {side} pixels; do without them "
            f"(--crops.num-local 0), or take another model ({str(error).splitlines()[0]})"
        ) from error
