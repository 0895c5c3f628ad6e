"""What is read of a model whose heads are changed, and how it is scored: its classes, its neighbours, or its pixels.

Every readout gives each image a value, and the mean over images is the score. So a loss, and its standard error over
images, are the same few lines for all of them.

Shape suffixes: V variants, N images, B images of a batch, C channels or classes, D numbers that are kept of an image,
h rows and w columns of patches, H and W of pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nearsight.data import epoch_batches
from nearsight.errors import InputError, check_at_least
from nearsight.lens.running import running, without_gradients
from nearsight.metrics.segmentation import confusion_matrix
from nearsight.probe.features import HookedBlocks
from nearsight.probe.knn import knn_right_of_others
from nearsight.probe.scores import image_counts
from nearsight.probe.search import unit
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import HeadTraining, pixel_logits
from nearsight.probe.settings import ABLATION_K

Metric = Literal["accuracy", "miou"]
Truth = Tensor | Sequence[Tensor]
"""Of the images of a batch: their labels [B], or their masks [H, W]."""
Labelled = Iterable[tuple[Tensor, Truth]]
"""Batches of normalised images [B, C, H, W], and what is true of them."""
_MOST_BYTES = 2**32
"""Of what is kept of all images in all variants."""
_SUBPIXELS = 4
"""Along a side of a patch, when a head on patches is fitted to pixels: finer steps cost more and teach it nothing."""


class Readout(ABC):
    """Reads a model, and says how good what it reads is."""

    metric: Metric = "accuracy"

    @abstractmethod
    def prepare(self, model: nn.Module, example_BCHW: Tensor) -> None:
        """Once, before the first batch."""

    @abstractmethod
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """What a forward of the model gives, an entry per image."""

    @abstractmethod
    def kept(self, output_B: Tensor, truth: Truth) -> Tensor:
        """Of one variant and one batch, what `values` needs: [B, D]."""

    @abstractmethod
    def values(self, kept_ND: Tensor, truth: Sequence[Truth], device: torch.device) -> NDArray[np.float64]:
        """Of one variant: what each image contributes to the score, which is their mean; `truth` of all batches."""

    def check_room(self, kept_VBD: Tensor, num_images: int) -> None:
        """Refuse what will not fit into memory, as soon as the first batch is known."""
        num_variants, size = kept_VBD.shape[:2]
        if kept_VBD.nbytes // size * num_images > _MOST_BYTES:
            raise InputError(
                f"what is kept of {num_images} images in {num_variants} variants needs more than {_MOST_BYTES >> 30} "
                "GiB; take fewer images, or ask for less at a time"
            )


def logits_of(output: Any) -> Tensor:
    """Of what a classifier returns."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise InputError("the model gives no logits [B, classes]; give one with a classifier")
    return found


class Classes(Readout):
    """The model's own classifier: whether the largest logit is that of the image's class."""

    def prepare(self, model: nn.Module, example_BCHW: Tensor) -> None:
        self._model = model

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return logits_of(self._model(images_BCHW))

    def kept(self, output_B: Tensor, truth: Truth) -> Tensor:
        labels_B, num_classes = torch.as_tensor(truth), output_B.shape[1]
        if not 0 <= int(labels_B.min()) <= int(labels_B.max()) < num_classes:
            raise InputError(
                f"labels go from {int(labels_B.min())} to {int(labels_B.max())}, but the model has {num_classes} "
                "classes; score='knn' asks for no classifier"
            )
        return (output_B.argmax(-1) == labels_B.to(output_B.device, non_blocking=True))[:, None]

    def values(self, kept_ND: Tensor, truth: Sequence[Truth], device: torch.device) -> NDArray[np.float64]:
        return np.asarray(kept_ND[:, 0].double())


class Neighbours(Readout):
    """The vote of the 20 nearest of the other images, by the features that the model's classifier takes."""

    def prepare(self, model: nn.Module, example_BCHW: Tensor) -> None:
        self._model = model
        outputs: dict[nn.Module, Tensor] = {}
        with ExitStack() as undo:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    hook = module.register_forward_hook(lambda at, _inputs, output: outputs.update({at: output}))
                    undo.callback(hook.remove)
            logits_BC = logits_of(model(example_BCHW))
        # None of a model that gives features itself.
        self._classifier = next((module for module, output in outputs.items() if output is logits_BC), None)

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        if self._classifier is None:
            return logits_of(self._model(images_BCHW))
        seen: list[Tensor] = []
        hook = self._classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self._model(images_BCHW)
        finally:
            hook.remove()
        return seen[-1]

    def kept(self, output_B: Tensor, truth: Truth) -> Tensor:
        return unit(output_B.float()).half()  # of length 1, so that half precision is enough

    def values(self, kept_ND: Tensor, truth: Sequence[Truth], device: torch.device) -> NDArray[np.float64]:
        labels_N = torch.cat([torch.as_tensor(labels_B).cpu() for labels_B in truth]).to(device)
        right_N = knn_right_of_others(kept_ND.to(device).float(), labels_N, k=ABLATION_K)
        return np.asarray(right_N.double().cpu())


