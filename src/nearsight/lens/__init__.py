"""Looking into a model: attention of an unmodified ViT, where its tokens lie, and what that amounts to per head."""

from nearsight.lens.capture import Attention, AttentionTap
from nearsight.lens.geometry import patch_grid
from nearsight.lens.measuring import measure
from nearsight.lens.table import HeadTable

__all__ = ["Attention", "AttentionTap", "HeadTable", "measure", "patch_grid"]
