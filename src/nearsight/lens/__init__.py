"""Looking into a model: attention of an unmodified ViT, where its tokens lie, and what that amounts to per head."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.lens.capture import AttentionTap
    from nearsight.lens.checks import AdapterError, AdapterReport, check_vit_adapter
    from nearsight.lens.features import LayerSimilarity, layer_similarity
    from nearsight.lens.geometry import Geometry, patch_grid
    from nearsight.lens.intervene import average_maps, intervene
    from nearsight.lens.locality import add_locality, localities, remove_locality
    from nearsight.lens.maps import attention_maps
    from nearsight.lens.mapsfile import LayerMaps, open_maps
    from nearsight.lens.measurement import WHAT, Measurement, measurement
    from nearsight.lens.measuring import measure
    from nearsight.lens.plans import DropSinks, Identity, Mean, Offsets, OnlySinks, Plan, Reach, Uniform, Zero
    from nearsight.lens.positions import PositionGram, position_gram
    from nearsight.lens.rollout import attention_rollout
    from nearsight.lens.shards import Shards
    from nearsight.lens.survey import Site, Survey, survey
    from nearsight.lens.table import HeadTable

__all__ = [
    "WHAT",
    "AdapterError",
    "AdapterReport",
    "AttentionTap",
    "DropSinks",
    "Geometry",
    "HeadTable",
    "Identity",
    "LayerMaps",
    "LayerSimilarity",
    "Mean",
    "Measurement",
    "Offsets",
    "OnlySinks",
    "Plan",
    "PositionGram",
    "Reach",
    "Shards",
    "Site",
    "Survey",
    "Uniform",
    "Zero",
    "add_locality",
    "attention_maps",
    "attention_rollout",
    "average_maps",
    "check_vit_adapter",
    "intervene",
    "layer_similarity",
    "localities",
    "measure",
    "measurement",
    "open_maps",
    "patch_grid",
    "position_gram",
    "remove_locality",
    "survey",
]

open_room(__name__)
