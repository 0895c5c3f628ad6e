"""Retrieval as open-hummingbird-eval 2.0.0 evaluates it (Pariza et al., github.com/vpariza/open-hummingbird-eval), the
public implementation of Balažević et al. 2023. What differs from `nearsight.probe.retrieve`:

- The memory is of augmented images: each epoch passes over all training images, with other colours (brightness,
  contrast, saturation and hue by up to 0.1, each with probability ½) and a random crop (area 0.5 to 2, of which more
  than the whole is drawn again; sides 3:4 to 4:3), resized bilinearly.
- Masks have the size of the images that the model sees, in the memory and in the test, by the nearest pixel.
- Ignored pixels are in the memory as pixels of the first class. (Of ADE20K they are a class of their own, 151 in all.)
- Where not all patches fit, every image gives the same number of them, rare ones first: the score of a patch is the sum
  over its classes of how many patches of the image have each, times a random number; the smallest are taken.
- Predicted classes are matched to true ones so that the sum of their IoUs is largest (Hungarian).
- The mean is over all classes: one that is neither in the masks nor predicted counts with an IoU of 0.

What is random is a function of (seed, epoch, image). The search, k, the temperature and the softmax are the same.

Shape suffixes: P patches of an image row by row, c classes, C channels, H rows and W columns of pixels, h and w of
patches.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from nearsight.data.segmentation import SegmentationSet
from nearsight.errors import InputError, check_at_least
from nearsight.metrics.segmentation import confusion_matrix
from nearsight.probe.features import FeatureReader, Watch, unwatched
from nearsight.probe.frozen import Preparation
from nearsight.probe.retrieve import (
    Opened,
    PatchMemory,
    RetrievalResult,
    Retriever,
    patch_maps,
    pooled_labels,
    stretched,
)
from nearsight.probe.search import unit
from nearsight.probe.settings import MEMORY_SIZE
from nearsight.randomness import uniform

JITTER = 0.1
"""Of brightness, contrast, saturation and hue."""
AREA, RATIO = (0.5, 2.0), (3 / 4, 4 / 3)
_TRIES = 10
_COLOURS = ("brightness", "contrast", "saturation", "hue")
_OTHER_IS_A_CLASS = ("ade20k",)
"""Data sets whose ignored pixels are a class of their own there: it can be predicted, and is never right."""

Window = tuple[int, int, int, int]
"""Top, left, rows and columns."""


def crop_window(size: tuple[int, int], draws: Sequence[float]) -> Window:
    """That of torchvision's `RandomResizedCrop` for an image of (rows, columns), from four draws in [0, 1) per try."""
    rows, columns = size
    low, high = (math.log(ratio) for ratio in RATIO)
    for area, ratio, down, right in zip(*[iter(draws)] * 4, strict=True):
        target = rows * columns * (AREA[0] + area * (AREA[1] - AREA[0]))
        aspect = math.exp(low + ratio * (high - low))
        wide, tall = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < wide <= columns and 0 < tall <= rows:
            return int(down * (rows - tall + 1)), int(right * (columns - wide + 1)), tall, wide
    # None fits: the largest part of the middle whose sides are within bounds.
    wide, tall = columns, rows
    if columns / rows < RATIO[0]:
        tall = round(columns / RATIO[0])
    elif columns / rows > RATIO[1]:
        wide = round(rows * RATIO[1])
    return (rows - tall) // 2, (columns - wide) // 2, tall, wide


def jittered(picture: Image.Image, draws: Sequence[float]) -> Image.Image:
    """Other colours, one after the other; two draws for each: whether, and how much."""
    from torchvision.transforms import functional as adjust  # here: the import takes a quarter of a second

    for name, whether, amount in zip(_COLOURS, draws[::2], draws[1::2], strict=True):
        if whether < 0.5:
            by = JITTER * (2 * amount - 1)
            picture = getattr(adjust, f"adjust_{name}")(picture, by if name == "hue" else 1 + by)
    return picture


