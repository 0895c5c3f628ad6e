"""The learned positions of a ViT, and which of them are similar: S3's question, asked of a real model.

S3 is "Vision Transformers provably learn spatial structure" (arXiv 2210.09221). Positions are found by their names and
by the grid that the module which owns them, or one around it, says it has: no forward is needed, and none is run.

Shape suffixes: P patches row by row, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.metrics import NeighbourAssociation, gram_distance_correlation, neighbour_association
from nearsight.metrics.attention import to_float64
from nearsight.models.shuffledtiles import ShuffledTiles, shuffled_pixels

_NAMES = ("pos_embed", "pos_embedding", "position_embedding", "position_embeddings", "positional_embedding")
"""What timm, torchvision, transformers and CLIP call them."""
_MOST_OTHERS = 2
"""Positions of tokens that are not patches, CLS and a distillation token, where a model does not say their number."""
_OTHER_KINDS = {
    "it rotates queries and keys (RoPE)": ("rope", "rotary"),
    "its positions are relative": ("relative_position", "rel_pos", "relpos", "attention_bias"),
}
"""What a model may have instead, by parts of the names in it."""


@dataclass(frozen=True)
class PositionGram:
    """Learned positions of the patches of a model, and the inner products of all pairs."""

    name: str
    """Of the parameter."""
    grid_size: tuple[int, int]
    positions_PC: Tensor
    """As learned, in float64, without those of CLS and other prefix tokens."""

    @property
    def gram(self) -> Tensor:
        """[P, P]: PᵀP divided by its largest absolute entry, to lie in [−1, 1], where 0 stays 0 (S3 Figure 1)."""
        gram_PP = self.positions_PC @ self.positions_PC.T
        return gram_PP / (float(gram_PP.abs().max()) or 1.0)

    @property
    def cosine(self) -> Tensor:
        """[P, P]: the same for positions of equal length."""
        directions_PC = F.normalize(self.positions_PC, dim=-1)
        return directions_PC @ directions_PC.T

    @property
    def neighbours(self) -> NeighbourAssociation:
        """How many of each patch's neighbours are among the largest entries of its row."""
        return neighbour_association(self.gram, self.grid_size)

    @property
    def distance_correlation(self) -> float:
        """Spearman's, of the entries with the distance of their patches: −1 if closer always means more similar."""
        return float(gram_distance_correlation(self.gram, self.grid_size))

    def to_frame(self) -> pd.DataFrame:
        """A row per patch; rows and columns of the grid count from 0."""
        neighbours, (_, cols) = self.neighbours, self.grid_size
        patch = range(len(self.positions_PC))
        return pd.DataFrame(
            {
                "patch": patch,
                "row": [number // cols for number in patch],
                "col": [number % cols for number in patch],
                "norm": self.positions_PC.norm(dim=-1),
                "neighbour_association": neighbours.per_patch,
                "chance": neighbours.chance_per_patch,
            }
        )


def position_gram(model: nn.Module, *, grid_size: tuple[int, int] | None = None) -> PositionGram:
    """The learned absolute positions of a ViT of timm, transformers, torchvision or this package.

    Args:
        model: it is only read.
        grid_size: rows and columns of its positions, if the model does not say so.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model: what it was compiled from
    found = dict(_candidates(model))
    if not found:
        raise InputError(
            f"{type(model).__name__} has no learned absolute positions that could be found: {_what_instead(model)}"
        )
    fitting = {
        name: patches
        for name, parameter in found.items()
        if (patches := _of_patches(model, name, parameter, grid_size)) is not None
    }
    if not fitting:
        said = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in found.items())
        raise InputError(
            f"the positions of {type(model).__name__} ({said}) fit no grid of patches that it says it has; give "
            "position_gram its grid_size"
        )
    if len(fitting) > 1:
        raise InputError(
            f"{type(model).__name__} has positions in {len(fitting)} places ({', '.join(fitting)}), so that no one "
            "Gram matrix is that of its patches"
        )
    ((name, (grid, positions_PC)),) = fitting.items()
    return PositionGram(name, grid, _where_they_come_from(model, grid, positions_PC))


def _where_they_come_from(model: nn.Module, grid: tuple[int, int], positions_PC: Tensor) -> Tensor:
    """In the order of the patches of the image itself, also if the model shuffles its tiles."""
    tiles = next((module for module in model.modules() if isinstance(module, ShuffledTiles)), None)
    if tiles is None:
        return positions_PC
    if any(side % tiles.num_tiles for side in grid):
        tiles_of = f"{tiles.num_tiles}×{tiles.num_tiles} shuffled tiles"
        raise InputError(f"{tiles_of} are finer than the patches, which have no place in the image then")
    # A patch that lies within a tile moves as a pixel of an image of patches does.
    places_P = shuffled_pixels(grid, tiles.num_tiles, tiles.seed)
    return torch.empty_like(positions_PC).index_copy(0, places_P, positions_PC)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are called positions and are learned."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        fixed = learns and not parameter.requires_grad  # as those of masked autoencoders: sines in a parameter
        if name.removesuffix(".weight").split(".")[-1] in _NAMES and parameter.dim() in (2, 3, 4) and not fixed:
            yield name, parameter


def _of_patches(
    model: nn.Module, name: str, parameter: Tensor, grid_size: tuple[int, int] | None
) -> tuple[tuple[int, int], Tensor] | None:
    """The grid and the positions on it, [P, C] in float64; None if it does not fit."""
    for module in _from_owner_outwards(model, name):
        grid = grid_size or _stated_grid(module)
        if grid is None:
            continue
        table = parameter.detach()
        if table.dim() == 4 and tuple(table.shape[:3]) == (1, *grid):
            table = table.flatten(1, 2)
        if table.dim() == 3 and len(table) == 1:
            table = table[0]
        num_others = len(table) - grid[0] * grid[1]
        if table.dim() == 2 and num_others in (*range(_MOST_OTHERS + 1), getattr(module, "num_prefix_tokens", 0)):
            return grid, to_float64(table[num_others:]).cpu()
    return None


def _from_owner_outwards(model: nn.Module, name: str) -> Iterator[nn.Module]:
    parts = name.split(".")[:-1]
    for end in range(len(parts), -1, -1):
        yield model.get_submodule(".".join(parts[:end]))


def _stated_grid(module: Any) -> tuple[int, int] | None:
    """What a module says, or the embedding of patches in it, or its config."""
    embeddings = (getattr(module, name, None) for name in ("patch_embed", "patch_embeddings"))
    for source in (*embeddings, module, getattr(module, "config", None)):
        for name in ("grid_size", "pos_embed_grid_size"):
            if (grid := _pair(getattr(source, name, None))) is not None:
                return grid
        image, patch = (_pair(getattr(source, name, None)) for name in ("image_size", "patch_size"))
        if image is not None and patch is not None:
            return image[0] // patch[0], image[1] // patch[1]
    return None


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def _what_instead(model: nn.Module) -> str:
    """In words, as far as names show it."""
    named = (model.named_parameters(), model.named_buffers(), model.named_modules())
    names = [name for group in named for name, _ in group]
    for said, words in _OTHER_KINDS.items():
        if any(word in name.lower() for name in names for word in words):
            return said
    for name in names:
        if any(part.startswith(_NAMES) for part in name.split(".")):
            return f"{name} is not learned, or of a kind that is not known here"
    return f"none of its parameters is called {', '.join(_NAMES[:-1])} or {_NAMES[-1]}"
