"""From measured heads to what people look at: figures, plain words, and one self-contained page."""

from nearsight.report.figures import (
    heatmaps,
    locality_intervals,
    mad_entropy_plane,
    mad_profiles,
    save_figure,
    training_curves,
)
from nearsight.report.inputs import ModelHeads, read_heads, read_history
from nearsight.report.page import write_page
from nearsight.report.reading import Contrast, Estimate, Reading, compare, describe, layer_table

__all__ = [
    "Contrast",
    "Estimate",
    "ModelHeads",
    "Reading",
    "compare",
    "describe",
    "heatmaps",
    "layer_table",
    "locality_intervals",
    "mad_entropy_plane",
    "mad_profiles",
    "read_heads",
    "read_history",
    "save_figure",
    "training_curves",
    "write_page",
]
