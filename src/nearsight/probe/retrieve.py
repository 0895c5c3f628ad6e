"""Segmentation by retrieval, without training (Balažević et al. 2023, "Hummingbird").

Every patch of a test image looks for its k nearest patches in a memory of training patches, by cosine. Their label
distributions, weighted by softmax(similarity / T), are its prediction; the map of predictions is stretched to the size
of the image's mask, and the largest is the class of each pixel.

Shape suffixes: N images, M patches of the memory, Q patches that look, P patches of an image, C channels, c classes,
k neighbours, H rows and W columns of pixels, h rows and w columns of patches.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.data.segmentation import SegmentationSet
from nearsight.errors import check_positive
from nearsight.metrics.segmentation import confusion_matrix, mean_iou, per_class_iou, pixel_accuracy
from nearsight.probe.bootstrap import image_counts
from nearsight.probe.features import FeatureReader, Watch, unwatched
from nearsight.probe.memory import PatchMemory, patch_maps
from nearsight.probe.preparation import Preparation
from nearsight.probe.search import ExactIndex, FaissIndex, Index, check_enough

DEFAULT_K = 30
DEFAULT_TEMPERATURE = 0.02
IndexKind = Literal["exact", "faiss"]


@dataclass(frozen=True, kw_only=True)
class RetrievalResult:
    """How well a model's patches find patches of the same class."""

    mean_iou: float
    """Over the data set; classes that are neither in the masks nor predicted are left out."""
    pixel_accuracy: float
    per_class_iou: tuple[float, ...]
    """NaN for classes that are left out."""
    unseen: tuple[int, ...]
    """Classes that no patch of the memory has: they cannot be predicted."""
    num_images: int
    memory_patches: int
    memory_bytes: int
    counts_N3c: Tensor
    """Hits, true and predicted pixels of each class in each image; see `image_counts`."""


class Retriever:
    """A memory and its index."""

    def __init__(
        self,
        memory: PatchMemory,
        *,
        k: int = DEFAULT_K,
        temperature: float = DEFAULT_TEMPERATURE,
        index: IndexKind = "exact",
    ) -> None:
        check_enough(len(memory), k, "patches in the memory")
        check_positive("the temperature", temperature)
        self.memory, self.k, self.temperature = memory, k, temperature
        kind = ExactIndex if index == "exact" else FaissIndex
        self._index: Index = kind(memory.features_MC, normalized=True)

    def predict(self, queries_QC: Tensor) -> Tensor:
        """The distribution over the classes of each patch: [Q, c]."""
        similarity_Qk, neighbour_Qk = self._index.search(queries_QC, self.k)
        weight_Qk = (similarity_Qk / self.temperature).softmax(1)
        # A neighbour at a time: [Q, k, c] of many classes would be larger than anything else here.
        labels_Mc = self.memory.labels_Mc
        total_Qc = labels_Mc.new_zeros(len(queries_QC), labels_Mc.shape[1])
        for weight_Q, neighbour_Q in zip(weight_Qk.T, neighbour_Qk.T, strict=True):
            total_Qc += weight_Q.unsqueeze(1) * labels_Mc[neighbour_Q]
        return total_Qc


def stretched(prediction_Pc: Tensor, grid_size: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """The class of each pixel [H, W], from the distributions of the patches, bilinearly."""
    map_1chw = prediction_Pc.T.unflatten(1, grid_size).unsqueeze(0)
    return F.interpolate(map_1chw, size=size, mode="bilinear", align_corners=False)[0].argmax(0)


def retrieve(
    reader: FeatureReader,
    retriever: Retriever,
    dataset: SegmentationSet,
    preparation: Preparation,
    *,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    watch: Watch = unwatched,
) -> RetrievalResult:
    """Segment the test images from the memory."""
    device = torch.device(device)
    confusion_cc = torch.zeros(dataset.num_classes, dataset.num_classes, dtype=torch.int64)
    counts: list[Tensor] = []
    maps = patch_maps(reader, dataset.test, preparation, batch_size=batch_size, device=device, watch=watch)
    # The patches of a batch look together: those of one image are too few to keep a device busy.
    while batch := list(islice(maps, batch_size)):
        predictions_Qc = retriever.predict(torch.cat([map_Chw.flatten(1).T for map_Chw, _ in batch]))
        parts = predictions_Qc.split([map_Chw[0].numel() for map_Chw, _ in batch])
        for (map_Chw, truth_HW), prediction_Pc in zip(batch, parts, strict=True):
            found_HW = stretched(prediction_Pc, tuple(map_Chw.shape[1:]), tuple(truth_HW.shape)).cpu()
            of_image_cc = confusion_matrix(found_HW, truth_HW, dataset.num_classes, dataset.ignore_index)
            confusion_cc += of_image_cc
            counts.append(image_counts(of_image_cc))
    return RetrievalResult(
        mean_iou=float(mean_iou(confusion_cc)),
        pixel_accuracy=float(pixel_accuracy(confusion_cc)),
        per_class_iou=tuple(per_class_iou(confusion_cc).tolist()),
        unseen=tuple(retriever.memory.unseen()),
        num_images=len(counts),
        memory_patches=len(retriever.memory),
        memory_bytes=retriever.memory.num_bytes,
        counts_N3c=torch.stack(counts),
    )
