"""Segmentation by retrieval, without training (Balažević et al. 2023, "Hummingbird").

The memory holds patch features of training images, each with how much of which class is under it. Every patch of a test
image looks for its k nearest patches there, by cosine. Their label distributions, weighted by softmax(similarity / T),
are its prediction; the map of predictions is stretched to the size of the image's mask, and the largest is the class of
each pixel.

Shape suffixes: N images, B images of a batch, M patches of the memory, Q query patches, P patches of an image row
by row, C channels, c classes, k neighbours, H rows and W columns of pixels, h rows and w columns of patches.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.data.segmentation import MaskedImages, SegmentationSet
from nearsight.errors import InputError, check_at_least, check_positive
from nearsight.metrics.segmentation import confusion_matrix, mean_iou, per_class_iou, pixel_accuracy
from nearsight.probe.features import FeatureReader, Watch, unwatched
from nearsight.probe.frozen import Preparation
from nearsight.probe.scores import image_counts
from nearsight.probe.search import ExactIndex, FaissIndex, Index, check_enough, unit
from nearsight.probe.settings import MEMORY_SIZE, RETRIEVE_K, RETRIEVE_TEMPERATURE, IndexKind
from nearsight.randomness import permutation


def pooled_labels(mask_HW: Tensor, grid_size: tuple[int, int], num_classes: int, ignore_index: int) -> Tensor:
    """The share of each class among the labelled pixels under each patch: [P, c], zeros where there are none.

    Patches are stretched over the whole mask: where a boundary cuts a pixel, it counts on both sides by its parts.
    """
    labels_HW = mask_HW.long()
    counted_HW = labels_HW != ignore_index
    one_hot_HWc = F.one_hot(torch.where(counted_HW, labels_HW, 0), num_classes).float() * counted_HW.unsqueeze(-1)
    rows_hH, columns_wW = (
        _overlaps(length, parts, mask_HW.device) for length, parts in zip(mask_HW.shape, grid_size, strict=True)
    )
    areas_Pc = torch.einsum("hH,HWc,wW->hwc", rows_hH, one_hot_HWc, columns_wW).flatten(0, 1)
    total_P1 = areas_Pc.sum(1, keepdim=True)
    # Less than a hundredth of a pixel is what rounding leaves of none.
    return torch.where(total_P1 > 1e-2, areas_Pc / total_P1.clamp(min=1e-2), 0.0)


def _overlaps(length: int, parts: int, device: torch.device) -> Tensor:
    """How much of each of `length` pixels lies in each of so many equal parts: [parts, length]."""
    edges = torch.arange(parts + 1, device=device, dtype=torch.float32) * length / parts
    pixel = torch.arange(length, device=device, dtype=torch.float32)
    end = torch.minimum(edges[1:, None], pixel + 1)
    return (end - torch.maximum(edges[:-1, None], pixel)).clamp(min=0)


@dataclass(frozen=True)
class PatchMemory:
    """Patches to be found, and their labels."""

    features_MC: Tensor
    """Of length 1, float32."""
    labels_Mc: Tensor
    """Distributions over the classes, float32."""

    def __len__(self) -> int:
        return len(self.features_MC)

    @property
    def num_bytes(self) -> int:
        return self.features_MC.nbytes + self.labels_Mc.nbytes

    def unseen(self) -> list[int]:
        """Classes that no patch has a part of."""
        return torch.nonzero(self.labels_Mc.sum(0) == 0).flatten().tolist()


def image_quotas(num_images: int, size: int) -> list[int]:
    """How many patches each image may give so that all give at most `size`, as evenly as possible."""
    return [(number + 1) * size // num_images - number * size // num_images for number in range(num_images)]


Opened = Callable[[int], tuple[Tensor, Tensor]]
"""From the place of an image to (what is prepared, its mask [H, W]), in a thread."""


def patch_maps(
    read: Callable[[Tensor], Tensor],
    opened: Opened,
    prepared: Callable[[Tensor], Tensor],
    num_images: int,
    *,
    batch_size: int,
    watch: Watch = unwatched,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(feature map [C, h, w], mask [H, W]) of each image, which threads read one batch ahead."""
    masks: deque[Tensor] = deque()

    def maps() -> Iterator[Tensor]:
        with ThreadPoolExecutor() as threads:
            try:
                starts = range(0, num_images, batch_size)
                ahead = [threads.submit(opened, number) for number in range(min(batch_size, num_images))]
                for start in starts:
                    found = [future.result() for future in ahead]
                    following = range(start + batch_size, min(start + 2 * batch_size, num_images))
                    ahead = [threads.submit(opened, number) for number in following]
                    masks.extend(mask_HW for _, mask_HW in found)
                    yield read(torch.cat([prepared(image) for image, _ in found]))
            finally:
                threads.shutdown(cancel_futures=True)

    for maps_BChw in watch(maps()):
        for map_Chw in maps_BChw:
            yield map_Chw, masks.popleft()


