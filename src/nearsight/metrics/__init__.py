"""Pure functions on tensors, each with its paper in its docstring; no models, no files."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.metrics.association import (
        NeighbourAssociation,
        PatchAssociation,
        gram_distance_correlation,
        neighbour_association,
        patch_association,
    )
    from nearsight.metrics.attention import (
        attention_distance,
        attention_entropy,
        grid_distances,
        next_patch_distance,
        uniform_attention_distance,
        within_reach,
    )
    from nearsight.metrics.features import (
        linear_cka,
        local_distant_similarity,
        locality_score,
        patch_cls_similarity,
    )
    from nearsight.metrics.kinds import KindShares, edge_attention_distance, head_kinds, kind_shares
    from nearsight.metrics.moments import Moments
    from nearsight.metrics.own_patch import OwnPatchHead, least_share_on_itself, own_patch_head
    from nearsight.metrics.segmentation import (
        confusion_matrix,
        mean_iou,
        per_class_accuracy,
        per_class_iou,
        pixel_accuracy,
    )
    from nearsight.metrics.tokens import (
        background_share,
        gini,
        outlier_tokens,
        patch_coverage,
        received_attention,
        sink_patches,
    )

__all__ = [
    "KindShares",
    "Moments",
    "NeighbourAssociation",
    "OwnPatchHead",
    "PatchAssociation",
    "attention_distance",
    "attention_entropy",
    "background_share",
    "confusion_matrix",
    "edge_attention_distance",
    "gini",
    "gram_distance_correlation",
    "grid_distances",
    "head_kinds",
    "kind_shares",
    "least_share_on_itself",
    "linear_cka",
    "local_distant_similarity",
    "locality_score",
    "mean_iou",
    "neighbour_association",
    "next_patch_distance",
    "outlier_tokens",
    "own_patch_head",
    "patch_association",
    "patch_cls_similarity",
    "patch_coverage",
    "per_class_accuracy",
    "per_class_iou",
    "pixel_accuracy",
    "received_attention",
    "sink_patches",
    "uniform_attention_distance",
    "within_reach",
]

open_room(__name__)
