"""What a model's own classifier gets right: top-1 and top-5, on all of its classes or on those that the images have.

A data set may have fewer classes than the model, such as a folder of some of ImageNet's: they are found by their names
(WordNet ids, in timm's order of ImageNet's classes), and only their logits compete.

Shape suffixes: N images, B of a batch, C classes of the model, c of the data set.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from nearsight.errors import InputError

TOP = 5
_IMAGENETS = ("imagenet-1k", "imagenet-12k", "imagenet-21k", "imagenet-22k", "imagenet-22k-ms", "imagenet-21k-goog")


@dataclass(frozen=True)
class Answers:
    """Which images a classifier gets right, bool [N]."""

    top1: Tensor
    """Among the data set's classes."""
    top5: Tensor
    """True where the class is among the five largest logits of the data set's classes, or there are no more than
    five."""
    of_all: Tensor
    """Among all classes that the model has."""


def places_of(classes: Sequence[str], num_outputs: int) -> Tensor:
    """Where the classes of a data set are among a model's logits, int64 [c].

    By their WordNet ids, in a model of as many classes as an ImageNet has; otherwise a model of as many classes as the
    data set has them in the same order.
    """
    for name in _IMAGENETS:
        info = ImageNetInfo(name)
        if info.num_classes() == num_outputs:
            place = {synset: number for number, synset in enumerate(info.label_names())}
            if all(synset in place for synset in classes):
                return torch.tensor([place[synset] for synset in classes])
    if num_outputs == len(classes):
        return torch.arange(num_outputs)
    raise InputError(
        f"the model has {num_outputs} classes and the data {len(classes)} ({', '.join(map(repr, classes[:3]))}, …), "
        "which are not ids of ImageNet's (n01440764) by which they would be found"
    )


@torch.no_grad()
def answers(
    model: nn.Module, batches: Iterable[Tensor], labels_N: Tensor, places_c: Tensor, device: torch.device
) -> Answers:
    """Of a model in eval mode on `device`, for images that are prepared for it, in the order of their labels."""
    top1, top5, of_all = [], [], []
    places_c, begin = places_c.to(device), 0
    for images_BCHW in batches:
        logits_BC = model(images_BCHW.to(device)).float()
        labels_B = labels_N[begin : begin + len(images_BCHW)].to(device)
        own_Bc = logits_BC[:, places_c]
        largest_Bk = own_Bc.topk(min(TOP, len(places_c)), dim=-1).indices
        hit_Bk = largest_Bk == labels_B.unsqueeze(-1)
        top1.append(hit_Bk[:, 0])
        top5.append(hit_Bk.any(-1))
        of_all.append(logits_BC.argmax(-1) == places_c[labels_B])
        begin += len(images_BCHW)
    return Answers(*(torch.cat(parts).cpu() for parts in (top1, top5, of_all)))
