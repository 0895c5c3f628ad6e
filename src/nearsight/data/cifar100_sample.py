"""`cifar100-sample`: 200 test images of CIFAR-100 that come with the package, to look at models without a download.

Of each of the 100 classes the first two images of the official test file (Krizhevsky 2009), chosen by their place and
by nothing else. They lie in one picture, `cifar100_sample.png`, 20 in a row: the first image of every class in the
order of the labels, then the second of every class. `tests/data/test_cifar100_sample.py` makes it from the test file.

There are no training images: training and probing on them are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nearsight.data.registry import DatasetSpec, register_dataset
from nearsight.errors import InputError
from nearsight.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

    from nearsight.data.dataset import ImageSet

FILE = Path(__file__).with_name("cifar100_sample.png")
SIZE, PER_ROW = 32, 20
"""Pixels along the side of an image, and images in a row of the sheet."""
CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip
NUM_IMAGES = 2 * len(CLASSES)


def _sample(num_images: int = NUM_IMAGES, *, image_size: int = SIZE, split: str = "test") -> ImageSet:
    """The first images of the sheet. Labels repeat 0 … 99, so that any prefix has classes in equal parts."""
    assert (image_size, split) == (SIZE, "test")  # there are no others
    if num_images > NUM_IMAGES:
        raise InputError(f"{num_images} test images of cifar100-sample were asked for, but it has {NUM_IMAGES}")
    from nearsight.data.dataset import ImageSet
    from nearsight.data.decoding import opened_rgb

    with opened_rgb(FILE) as sheet:
        pixels_RHSWC = np.asarray(sheet).reshape(-1, SIZE, PER_ROW, SIZE, 3)
    images_NCHW = torch.from_numpy(pixels_RHSWC.transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIZE, SIZE).copy())
    return ImageSet(images_NCHW[:num_images], torch.arange(num_images) % len(CLASSES))


SPEC = DatasetSpec(
    about="the first two test images of each class of CIFAR-100, to look at models; comes with nearsight",
    find=None,
    draw=_sample,
    classes=CLASSES,
    num_classes=len(CLASSES),
    num_train=0,
    num_test=NUM_IMAGES,
    image_size=SIZE,
    mean=(0.5071, 0.4865, 0.4409),  # of CIFAR-100's training images
    std=(0.2673, 0.2564, 0.2762),
)


def sample_images() -> tuple[Tensor, Tensor]:
    """(images [200, 3, 32, 32], labels [200]): two CIFAR-100 test images of each class, normalised as the models of the
    zoo take them. `nearsight.data.cifar100_sample.CLASSES` has the names of the labels."""
    sample = _sample()
    mean_C11, std_C11 = (torch.tensor(values).view(3, 1, 1) for values in (SPEC.mean, SPEC.std))
    return (sample.images_NCHW.float() / 255 - mean_C11) / std_C11, sample.labels_N


register_dataset("cifar100-sample", SPEC)
