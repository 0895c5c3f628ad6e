"""Which layers see alike: linear CKA of all pairs (Raghu et al. 2021, Figures 1 and 2)."""

import numpy as np
from matplotlib.figure import Figure

from nearsight.lens import LayerSimilarity
from nearsight.report.figures.style import HATCH, PAPER, house_style
from nearsight.report.inputs import shorten

# In inches: a panel grows with the layers, between these.
CELL = 0.2
PANEL = (2.4, 5.6)
MOST_TICKS = 16
LABEL_LIMIT = 40


def similarity_heatmap(similarity: LayerSimilarity, *, label: str, other_label: str | None = None) -> Figure:
    """CKA between the layers of a model (rows, the first at the bottom) and of the other one, or the same (columns).

    The scale goes from 0 to 1, so that figures can be compared. What the unbiased estimate puts below 0 is drawn as 0;
    pairs it cannot say anything about (tokens that are the same for all images) are hatched.
    """
    num_rows, num_cols = similarity.matrix.shape
    height, width = (float(np.clip(CELL * num, *PANEL)) for num in (num_rows, num_cols))
    with house_style():
        figure = Figure(figsize=(width + 1.7, height + 0.9), layout="constrained")
        panel = figure.subplots()
        panel.patch.set(facecolor=PAPER, hatch="////", edgecolor=HATCH, linewidth=0)
        image = panel.imshow(
            np.ma.masked_invalid(similarity.matrix),
            cmap="viridis",
            vmin=0.0,
            vmax=1.0,
            origin="lower",
            aspect="auto",
            interpolation="none",
        )
        image.set_gid("cka")
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
        for set_ticks, num in ((panel.set_yticks, num_rows), (panel.set_xticks, num_cols)):
            ticks = range(0, num, -(-num // MOST_TICKS))
            set_ticks(ticks, [str(tick + 1) for tick in ticks])
        if other_label is None:
            panel.set_title(shorten(label, LABEL_LIMIT), parse_math=False)
            panel.set_xlabel("layer")
            panel.set_ylabel("layer")
        else:
            panel.set_xlabel(f"layer of {shorten(other_label, LABEL_LIMIT)}", parse_math=False)
            panel.set_ylabel(f"layer of {shorten(label, LABEL_LIMIT)}", parse_math=False)
        bar = figure.colorbar(image, ax=panel, aspect=18, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("linear CKA (1 = alike up to rotation)", fontsize=8.5)
    return figure
