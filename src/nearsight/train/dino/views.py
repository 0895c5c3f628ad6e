"""Multi-crop: the views of a batch, made where the images are.

A view is a cell of an augmentation pipeline: the two global crops differ in their settings, the local ones in their
draws alone. A sample's views depend on the seed, the epoch and its place in the data set, so a batch may be divided
among processes and resumed after a crash without a change.

Shape suffixes: G global views, L local views, B samples, C channels, H rows, W columns (h, w of local crops).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearsight.augment import (
    Augmentation,
    ColorJitter,
    GaussianBlur,
    HorizontalFlip,
    Pipeline,
    RandomGrey,
    ResizedCrop,
    Solarize,
)
from nearsight.augment.pipeline import CompiledPipeline
from nearsight.data import Dataset
from nearsight.randomness import Draws
from nearsight.train.dino.config import CropsConfig

NUM_GLOBAL = 2


@dataclass(frozen=True)
class Views:
    """The views of a batch, with the randomness that belongs to them."""

    global_GBCHW: Tensor
    local_LBChw: Tensor | None
    """None: there are no local crops."""
    global_draws: Draws
    local_draws: Draws

    @property
    def batches(self) -> list[Tensor]:
        """The views of each size, the global ones first."""
        return [self.global_GBCHW] if self.local_LBChw is None else [self.global_GBCHW, self.local_LBChw]

    @property
    def draws(self) -> list[Draws]:
        """The randomness of each of these."""
        return [self.global_draws, self.local_draws][: len(self.batches)]


class MultiCrop:
    """Makes views of images.

    Args:
        compiled: does it as compiled programs, one for each size; None: step by step.
    """

    def __init__(
        self,
        crops: CropsConfig,
        dataset: Dataset,
        seed: int,
        device: torch.device,
        *,
        compiled: CompiledPipeline | None = None,
    ) -> None:
        self._num_local, self._seed, self._compiled = crops.num_local, torch.tensor(seed, device=device), compiled
        self._global = _pipeline(global_augmentations(crops), dataset, device)
        # Local crops have one setting, so they are samples of one cell.
        self._local = _pipeline([local_augmentations(crops)], dataset, device) if crops.num_local else None

    def __call__(self, images_BCHW: Tensor, index_B: Tensor, epoch: Tensor | int) -> Views:
        """Normalised views of uint8 images at these positions of the data set."""
        index_VB = self._index(index_B)
        global_draws = self._draws(index_VB[:NUM_GLOBAL], epoch)
        local_draws = self._draws(index_VB[NUM_GLOBAL:], epoch)
        global_GBCHW = self._made(self._global, images_BCHW.expand(NUM_GLOBAL, *images_BCHW.shape), global_draws)
        local_LBChw = None
        if self._local is not None:
            repeated = images_BCHW.repeat(self._num_local, 1, 1, 1).unsqueeze(0)
            in_one_cell = replace(local_draws, seed_K=local_draws.seed_K[:1], index_KB=local_draws.index_KB.view(1, -1))
            made = self._made(self._local, repeated, in_one_cell)[0]
            local_LBChw = made.unflatten(0, (self._num_local, -1))
        return Views(global_GBCHW, local_LBChw, global_draws, local_draws)

    def _made(self, pipeline: Pipeline, images_KBCHW: Tensor, draws: Draws) -> Tensor:
        no_labels = torch.zeros_like(draws.index_KB)
        if self._compiled is None:
            return pipeline(images_KBCHW, no_labels, draws)[0]
        return self._compiled(pipeline, images_KBCHW.contiguous(), no_labels, draws)[0]

    def _index(self, index_B: Tensor) -> Tensor:
        """A number for every view of every image: [V, B]."""
        num_views = NUM_GLOBAL + self._num_local
        return index_B * num_views + torch.arange(num_views, device=index_B.device).unsqueeze(-1)

    def _draws(self, index_VB: Tensor, epoch: Tensor | int) -> Draws:
        step = torch.zeros((), dtype=torch.int64, device=index_VB.device)  # nothing here is drawn for a whole batch
        return Draws(self._seed.expand(len(index_VB)), step + epoch, step, index_VB)


def global_augmentations(crops: CropsConfig) -> list[list[Augmentation]]:
    """Of the first and of the second global crop."""
    crop = ResizedCrop(min_area=crops.min_global_area)
    return [
        [crop, *_colours(crops), GaussianBlur(p=crops.blur_first_p, max_sigma=crops.max_sigma)],
        [
            crop,
            *_colours(crops),
            GaussianBlur(p=crops.blur_second_p, max_sigma=crops.max_sigma),
            Solarize(p=crops.solarize_second_p),
        ],
    ]


def local_augmentations(crops: CropsConfig) -> list[Augmentation]:
    """Of each local crop."""
    crop = ResizedCrop(size=crops.local_size, min_area=crops.min_local_area, max_area=crops.max_local_area)
    return [crop, *_colours(crops), GaussianBlur(p=crops.blur_local_p, max_sigma=crops.max_sigma)]


def _colours(crops: CropsConfig) -> list[Augmentation]:
    jitter = ColorJitter(
        p=crops.jitter_p,
        brightness=crops.brightness,
        contrast=crops.contrast,
        saturation=crops.saturation,
        hue=crops.hue,
    )
    return [HorizontalFlip(), jitter, RandomGrey(p=crops.grey_p)]


def _pipeline(cells: Sequence[Sequence[Augmentation]], dataset: Dataset, device: torch.device) -> Pipeline:
    return Pipeline.stack(cells, num_classes=1, mean=dataset.mean, std=dataset.std, device=device)
