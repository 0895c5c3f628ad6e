"""From measured heads to what people look at: figures, plain words, and one self-contained page.

What is asked for is loaded then, so that who needs the words does not wait for what draws.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "differences": ("Difference", "Quantity"),
    "figures.heat": ("head_heatmaps", "heatmaps", "similarity_heatmap"),
    "figures.models": ("locality_spreads", "mad_entropy_plane", "mad_profiles", "training_curves"),
    "figures.patches": ("offset_pictures", "position_maps"),
    "figures.pictures": ("rollout_overlays",),
    "figures.style": ("save_figure",),
    "inputs": ("ModelHeads", "read_heads", "read_history"),
    "page.models": ("write_page",),
    "reading": ("Reading", "compare", "compare_with_first", "describe", "layer_table"),
}
"""Module → what it has for the face of this package."""

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


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"nearsight.report.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
