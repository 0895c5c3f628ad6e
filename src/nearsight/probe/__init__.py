"""How good the features of a frozen model are (k-NN, linear, segmentation, retrieval), and what its heads are worth."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.probe.ablation import Ablation, ablate, every_head, every_reach, removal
    from nearsight.probe.cache import FeatureKey, cached_features
    from nearsight.probe.features import FeatureReader, read_features, reading
    from nearsight.probe.finetuning import Finetuned, finetune
    from nearsight.probe.frozen import Preparation, model_identity, weights_hash
    from nearsight.probe.knn import knn_accuracy, knn_right, knn_right_of_others, knn_scores
    from nearsight.probe.linear import LinearResult, linear_probe
    from nearsight.probe.readouts import Classes, Neighbours, Pixels, Readout, fit_pixels
    from nearsight.probe.retrieve import PatchMemory, RetrievalResult, Retriever, build_memory, retrieve
    from nearsight.probe.scores import Score, accuracy_score, miou_score
    from nearsight.probe.search import ExactIndex, FaissIndex
    from nearsight.probe.settings import FeatureSpec, FinetuneConfig, LinearConfig
    from nearsight.probe.variants import Tried, Variant, try_variants

__all__ = [
    "Ablation",
    "Classes",
    "ExactIndex",
    "FaissIndex",
    "FeatureKey",
    "FeatureReader",
    "FeatureSpec",
    "FinetuneConfig",
    "Finetuned",
    "LinearConfig",
    "LinearResult",
    "Neighbours",
    "PatchMemory",
    "Pixels",
    "Preparation",
    "Readout",
    "RetrievalResult",
    "Retriever",
    "Score",
    "Tried",
    "Variant",
    "ablate",
    "accuracy_score",
    "build_memory",
    "cached_features",
    "every_head",
    "every_reach",
    "finetune",
    "fit_pixels",
    "knn_accuracy",
    "knn_right",
    "knn_right_of_others",
    "knn_scores",
    "linear_probe",
    "miou_score",
    "model_identity",
    "read_features",
    "reading",
    "removal",
    "retrieve",
    "try_variants",
    "weights_hash",
]

open_room(__name__)