def augmented(
    image_CHW: Tensor, mask_HW: Tensor, size: tuple[int, int], draws: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """(image [1, C, H, W] in grey levels, mask [H, W]) of this size, for the memory."""
    colours, of_crop = draws[: 2 * len(_COLOURS)], draws[2 * len(_COLOURS) :]
    picture = jittered(Image.fromarray(image_CHW.permute(1, 2, 0).numpy()), colours)
    pixels_1CHW = torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).copy()).float().unsqueeze(0)
    top, left, rows, columns = crop_window((mask_HW.shape[0], mask_HW.shape[1]), of_crop)
    cut_1CHW = pixels_1CHW[..., top : top + rows, left : left + columns]
    resized_1CHW = F.interpolate(cut_1CHW, size=size, mode="bilinear", align_corners=False, antialias=True)
    return resized_1CHW, nearest(mask_HW[top : top + rows, left : left + columns], size)


def squeezed(image_CHW: Tensor, mask_HW: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The same of a whole image, for the test: bilinear, rounded to bytes."""
    picture = Image.fromarray(image_CHW.permute(1, 2, 0).numpy())
    resized = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BILINEAR))
    return torch.from_numpy(resized.transpose(2, 0, 1).copy()).float().unsqueeze(0), nearest(mask_HW, size)


def nearest(mask_HW: Tensor, size: tuple[int, int]) -> Tensor:
    """A mask at another size; of each pixel the label at its upper left corner, as torch has it."""
    return F.interpolate(mask_HW[None, None].float(), size=size, mode="nearest")[0, 0].long()


def rare_first(labels_Pc: Tensor, num: int, draws_P: Tensor) -> Tensor:
    """Positions of `num` patches, those with rare classes as a rule; all where there are no more."""
    has_Pc = (labels_Pc > 0).float()
    score_P = (has_Pc @ has_Pc.sum(0)) * draws_P.to(labels_Pc.device)
    return score_P.topk(min(num, len(score_P)), largest=False).indices


class _Classes:
    """The classes of a data set as the protocol counts them."""

    def __init__(self, dataset: SegmentationSet) -> None:
        self._ignored, self.has_other = dataset.ignore_index, dataset.name in _OTHER_IS_A_CLASS
        self.number = dataset.num_classes + self.has_other

    def remembered(self, mask_HW: Tensor) -> Tensor:
        """Labels for the memory, none of which is ignored."""
        other = self.number - 1 if self.has_other else 0
        return torch.where(mask_HW == self._ignored, other, mask_HW)


def build_memory(
    reader: FeatureReader,
    dataset: SegmentationSet,
    preparation: Preparation,
    *,
    num_epochs: int = 1,
    size: int = MEMORY_SIZE,
    seed: int = 0,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    watch: Watch = unwatched,
) -> PatchMemory:
    """The patches of all training images, augmented anew in each epoch; of more than `size`, rare ones first."""
    check_at_least("--augmentation-epochs", num_epochs, 1)
    check_at_least("--memory-size", size, 1)
    device, classes, num_images = torch.device(device), _Classes(dataset), len(dataset.train)
    seed_0, quota = torch.tensor(seed), max(1, size // (num_images * num_epochs))

    def opened(number: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(number, num_images)
        draws = uniform(seed_0, "hummingbird images", torch.tensor(epoch), torch.tensor(place), 8 + 4 * _TRIES)
        return augmented(*dataset.train[place], preparation.size, draws.tolist())

    features, labels = [], []
    maps = _maps(reader, opened, preparation, num_images * num_epochs, batch_size, device, watch)
    for number, (map_Chw, mask_HW) in enumerate(maps):
        epoch, place = divmod(number, num_images)
        grid = (map_Chw.shape[1], map_Chw.shape[2])
        labels_Pc = pooled_labels(classes.remembered(mask_HW).to(device), grid, classes.number, -1)
        draws_P = uniform(seed_0, "hummingbird patches", torch.tensor(epoch), torch.tensor(place), labels_Pc.shape[0])
        chosen = rare_first(labels_Pc, quota, draws_P)
        features.append(unit(map_Chw.flatten(1).T[chosen]))
        labels.append(labels_Pc[chosen])
    return PatchMemory(torch.cat(features), torch.cat(labels))


def _maps(
    reader: FeatureReader,
    opened: Opened,
    preparation: Preparation,
    num_images: int,
    batch_size: int,
    device: torch.device,
    watch: Watch,
) -> Iterator[tuple[Tensor, Tensor]]:
    def prepared(image_1CHW: Tensor) -> Tensor:
        return preparation.normalized(image_1CHW.to(device))

    return patch_maps(reader, opened, prepared, num_images, batch_size=batch_size, watch=watch)


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
    """Segment the test images from the memory, and match the classes."""
    device, classes = torch.device(device), _Classes(dataset)
    if retriever.memory.labels_Mc.shape[1] != classes.number:
        raise InputError(f"the memory has {retriever.memory.labels_Mc.shape[1]} classes, not {classes.number}")

    def opened(number: int) -> tuple[Tensor, Tensor]:
        return squeezed(*dataset.test[number], preparation.size)

    of_images: list[Tensor] = []
    maps = _maps(reader, opened, preparation, len(dataset.test), batch_size, device, watch)
    while batch := list(islice(maps, batch_size)):
        predictions_Qc = retriever.predict(torch.cat([map_Chw.flatten(1).T for map_Chw, _ in batch]))
        parts = predictions_Qc.split([map_Chw[0].numel() for map_Chw, _ in batch])
        for (map_Chw, truth_HW), prediction_Pc in zip(batch, parts, strict=True):
            found_HW = stretched(prediction_Pc, tuple(map_Chw.shape[1:]), tuple(truth_HW.shape)).cpu()
            confusion_cc = confusion_matrix(found_HW, truth_HW, classes.number, dataset.ignore_index)
            of_images.append(confusion_cc.to_sparse())  # an image has few of the classes
    total_cc = torch.zeros(classes.number, classes.number, dtype=torch.int64)
    for one in of_images:
        total_cc += one.to_dense()
    match_c = matched(total_cc)
    counts_N3c = torch.stack([_counts(one.to_dense()[:, match_c]) for one in of_images])
    hits_c, truth_c, predicted_c = counts_N3c.sum(0).double()
    iou_c = hits_c / (truth_c + predicted_c - hits_c).clamp(min=1)
    return RetrievalResult(
        mean_iou=float(iou_c.mean()),
        pixel_accuracy=float(hits_c.sum() / truth_c.sum()),
        per_class_iou=tuple(iou_c[: dataset.num_classes].tolist()),
        unseen=tuple(number for number in retriever.memory.unseen() if number < dataset.num_classes),
        num_images=len(of_images),
        memory_patches=len(retriever.memory),
        memory_bytes=retriever.memory.num_bytes,
        counts_N3c=counts_N3c,
    )


def _counts(confusion_cc: Tensor) -> Tensor:
    return torch.stack([confusion_cc.diagonal(), confusion_cc.sum(1), confusion_cc.sum(0)])


def matched(confusion_cc: Tensor) -> Tensor:
    """[c]: which predicted class stands for each true one, so that the sum of their IoUs is largest."""
    from scipy.optimize import linear_sum_assignment  # which is not among the core's libraries

    hits_cc = confusion_cc.double()
    union_cc = hits_cc.sum(1, keepdim=True) + hits_cc.sum(0, keepdim=True) - hits_cc
    iou_cc = hits_cc / union_cc.clamp(min=1e-8)
    _, columns = linear_sum_assignment(1 - iou_cc.numpy())
    return torch.from_numpy(columns)
