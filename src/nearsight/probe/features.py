"""What a frozen model makes of images: the tokens of one of its blocks, as vectors or as a map.

    with reading(model, FeatureSpec(block=-1, tokens="patches"), image_size=(224, 224)) as reader:
        maps_BChw = reader(images)

Where timm gives intermediates (`forward_intermediates`), blocks are counted as it counts them: every block of a ViT,
the stages of a hierarchical model. Everything else the lens can read (transformers, torchvision, ConViT, your own) is
read by hooks on the blocks that hold spatial attention.

Shape suffixes: B images, N tokens, P patches row by row, C channels, h rows and w columns of patches.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.running import Running, batches, not_finite, running, surveyed
from nearsight.lens.tokens import TokenMap, block_of, has_class_token, map_tokens, watching_outputs
from nearsight.locat.refine import REFINEMENTS, RefinedMapPool, refine
from nearsight.probe.settings import FeatureSpec, Place, Tokens


class Features(NamedTuple):
    """The tokens of a batch of images."""

    cls_BC: Tensor | None
    """None where there is no class token; of a Jumbo, the whole wide token."""
    patches_BChw: Tensor


class Blocks(Protocol):
    """The blocks of a model that can be read."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their modules, in the order in which they run."""
        ...

    def has(self, image_1CHW: Tensor, number: int, place: Place) -> bool:
        """Whether there is something to read in that place."""
        ...

    def read(self, images: Tensor, number: int, place: Place) -> Features:
        """The tokens of a block for these images, in a place that it has."""
        ...


def blocks_of(model: nn.Module, image: Tensor) -> Blocks:
    """The blocks of a model (in eval mode) for images like this one, [3, H, W]."""
    if hasattr(model, "forward_intermediates") and hasattr(model, "feature_info"):
        return TimmBlocks(model)
    return HookedBlocks(model, image)


