"""Training crops: random scale, place, mirroring and colours, each a function of (seed, step, place in the batch).

So a crop is the same whatever thread makes it, after a resumption, and on any device. What is random, and how much, is
as in mmsegmentation's pipelines for ADE20K (RandomResize, RandomCrop, RandomFlip, PhotoMetricDistortion).

Shape suffixes: B crops, C channels, H rows, W columns.
"""

import itertools
import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearsight.augment.operations import Operation, apply_operations
from nearsight.data.segmentation import IGNORED, MaskedImages
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.randomness import permutation, uniform

_TRIES = 11
"""Places that are drawn for a crop: the first, and ten more where one class has too much of it."""
_COLOUR_DRAWS = 9
_BATCHES_AHEAD = 3
_ROOM = 2**30
"""Bytes; a small set fits, and decoding is most of what a small crop costs."""
# Strengths of mmsegmentation, as changes: factors less 1, and of the hue's circle (±18 of 180 steps). It permutes no
# channels.
_STRENGTHS = {
    Operation.BRIGHTNESS: (-0.125, 0.125),
    Operation.CONTRAST: (-0.5, 0.5),
    Operation.COLOR: (-0.5, 0.5),
    Operation.HUE: (-0.1, 0.1),
}
_PROBABILITY = 0.5

_Pixels = NDArray[np.uint8]
_Labels = NDArray[np.uint8]
_Window = tuple[int, int, int, int]
"""Left, top, right and bottom."""


class _Coming(NamedTuple):
    """A batch that threads are working on."""

    crops: Sequence[Future[tuple[_Pixels, _Labels]]]
    draws_Bn: Tensor


class TrainingCrops:
    """Batches of crops by step."""

    def __init__(
        self, images: MaskedImages, config: SegmentConfig, *, fill: tuple[float, ...], room: int = _ROOM
    ) -> None:
        """
        Args:
            fill: colour from 0 to 1 of what lies outside an image that is smaller than the crop.
            room: bytes of decoded images to keep. Every epoch needs all of them, so those that came first stay.
        """
        self._images, self._config = images, config
        self._fill = tuple(round(255 * channel) for channel in fill)
        self._seed = torch.tensor(config.seed)
        # The order of all images of an epoch is needed once per crop.
        self._order = lru_cache(maxsize=2)(self._new_order)
        self._kept: dict[int, tuple[Image.Image, _Labels]] = {}
        self._room, self._keeping = room, Lock()

    def batches(self, first_step: int, device: torch.device) -> Generator[tuple[Tensor, Tensor], None, None]:
        """(images [B, 3, H, W] uint8, masks [B, H, W] int64) of the steps from this one on, made in threads ahead."""
        steps = iter(range(first_step, self._config.iterations))
        waiting: deque[_Coming] = deque()
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow works without the interpreter lock
            try:
                waiting.extend(self._begin(step, threads) for step in itertools.islice(steps, _BATCHES_AHEAD))
                while waiting:
                    waiting.extend(self._begin(step, threads) for step in itertools.islice(steps, 1))
                    yield self._finished(waiting.popleft(), device)
            finally:
                threads.shutdown(cancel_futures=True)

    def _begin(self, step: int, threads: ThreadPoolExecutor) -> _Coming:
        draws_Bn = self.draws(step)
        each = enumerate(draws_Bn.tolist())
        crops = [threads.submit(self.crop, self.index(step, slot), own) for slot, own in each]
        return _Coming(crops, draws_Bn)

    def _finished(self, coming: _Coming, device: torch.device) -> tuple[Tensor, Tensor]:
        images, masks = zip(*(crop.result() for crop in coming.crops), strict=True)
        # By numpy, since torch's threads would keep spinning and slow down those that make crops; and bytes travel.
        images_BHWC, masks_BHW = (torch.from_numpy(np.stack(arrays)).to(device) for arrays in (images, masks))
        images_BCHW, masks_BHW = images_BHWC.permute(0, 3, 1, 2).contiguous(), masks_BHW.to(torch.int64)
        if self._config.photometric:
            images_BCHW = distorted(images_BCHW, coming.draws_Bn)
        return images_BCHW, masks_BHW

    def index(self, step: int, slot: int) -> int:
        """Which image the crop at this place of a step's batch is of: all images in turn, in a new order each time."""
        epoch, place = divmod(step * self._config.batch_size + slot, len(self._images))
        return self._order(epoch)[place]

    def _new_order(self, epoch: int) -> list[int]:
        seed_1, number = self._seed.unsqueeze(0), torch.tensor(epoch)
        order: list[int] = permutation(seed_1, "segmentation order", number, len(self._images))[0].tolist()
        return order

    def draws(self, step: int) -> Tensor:
        """The random numbers of a step's crops, [B, n]: colours, scale, mirroring, then two for each place to try."""
        slots = torch.arange(self._config.batch_size)
        return uniform(self._seed, "segmentation crops", torch.tensor(step), slots, _COLOUR_DRAWS + 2 + 2 * _TRIES)

    def crop(self, index: int, draws: Sequence[float]) -> tuple[_Pixels, _Labels]:
        """(image [H, W, 3], mask [H, W]) of the crop's size, without the change of colours."""
        scale, mirror, *places = draws[_COLOUR_DRAWS:]
        image, of_image_HW = self._read(index)
        size = self._scaled(image.size, scale)
        for down, right in zip(places[::2], places[1::2], strict=True):
            window = self._window(size, down, right)
            labels_HW = _cut_mask(of_image_HW, size, window)
            if self._is_mixed(labels_HW):
                break
        pixels_HWC = np.asarray(_cut_image(image, size, window))
        if mirror < self._config.flip:
            pixels_HWC, labels_HW = pixels_HWC[:, ::-1], labels_HW[:, ::-1]
        side, (rows, columns) = self._config.crop, labels_HW.shape
        filled_HWC = np.empty((side, side, 3), dtype=np.uint8)
        filled_HWC[:] = self._fill
        filled_HWC[:rows, :columns] = pixels_HWC
        mask_of_crop = np.full((side, side), IGNORED, dtype=np.uint8)
        mask_of_crop[:rows, :columns] = labels_HW
        return filled_HWC, mask_of_crop

    def _read(self, index: int) -> tuple[Image.Image, _Labels]:
        """(image, mask), decoded once where there is room."""
        held = self._kept.get(index)
        if held is None:
            image_CHW, mask_HW = self._images[index]
            held = Image.fromarray(image_CHW.permute(1, 2, 0).numpy()), mask_HW.numpy()
            num_bytes = image_CHW.numel() + mask_HW.numel()
            with self._keeping:
                if index not in self._kept and num_bytes <= self._room:
                    self._kept[index] = held
                    self._room -= num_bytes
        return held

    def _scaled(self, size: tuple[int, int], draw: float) -> tuple[int, int]:
        """(columns, rows) of the whole image after the random scale."""
        config = self._config
        factor = config.smallest_scale + draw * (config.largest_scale - config.smallest_scale)
        factor *= min(config.longest / max(size), config.shortest / min(size))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))

    def _window(self, size: tuple[int, int], down: float, right: float) -> _Window:
        """Where the crop is in the scaled image."""
        columns, rows = (min(self._config.crop, side) for side in size)
        left, top = int(right * (size[0] - columns + 1)), int(down * (size[1] - rows + 1))
        return left, top, left + columns, top + rows

    def _is_mixed(self, labels_HW: _Labels) -> bool:
        # Pillow counts bytes as they are; numpy makes integers of eight bytes of them first.
        counts = np.array(Image.fromarray(labels_HW).histogram()[:IGNORED])
        return bool(np.count_nonzero(counts) > 1 and counts.max() < self._config.largest_share * counts.sum())


