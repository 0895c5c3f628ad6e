"""Student and teacher: a backbone that takes images of several sizes, a projection head, and the weights of both.

Both are one code with different weights. It runs as a stack of one model, so that what the stacked engine has for
blocks (fused kernels in bfloat16) serves here too.

Shape suffixes: K cells, here one; V views, B samples, C channels, H rows, W columns, D features, b channels of the
bottleneck, P prototypes; N tokens of a global crop, n of a local one.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.func import functional_call

from nearsight.errors import InputError
from nearsight.randomness import Draws, seeded
from nearsight.train.dino.config import DinoConfig
from nearsight.train.dropping import PathDropping
from nearsight.train.optimizer import AdamW
from nearsight.train.stacked import (
    DTYPES,
    Weights,
    bring_constants,
    stack_weights,
    stacked_forward,
    verify_stacking,
    weightless,
)

_NUM_LAYERS = 3
_POSITIONS = "pos_embed"
_BETAS = (0.9, 0.999)


class DinoHead(nn.Module):
    """Three layers with GELU between them, an L2 norm, and prototypes of length 1: cosines with each of them.

    A weight-normed layer whose gain stays 1, as in the original: only the direction of a prototype counts.
    """

    def __init__(self, width: int, *, hidden: int, bottleneck: int, num_prototypes: int) -> None:
        super().__init__()
        widths = [width, *[hidden] * (_NUM_LAYERS - 1), bottleneck]
        layers: list[nn.Module] = []
        for position in range(_NUM_LAYERS):
            layer = nn.Linear(widths[position], widths[position + 1])
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        # Drawn as torch draws a linear layer; its scale has no effect but on how fast it turns.
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, bottleneck).uniform_(-1, 1) * bottleneck**-0.5)

    def forward(self, features_BD: Tensor) -> Tensor:
        """Cosines [B, P] with the prototypes."""
        # Norms in float32: under autocast the MLP's output is in bfloat16.
        bottleneck_Bb = F.normalize(self.mlp(features_BD).float(), dim=-1)
        return F.linear(bottleneck_Bb, F.normalize(self.prototypes, dim=-1))


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
    with seeded(config.seed):
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
        self._dtype = DTYPES[config.precision]
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
            features.append(backbone(of_backbone | factors, images_KBCHW, dtype=self._dtype)[0])
        with self._precision(features[0].device):
            own = {name: weight[0] for name, weight in of_head.items()}
            cosines: Tensor = functional_call(self._head, own, (torch.cat(features),))
        by_view: Tensor = cosines.unflatten(0, (-1, batches[0].shape[1]))
        return by_view

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._dtype == torch.float32 else torch.autocast(device.type, self._dtype)


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

    def __call__(self, weights: Weights, images_KBCHW: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Features [K, B, D]."""
        if self.resampling_nN is not None:
            weights = weights | {_POSITIONS: self.resampling_nN @ weights[_POSITIONS]}
        return stacked_forward(self.skeleton, weights, images_KBCHW, dtype=dtype)


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


@dataclass
class Pair:
    """Some weights of the student with their optimiser, and those of the teacher that follows it.

    All numbers of one kind lie in one row, so that an update is a few passes over memory however many parameters there
    are, and stay where they are, so that a captured step finds them.

    Shape suffixes: K cells, here one; P numbers of all parameters, one after the other; n parameters.
    """

    optimizer: AdamW
    """Holds the student's."""
    teacher_KP: Tensor
    parameter_P: Tensor
    """Which parameter each number belongs to."""

    @classmethod
    def start(cls, weights: Mapping[str, Tensor], device: torch.device) -> "Pair":
        """Both with these weights."""
        sizes = torch.tensor([weight.numel() for weight in weights.values()])
        decays = torch.tensor([weight.dim() > 1 for weight in weights.values()])
        optimizer = AdamW.start(
            stack_weights([weights], device),
            betas=_BETAS,
            weight_decay=[0.0],  # it changes with every step
            decay_all=[False],
            clip_norm=[None],  # each parameter is clipped by itself, and not all together
        )
        # Positions and CLS tokens decay here, as in the original.
        optimizer = replace(optimizer, decays_P=decays.repeat_interleave(sizes).to(device))
        parameter_P = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)
        return cls(optimizer, optimizer.weights_KP.clone(), parameter_P)

    @property
    def teacher(self) -> Weights:
        """The teacher's by name, each with a leading axis of 1."""
        return self.optimizer.arrangement.views(self.teacher_KP)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [*self.optimizer.state, self.teacher_KP]

    @torch.no_grad()
    def update(self, gradient_KP: Tensor, lr_K: Tensor, weight_decay_K: Tensor, *, clip_norm: float) -> None:
        """AdamW on the student, with each parameter's gradient clipped by itself."""
        parts = list(self.optimizer.arrangement.views(gradient_KP).values())
        norm_n = torch.stack(torch._foreach_norm(parts))
        scale_n = (clip_norm / (norm_n + 1e-6)).clamp(max=1.0)
        self.optimizer.weight_decay_K.copy_(weight_decay_K)
        self.optimizer.step(gradient_KP * scale_n.index_select(0, self.parameter_P), lr_K)

    @torch.no_grad()
    def follow(self, share: Tensor) -> None:
        """Move the teacher this share of the way to the student."""
        self.teacher_KP.lerp_(self.optimizer.weights_KP, share)

    def named(self) -> dict[str, Tensor]:
        """Everything there is, by the names of parameters and what it is of them, in the memory of all."""
        optimizer = self.optimizer
        rows = {
            "student": optimizer.weights_KP,
            "teacher": self.teacher_KP,
            "optimizer/first": optimizer.first_KP,
            "optimizer/second": optimizer.second_KP,
        }
        return {
            f"{kind}/{name}": part
            for kind, row_KP in rows.items()
            for name, part in optimizer.arrangement.parts(row_KP[0]).items()
        }
