"""Draws baseline_and_modern.png, the picture of the README: python docs/images/baseline_and_modern.py

Where each head of the first layers attends, seen from the patch, in two models of the zoo on the shipped images.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
import timm
from matplotlib.figure import Figure

import nearsight

MODELS = {
    "Baseline: random crops and flips": "compact_vit.baseline_cifar100",
    "Modern: with CutMix and AutoAugment": "compact_vit.modern_cifar100",
}
NUM_LAYERS, REACH = 4, 4
"""Rows of the picture, and the steps from the patch that are shown on each side of it."""
PAPER, INK = "#1b1b22", "#f2f2f2"


def draw() -> Figure:
    images, _ = nearsight.sample_images()
    figure = Figure(figsize=(9.6, 2.75), facecolor=PAPER)
    for column, (title, name) in enumerate(MODELS.items()):
        model = timm.create_model(name, pretrained=True)
        table = nearsight.measure(model, images, layers=list(range(NUM_LAYERS)), what=["offsets"])
        grid = figure.add_gridspec(
            NUM_LAYERS,
            8,
            left=0.045 + 0.5 * column,
            right=0.49 + 0.5 * column,
            top=0.86,
            bottom=0.02,
            wspace=0.1,
            hspace=0.1,
        )
        figure.text(0.045 + 0.5 * column, 0.92, title, color=INK, fontsize=11, fontweight="bold")
        for layer in range(NUM_LAYERS):
            for head, steps in enumerate(table.offset_maps(layer)):
                middle = np.array(steps.shape) // 2
                near = steps[middle[0] - REACH : middle[0] + REACH + 1, middle[1] - REACH : middle[1] + REACH + 1]
                panel = figure.add_subplot(grid[layer, head])
                # A head's own scale: what matters is its shape. The square root lets weak attention be seen.
                panel.imshow(np.sqrt(near / np.nanmax(near)), cmap="magma", vmin=0, vmax=1, interpolation="none")
                panel.set_axis_off()
            panel = figure.axes[-8]
            panel.text(
                -0.16, 0.5, f"{layer}", transform=panel.transAxes, color=INK, ha="right", va="center", fontsize=9
            )
        figure.text(0.012 + 0.5 * column, 0.44, "layer", color=INK, rotation=90, va="center", fontsize=9)
    return figure


if __name__ == "__main__":
    matplotlib.use("agg")
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png")
    draw().savefig(where, dpi=160, facecolor=PAPER, metadata={"Software": None})
