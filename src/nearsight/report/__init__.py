"""From measured heads to what people look at: figures, plain words, and one self-contained page."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.report.differences import Difference, Quantity
    from nearsight.report.figures.heat import head_heatmaps, heatmaps, similarity_heatmap
    from nearsight.report.figures.models import locality_spreads, mad_entropy_plane, mad_profiles, training_curves
    from nearsight.report.figures.patches import offset_pictures, position_maps
    from nearsight.report.figures.pictures import rollout_overlays
    from nearsight.report.figures.style import save_figure
    from nearsight.report.inputs import ModelHeads, read_heads, read_history
    from nearsight.report.page.models import write_page
    from nearsight.report.reading import Reading, compare, compare_with_first, describe, layer_table

__all__ = [
    "Difference",
    "ModelHeads",
    "Quantity",
    "Reading",
    "compare",
    "compare_with_first",
    "describe",
    "head_heatmaps",
    "heatmaps",
    "layer_table",
    "locality_spreads",
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

open_room(__name__)
