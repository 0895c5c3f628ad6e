"""How well a segmentation agrees with the truth, all from one confusion matrix of pixels.

Matrices of parts of a data set add up to that of the whole: what is computed from their sum is over the data set, as
published numbers are. A mean of the IoUs of single images is another quantity.

Shape suffixes: C classes; the rows of a matrix are the truth, its columns the prediction.
"""

import torch
from torch import Tensor

from nearsight.errors import InputError, check_at_least


def confusion_matrix(prediction: Tensor, truth: Tensor, num_classes: int, ignore_index: int | None = None) -> Tensor:
    """How many pixels of each class were taken for each class: [C, C] int64.

    Args:
        prediction: class of each pixel, any shape.
        truth: the same shape; pixels with `ignore_index` do not count.
    """
    check_at_least("num_classes", num_classes, 1)
    if prediction.shape != truth.shape:
        raise InputError(
            f"a prediction of shape {list(prediction.shape)} does not fit a truth of {list(truth.shape)}; "
            "they need the same size"
        )
    for name, labels in (("prediction", prediction), ("truth", truth)):
        if labels.is_floating_point() or labels.is_complex():
            raise InputError(f"the {name} is {labels.dtype}, but class numbers are needed")
    prediction, truth = prediction.flatten().long(), truth.flatten().long()
    if ignore_index is not None:
        counted = truth != ignore_index
        prediction, truth = prediction[counted], truth[counted]
    for name, labels in (("prediction", prediction), ("truth", truth)):
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise InputError(
                f"the {name} has labels from {int(labels.min())} to {int(labels.max())}, but {num_classes} classes "
                f"have 0 to {num_classes - 1}" + ("" if ignore_index is None else f", or {ignore_index} to ignore")
            )
    return torch.bincount(truth * num_classes + prediction, minlength=num_classes**2).view(num_classes, num_classes)


def per_class_iou(confusion_CC: Tensor) -> Tensor:
    """Intersection over union of each class: [C] float64. NaN for one that is neither in the truth nor predicted."""
    counts_CC = _checked(confusion_CC)
    hits_C = counts_CC.diagonal()
    return hits_C / (counts_CC.sum(0) + counts_CC.sum(1) - hits_C)


def mean_iou(confusion_CC: Tensor) -> Tensor:
    """Mean intersection over union of the classes, a float64 scalar (Everingham et al. 2010).

    A class that was predicted but is not in the truth counts with 0; one that is in neither is left out.
    """
    return per_class_iou(confusion_CC).nanmean()


def pixel_accuracy(confusion_CC: Tensor) -> Tensor:
    """Share of the pixels whose class is right, a float64 scalar."""
    counts_CC = _checked(confusion_CC)
    return counts_CC.diagonal().sum() / counts_CC.sum()


def per_class_accuracy(confusion_CC: Tensor) -> Tensor:
    """Share of each class's pixels that were found: [C] float64. NaN for a class that is not in the truth."""
    counts_CC = _checked(confusion_CC)
    return counts_CC.diagonal() / counts_CC.sum(1)


def _checked(confusion_CC: Tensor) -> Tensor:
    if confusion_CC.dim() != 2 or confusion_CC.shape[0] != confusion_CC.shape[1]:
        raise InputError(f"a confusion matrix [C, C] is needed, not {list(confusion_CC.shape)}")
    counts_CC = confusion_CC.double()
    if not bool((counts_CC >= 0).all()):  # also false for NaN
        raise InputError("a confusion matrix holds numbers of pixels, but this one has some that are not 0 or more")
    if not bool((counts_CC > 0).any()):
        raise InputError("the confusion matrix counts no pixel: all are ignored")
    return counts_CC
