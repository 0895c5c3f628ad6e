"""The figures of S1, of the page and of the further measurements, as matplotlib figures.

They are made with matplotlib's object interface only: no window, no global current figure, usable from any thread.
"""

from nearsight.report.figures.curves import training_curves
from nearsight.report.figures.files import save_figure, svg_text
from nearsight.report.figures.heat import head_heatmaps, heatmaps
from nearsight.report.figures.intervals import locality_intervals
from nearsight.report.figures.offsets import offset_pictures
from nearsight.report.figures.plane import mad_entropy_plane
from nearsight.report.figures.positions import position_maps
from nearsight.report.figures.profiles import mad_profiles
from nearsight.report.figures.rollout import rollout_overlays
from nearsight.report.figures.similarity import similarity_heatmap

__all__ = [
    "head_heatmaps",
    "heatmaps",
    "locality_intervals",
    "mad_entropy_plane",
    "mad_profiles",
    "offset_pictures",
    "position_maps",
    "rollout_overlays",
    "save_figure",
    "similarity_heatmap",
    "svg_text",
    "training_curves",
]