class Pixels(Readout):
    """A segmentation head on the patches of the last block (`fit_pixels`): the class of every pixel, by mIoU.

    An mIoU is no mean over images, but near the sums that it is a function of it is linear in each image's part. These
    parts, with the mIoU added, are the values: their mean is the mIoU, and their standard error is its own (the delta
    method).
    """

    metric: Metric = "miou"

    def __init__(self, head: nn.Module, num_classes: int, ignore_index: int = 255) -> None:
        self.head, self._num_classes, self._ignore_index = head.eval(), num_classes, ignore_index

    def prepare(self, model: nn.Module, example_BCHW: Tensor) -> None:
        self._blocks = HookedBlocks(model, example_BCHW[0])
        self.head.to(example_BCHW.device)

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return self._blocks.read(images_BCHW, -1, "block").patches_BChw

    def kept(self, output_B: Tensor, truth: Truth) -> Tensor:
        """Hits, true and predicted pixels of each class, at the size of each mask: [B, 3 C]."""
        counts = []
        for features_Chw, mask_HW in zip(output_B.float(), truth, strict=True):
            rows, columns = mask_HW.shape
            labels_HW = pixel_logits(self.head, features_Chw[None], (rows, columns)).argmax(1)[0]
            confusion_CC = confusion_matrix(
                labels_HW, mask_HW.to(labels_HW.device), self._num_classes, self._ignore_index
            )
            counts.append(image_counts(confusion_CC).flatten().int().cpu())
        return torch.stack(counts)

    def values(self, kept_ND: Tensor, truth: Sequence[Truth], device: torch.device) -> NDArray[np.float64]:
        hits_NC, true_NC, predicted_NC = kept_ND.double().unflatten(1, (3, -1)).unbind(1)
        union_NC = true_NC + predicted_NC - hits_NC
        present_C = union_NC.sum(0) > 0
        hits_NC, union_NC = hits_NC[:, present_C], union_NC[:, present_C]
        iou_C = hits_NC.sum(0) / union_NC.sum(0)
        parts_N = ((hits_NC - iou_C * union_NC) / union_NC.sum(0)).mean(1) * len(kept_ND)
        return np.asarray(iou_C.mean() + parts_N)


def fit_pixels(
    model: nn.Module,
    images: Labelled,
    num_classes: int,
    *,
    ignore_index: int = 255,
    steps: int = 2000,
    batch_size: int = 16,
    seed: int = 0,
    device: torch.device | str | None = None,
    on_step: Callable[[int], object] = lambda steps_done: None,
) -> Pixels:
    """The head of `nearsight probe segment`, fitted to the features of the unchanged model: `score` of `ablate`.

    Features of whole images are read once, and not varied; the probe itself draws other crops in every step.

    Args:
        images: batches of normalised training images of one size, and their masks, each [H, W] at any size.
        num_classes: masks have classes from 0 on.
        ignore_index: the number of pixels without a class.
        steps: of AdamW on `batch_size` images, at the rates of the probe.
        on_step: called with the number of steps that are done.
    """
    check_at_least("steps", steps, 1)
    features, masks = [], []
    blocks: HookedBlocks | None = None
    with running(model, device) as run:
        for pictures, truth in images:
            with without_gradients():
                batch_BCHW = run.brought(pictures)
                blocks = blocks or HookedBlocks(run.model, batch_BCHW[0])
                features.append(blocks.read(batch_BCHW, -1, "block").patches_BChw.float().cpu())
            size = [_SUBPIXELS * side for side in features[-1].shape[-2:]]
            masks += [F.interpolate(mask_HW[None, None].cpu(), size, mode="nearest-exact")[0, 0] for mask_HW in truth]
        if not features:
            raise InputError("there are no training images to fit the segmentation head to")
        features_NChw, masks_NHW = torch.cat(features), torch.stack(masks).long()
        config = SegmentConfig(iterations=steps, batch_size=batch_size, seed=seed)
        training = HeadTraining(features_NChw.shape[1], num_classes, ignore_index, config, run.device)
        drawn = _drawn(features_NChw, masks_NHW, config, run.device)
        training.train(drawn, lambda features_BChw: features_BChw, lambda: on_step(training.steps_done))
    return Pixels(training.head, num_classes, ignore_index)


def _drawn(
    features_NChw: Tensor, masks_NHW: Tensor, config: SegmentConfig, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """A batch per step, epoch after epoch, each in an order of its own."""
    done, epoch, size = 0, 0, min(config.batch_size, len(features_NChw))
    while done < config.iterations:
        for order_1B in epoch_batches(torch.tensor([config.seed]), epoch, len(features_NChw), size):
            if done < config.iterations:
                yield features_NChw[order_1B[0]].to(device), masks_NHW[order_1B[0]].to(device)
            done += 1
        epoch += 1