class TimmBlocks:
    """Those of a timm model that gives its intermediates: blocks, or the stages of a hierarchical model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.names = tuple(str(info["module"]) for info in model.feature_info)
        self._gives_prefix = "return_prefix_tokens" in inspect.signature(model.forward_intermediates).parameters
        self._refinement = next((module for module in model.modules() if isinstance(module, REFINEMENTS)), None)

    def has(self, image_1CHW: Tensor, number: int, place: Place) -> bool:
        if place == "prr":
            return self._refinement is not None and number == len(self.names) - 1
        if place == "block":
            return True
        # Some models take norm=True and ignore it, some refuse it, and some norms do nothing (those of models that
        # normalise what they have pooled).
        try:
            plain, normed = (self._tokens(image_1CHW, number, norm=norm)[0] for norm in (False, True))
        except AssertionError:
            return False
        (cls_BC, patches_BChw), (normed_BC, normed_BChw) = plain, normed
        same_cls = cls_BC is None or normed_BC is None or torch.equal(cls_BC, normed_BC)
        return not (same_cls and torch.equal(patches_BChw, normed_BChw))

    def read(self, images: Tensor, number: int, place: Place) -> Features:
        features, prefix_BNC = self._tokens(images, number, norm=place != "block")
        return self._refined(features, prefix_BNC) if place == "prr" else features

    def _tokens(self, images: Tensor, number: int, *, norm: bool) -> tuple[Features, Tensor | None]:
        """(the features, all prefix tokens where there are some)."""
        settings = {"norm": norm, "output_fmt": "NCHW", "intermediates_only": True, "stop_early": True}
        if self._gives_prefix:
            settings["return_prefix_tokens"] = True
        (found,) = self._model.forward_intermediates(images, indices=[number], **settings)
        patches_BChw, prefix_BNC = found if isinstance(found, tuple) else (found, None)
        return Features(self._class_token(prefix_BNC), patches_BChw), prefix_BNC

    def _class_token(self, prefix_BNC: Tensor | None) -> Tensor | None:
        if prefix_BNC is None or not prefix_BNC.shape[1] or not has_class_token(self._model):
            return None
        return prefix_BNC[:, : getattr(self._model, "num_jumbo", 1)].flatten(1)

    def _refined(self, features: Features, prefix_BNC: Tensor | None) -> Features:
        pool: Any = self._refinement
        patches_BChw = features.patches_BChw
        if isinstance(pool, RefinedMapPool):
            return Features(None, pool.refined(patches_BChw.movedim(1, -1)).movedim(-1, 1))
        patches_BPC = patches_BChw.flatten(2).transpose(1, 2)
        tokens_BNC = patches_BPC if prefix_BNC is None else torch.cat([prefix_BNC, patches_BPC], dim=1)
        before, after = (getattr(pool, norm, nn.Identity()) for norm in ("pre_norm", "post_norm"))  # of timm's own PRR
        refined_BNC = after(refine(before(tokens_BNC), pool.num_heads))
        prefix_BNC, patches_BPC = refined_BNC.tensor_split([tokens_BNC.shape[1] - patches_BPC.shape[1]], dim=1)
        patches_BChw = patches_BPC.transpose(1, 2).unflatten(2, patches_BChw.shape[2:])
        return Features(self._class_token(prefix_BNC), patches_BChw)


class HookedBlocks:
    """Those of any model that hold spatial attention and return one grid of patches."""

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        self._model, self._size = model, image.shape[-2:]
        sites = surveyed(model, image).sites.values()
        blocks = list(dict.fromkeys(block for site in sites if (block := block_of(site.name)) is not None))
        norms = self._norms_after(blocks, image)
        self._maps = map_tokens(model, image, [*blocks, *norms])
        self.names = tuple(name for name in blocks if name in self._maps)
        if not self.names:
            raise InputError(f"no block of {type(model).__name__} returns one grid of patches")
        self._norm = next((name for name in norms if name in self._maps), None)

    def _norms_after(self, blocks: list[str], image: Tensor) -> list[str]:
        """The norms that run when all blocks are done."""
        norms = [name for name, module in self._model.named_modules() if "norm" in type(module).__name__.lower()]
        ran: list[str] = []
        with watching_outputs(self._model, [*blocks, *norms], lambda name, _: ran.append(name)):
            self._model(image.unsqueeze(0))
        last = max((place for place, name in enumerate(ran) if name in blocks), default=0)
        return ran[last + 1 :]

    def has(self, image_1CHW: Tensor, number: int, place: Place) -> bool:
        after_all_blocks = self._norm is not None and number == len(self.names) - 1
        return place == "block" or (place == "norm" and after_all_blocks)

    def read(self, images: Tensor, number: int, place: Place) -> Features:
        if images.shape[-2:] != self._size:
            sizes = ["×".join(map(str, size)) for size in (images.shape[-2:], self._size)]
            raise InputError(f"images of {sizes[0]} pixels were given to a reader of images of {sizes[1]}")
        name = self.names[number] if place == "block" else self._norm
        assert name is not None
        tokens: TokenMap = self._maps[name]
        seen: list[Features] = []

        def look(_: str, outputs: list[Tensor]) -> None:
            cls_B1C, patches_BPC = tokens.class_token(outputs), tokens.patch_tokens(outputs)
            patches_BChw = patches_BPC.transpose(1, 2).unflatten(2, tokens.grid_size)
            seen.append(Features(None if cls_B1C is None else cls_B1C.squeeze(1), patches_BChw))

        with watching_outputs(self._model, [name], look):
            self._model(images)
        return seen[-1]  # a survey may have run before


Watch = Callable[[Iterator[Tensor]], Iterator[Tensor]]
"""Passes batches on and counts them."""

_ABSENT = {"prr": "does not refine its patches (PRR)", "norm": "has no final norm"}


def unwatched(batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """Nothing is counted."""
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
        """The requested features, with all defaults filled in."""

    @property
    def block_name(self) -> str:
        return self._blocks.names[self._number]

    @property
    def _model_name(self) -> str:
        return type(self._run.model).__name__

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """The features of the spec, float32: [B, C, h, w] for patches, otherwise [B, C]."""
        features = self._asked_for(images_BCHW)
        # A search finds neighbours of NaN, too, and their vote gives a score that looks like any other.
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
            raise InputError(f"{self._model_name} {reason}, but {tokens} was requested; take the mean of its patches")


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
