"""What a frozen model makes of images: the tokens of one of its blocks, as vectors or as a map.

    with reading(model, FeatureSpec(block=-1, tokens="patches"), image_size=(224, 224)) as reader:
        maps_BChw = reader(images)

Where timm gives intermediates (`forward_intermediates`), blocks are counted as it counts them: every block of a ViT,
the stages of a hierarchical model. Everything else the lens can read (transformers, torchvision, ConViT, your own) is
read by hooks on the blocks that hold spatial attention.

Shape suffixes: B images, C channels, h rows and w columns of patches.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from nearsight.configuration import check_choices
from nearsight.errors import InputError
from nearsight.lens.running import Running, batches, not_finite, running
from nearsight.lens.tokens import has_class_token
from nearsight.probe.intermediates import Features, Place, blocks_of

Tokens = Literal["cls", "mean", "cls+mean", "patches"]

Watch = Callable[[Iterator[Tensor]], Iterator[Tensor]]
"""Lets batches go by, to count them."""

_ABSENT = {"prr": "does not refine its patches (PRR)", "norm": "has no final norm"}


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which features of a model. By default S2's dense ones: the last block's patches, before norm and PRR."""

    block: int = -1
    """Counted from 0, or from the end if negative; the stage of a hierarchical timm model."""
    place: Place | None = "block"
    """As the block returns them, after the final norm, or refined (PRR); None for the last of these that there is."""
    tokens: Tokens | None = "patches"
    """CLS, the mean of the patches, these two one after the other, or the map of patches; None: CLS, else the mean."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.place == "prr" and self.block != -1:
            raise InputError(f"PRR refines what the last block returns (−1), so that block {self.block} has none")


def unwatched(batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """Nobody counts."""
    return batches


class FeatureReader:
    """Reads features of a model that is running; `reading` makes it."""

    def __init__(self, run: Running, spec: FeatureSpec, image_size: tuple[int, int]) -> None:
        self._run = run
        image = run.brought(torch.zeros(3, *image_size))
        self._blocks = blocks_of(run.model, image)
        count = len(self._blocks.names)
        if not -count <= spec.block < count:
            raise InputError(f"{self._model_name} has no block {spec.block}: they count from 0 to {count - 1}")
        self._number = spec.block % count
        self.spec = self._resolved(spec, image.unsqueeze(0))
        """What was asked for, with nothing left open."""

    @property
    def block_name(self) -> str:
        return self._blocks.names[self._number]

    @property
    def _model_name(self) -> str:
        return type(self._run.model).__name__

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """What the spec asks for, float32: [B, C, h, w] for patches, else [B, C]."""
        features = self._asked_for(images_BCHW)
        # A search finds neighbours of NaN, too, and a vote of theirs looks like any other score.
        if not features.isfinite().all():
            raise not_finite(f"what {self._model_name} gives at {self.block_name}")
        return features

    def _asked_for(self, images_BCHW: Tensor) -> Tensor:
        cls_BC, patches_BChw = self.both(images_BCHW)
        if self.spec.tokens == "patches":
            return patches_BChw.float()
        mean_BC = patches_BChw.float().mean((2, 3))
        if self.spec.tokens == "mean":
            return mean_BC
        assert cls_BC is not None
        return cls_BC.float() if self.spec.tokens == "cls" else torch.cat([cls_BC.float(), mean_BC], dim=1)

    def both(self, images_BCHW: Tensor) -> Features:
        """CLS, where there is one, and patches, whichever of them the spec asks for."""
        assert self.spec.place is not None
        return self._blocks.read(self._run.brought(images_BCHW), self._number, self.spec.place)

    def _resolved(self, spec: FeatureSpec, image_1CHW: Tensor) -> FeatureSpec:
        last_first: tuple[Place, ...] = ("prr", "norm", "block")
        for place in last_first if spec.place is None else (spec.place,):
            if self._blocks.has(image_1CHW, self._number, place):
                found = self._blocks.read(image_1CHW, self._number, place)
                tokens: Tokens = spec.tokens or ("mean" if found.cls_BC is None else "cls")
                self._check_class_token(tokens, found)
                return replace(spec, place=place, tokens=tokens)
        assert spec.place is not None
        raise InputError(
            f"{self._model_name} {_ABSENT[spec.place]} after {self.block_name}; read what the block itself returns"
        )

    def _check_class_token(self, tokens: Tokens, found: Features) -> None:
        if tokens in ("cls", "cls+mean") and found.cls_BC is None:
            reason = (
                f"gives no class token of {self.block_name}"
                if has_class_token(self._run.model)
                else "has no class token"
            )
            raise InputError(f"{self._model_name} {reason}, and {tokens} was asked for; take the mean of its patches")


@contextmanager
def reading(
    model: nn.Module,
    spec: FeatureSpec | None = None,
    *,
    image_size: tuple[int, int],
    device: torch.device | str | None = None,
) -> Iterator[FeatureReader]:
    """A reader of the model's features for images of this size. No gradients; afterwards the model is as it was.

    `device`: where to run; by default where the model is.
    """
    with running(model, device) as run:
        yield FeatureReader(run, spec or FeatureSpec(), image_size)


def read_features(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    spec: FeatureSpec | None = None,
    *,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> Tensor:
    """The features of normalised images [B, 3, H, W] of one size, or of an iterable of such batches, on the CPU."""
    parts: list[Tensor] = []
    waiting = batches(images, batch_size)
    first = next(waiting, None)
    if first is None:
        raise InputError("there are no images to read features of")
    with reading(model, spec, image_size=(first.shape[-2], first.shape[-1]), device=device) as reader:
        parts.append(reader(first).cpu())
        parts.extend(reader(batch).cpu() for batch in waiting)
    return torch.cat(parts)