def _whole_maps(
    reader: FeatureReader,
    images: MaskedImages,
    preparation: Preparation,
    kept_NChw: Tensor | None,
    device: torch.device,
    **options: Any,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of whole images, squeezed to the model's size; features that are kept are not computed again."""
    if kept_NChw is None:
        whole = partial(preparation.whole, device=device)
        return patch_maps(reader, images.__getitem__, whole, len(images), **options)
    kept = kept_NChw

    def opened(number: int) -> tuple[Tensor, Tensor]:
        return kept[number : number + 1], images.mask(number)

    return patch_maps(lambda maps_BChw: maps_BChw, opened, lambda map_1Chw: map_1Chw.to(device), len(images), **options)


def build_memory(
    reader: FeatureReader,
    dataset: SegmentationSet,
    preparation: Preparation,
    *,
    size: int = MEMORY_SIZE,
    seed: int = 0,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    watch: Watch = unwatched,
    kept_NChw: Tensor | None = None,
) -> PatchMemory:
    """The labelled patches of the training images, or a random choice of them where there are more than `size`.

    Every image may give the same number of patches; which of its patches those are depends on seed and image alone.
    `kept_NChw`: the features of the training images, where they are known (`kept_maps`).
    """
    check_at_least("--memory-size", size, 1)
    device, count = torch.device(device), len(dataset.train)
    found: list[Tensor] = []
    labels: list[Tensor] = []
    maps = _whole_maps(reader, dataset.train, preparation, kept_NChw, device, batch_size=batch_size, watch=watch)
    for number, (quota, (map_Chw, mask_HW)) in enumerate(zip(image_quotas(count, size), maps, strict=True)):
        grid_size = (map_Chw.shape[1], map_Chw.shape[2])
        labels_Pc = pooled_labels(mask_HW.to(device), grid_size, dataset.num_classes, dataset.ignore_index)
        kept = _chosen(labels_Pc.sum(1) > 0, quota, seed, number)
        found.append(unit(map_Chw.flatten(1).T[kept]))
        labels.append(labels_Pc[kept])
    if not sum(map(len, found)):
        raise InputError(f"no patch of the {count} training images of {dataset.name} has a labelled pixel")
    return PatchMemory(torch.cat(found), torch.cat(labels))


def _chosen(labelled_P: Tensor, quota: int, seed: int, image: int) -> Tensor:
    """Ascending positions of at most `quota` labelled patches."""
    positions = torch.nonzero(labelled_P).flatten()
    if len(positions) <= quota:
        return positions
    order = permutation(torch.tensor([seed]), "memory patches", torch.tensor(image), len(positions))[0]
    return positions[order[:quota].to(positions.device)].sort().values


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
        k: int = RETRIEVE_K,
        temperature: float = RETRIEVE_TEMPERATURE,
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
    kept_NChw: Tensor | None = None,
) -> RetrievalResult:
    """Segment the test images from the memory. `kept_NChw`: their features, where they are known."""
    device = torch.device(device)
    confusion_cc = torch.zeros(dataset.num_classes, dataset.num_classes, dtype=torch.int64)
    counts: list[Tensor] = []
    maps = _whole_maps(reader, dataset.test, preparation, kept_NChw, device, batch_size=batch_size, watch=watch)
    # The patches of a batch are searched together: those of one image are too few to keep a device busy.
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
