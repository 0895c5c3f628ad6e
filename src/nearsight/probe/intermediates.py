"""The tokens that the blocks of a model return, after the final norm or not, from timm or by hooks.

Shape suffixes: B images, N tokens, P patches row by row, C channels, h rows and w columns of patches.
"""

import inspect
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.running import surveyed
from nearsight.lens.tokens import TokenMap, block_of, has_class_token, map_tokens, watching_outputs
from nearsight.locat.refine import REFINEMENTS, RefinedMapPool, refine

Place = Literal["block", "norm", "prr"]
"""As a block returns its tokens, after the model's final norm, or after patch representation refinement."""


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
        return seen[0]