def _cut_image(image: Image.Image, size: tuple[int, int], window: _Window) -> Image.Image:
    """A window of the image at another size; only that window is computed."""
    across, down = image.width / size[0], image.height / size[1]
    left, top, right, bottom = window
    # The last digit of a product may lie outside the image, which Pillow refuses.
    box = left * across, top * down, min(right * across, image.width), min(bottom * down, image.height)
    return image.resize((right - left, bottom - top), Image.Resampling.BILINEAR, box=box)


def _cut_mask(labels_HW: _Labels, size: tuple[int, int], window: _Window) -> _Labels:
    """The same window of its mask: each pixel gets the label at its centre."""
    left, top, right, bottom = window
    rows = ((np.arange(top, bottom) + 0.5) * labels_HW.shape[0] / size[1]).astype(np.int64)
    columns = ((np.arange(left, right) + 0.5) * labels_HW.shape[1] / size[0]).astype(np.int64)
    # One axis after the other takes a quarter of the time of both at once.
    cut_HW: _Labels = labels_HW[rows].take(columns, axis=1)
    return cut_HW


def distorted(images_BCHW: Tensor, draws_Bn: Tensor) -> Tensor:
    """Images with other brightness, contrast, saturation and hue, each with probability ½, contrast as often before
    saturation as at the end.

    The changes and their order are torchvision's `RandomPhotometricDistort`, the draws ours: for each change whether
    and how much, and when contrast's is due. All images at once, since on a GPU an operation costs its launch.
    """
    chance_B4, amount_B4 = draws_Bn[:, 0:8:2], draws_Bn[:, 1:8:2]
    least, most = (torch.tensor(ends, dtype=torch.float32) for ends in zip(*_STRENGTHS.values(), strict=True))
    change_B4 = (least + amount_B4 * (most - least)).to(images_BCHW.device)
    is_applied_B4 = chance_B4 < _PROBABILITY
    is_contrast_first_B = draws_Bn[:, 8] < _PROBABILITY
    brightness, contrast, saturation, hue = _STRENGTHS
    turns = (
        (brightness, is_applied_B4[:, 0], 0),
        (contrast, is_applied_B4[:, 1] & is_contrast_first_B, 1),
        (saturation, is_applied_B4[:, 2], 2),
        (hue, is_applied_B4[:, 3], 3),
        (contrast, is_applied_B4[:, 1] & ~is_contrast_first_B, 1),
    )
    black_C = torch.zeros(images_BCHW.shape[1], dtype=torch.uint8, device=images_BCHW.device)
    for operation, applied_B, column in turns:
        operation_B = torch.where(applied_B, operation.value, Operation.IDENTITY.value).to(images_BCHW.device)
        possible = frozenset({operation})
        images_BCHW = apply_operations(images_BCHW, operation_B, change_B4[:, column], black_C, possible)
    return images_BCHW
