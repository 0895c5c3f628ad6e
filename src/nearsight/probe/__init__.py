"""How good the features of a frozen model are: k-NN, linear, segmentation, dense retrieval."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.probe.cache import FeatureKey, cached_features
    from nearsight.probe.features import FeatureReader, read_features, reading
    from nearsight.probe.frozen import Preparation, model_identity, weights_hash
    from nearsight.probe.knn import knn_accuracy, knn_right, knn_scores
    from nearsight.probe.linear import LinearResult, linear_probe
    from nearsight.probe.retrieve import PatchMemory, RetrievalResult, Retriever, build_memory, retrieve
    from nearsight.probe.scores import Score, accuracy_score, miou_score
    from nearsight.probe.search import ExactIndex, FaissIndex
    from nearsight.probe.settings import FeatureSpec, LinearConfig

__all__ = [
    "ExactIndex",
    "FaissIndex",
    "FeatureKey",
    "FeatureReader",
    "FeatureSpec",
    "LinearConfig",
    "LinearResult",
    "PatchMemory",
    "Preparation",
    "RetrievalResult",
    "Retriever",
    "Score",
    "accuracy_score",
    "build_memory",
    "cached_features",
    "knn_accuracy",
    "knn_right",
    "knn_scores",
    "linear_probe",
    "miou_score",
    "model_identity",
    "read_features",
    "reading",
    "retrieve",
    "weights_hash",
]

open_room(__name__)
