"""From measured heads to what people look at: figures, plain words, and one self-contained page."""

from nearsight.report.estimates import Contrast, Estimate
from nearsight.report.figures import (
    head_heatmaps,
    heatmaps,
    locality_intervals,
    mad_entropy_plane,
    mad_profiles,
    offset_pictures,
    position_maps,
    rollout_overlays,
    save_figure,
    similarity_heatmap,
    training_curves,
)
from nearsight.report.inputs import ModelHeads, read_heads, read_history
from nearsight.report.page import write_page
from nearsight.report.reading import Reading, compare, compare_with_first, describe, layer_table

__all__ = [
    "Contrast",
    "Estimate",
    "ModelHeads",
    "Reading",
    "compare",
    "compare_with_first",
    "describe",
    "head_heatmaps",
    "heatmaps",
    "layer_table",
    "locality_intervals",
    "mad_entropy_plane",
    "mad_profiles",
    "offset_pictures",
    "position_maps",
    "read_heads",
    "read_history",
    "rollout_overlays",
    "save_figure",
    "similarity_heatmap",
    "training_curves",
    "write_page",
]
