"""The figure of docs/reading.md: three heads of about the same distance that do different things.

Run     python docs/site/same_distance.py
Writes  docs/images/same-distance.png
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nearsight.metrics import attention_distance, attention_entropy, grid_distances, next_patch_distance
from nearsight.report.figures.style import house_style

GRID = (8, 8)
QUERY = 8 * 2 + 2
"""The patch whose attention is drawn: third row, third column."""
OUT = Path(__file__).parents[1] / "images" / "same-distance.png"


def heads() -> dict[str, Tensor]:
    """What it does → its attention between all patches, float64 [P, P]."""
    distances_PP = grid_distances(GRID)
    num_patches = len(distances_PP)
    width = 1.9 * next_patch_distance(GRID)
    half = 0.5 * torch.eye(num_patches, dtype=torch.float64) + 0.5 / num_patches
    return {
        "around itself": torch.softmax(-0.5 * (distances_PP / width) ** 2, dim=-1),
        "half itself, half everywhere": half,
        "two patches to the side": torch.nn.functional.one_hot(_two_to_the_side(), num_patches).double(),
    }


def numbers(attention_PP: Tensor) -> tuple[float, float, float]:
    """Its distance, its entropy, and its share on the query's own patch."""
    one = attention_PP[None]
    distance, entropy = attention_distance(one, GRID, num_prefix_tokens=0), attention_entropy(one, num_prefix_tokens=0)
    return float(distance), float(entropy), float(attention_PP.diagonal().mean())


def _two_to_the_side() -> Tensor:
    """For each patch the number of that two columns to the right, or to the left where there is none."""
    rows, cols = GRID
    col = torch.arange(cols).repeat(rows)
    return torch.arange(rows * cols) + torch.where(col + 2 < cols, 2, -2)


def main() -> None:
    with house_style():
        figure = Figure(figsize=(7.2, 2.7), layout="constrained")
        for panel, (name, attention_PP) in zip(figure.subplots(1, 3), heads().items(), strict=True):
            distance, entropy, own = numbers(attention_PP)
            weights = attention_PP[QUERY]
            panel.imshow((weights / weights.max()).view(GRID), cmap="viridis", vmin=0, vmax=1)
            row, col = divmod(QUERY, GRID[1])
            panel.plot(
                col, row, "o", markerfacecolor="none", markeredgecolor="#e4572e", markersize=9, markeredgewidth=1.6
            )
            panel.set_title(name, fontsize=9)
            panel.set_xlabel(f"MAD {distance:.3f}\nentropy {entropy:.2f}\non itself {own:.0%}", fontsize=8)
            panel.set_xticks([])
            panel.set_yticks([])
        figure.savefig(OUT, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
