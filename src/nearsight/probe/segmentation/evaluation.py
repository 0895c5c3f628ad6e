"""Testing a head on whole images, each at the config's scale and scored at its own size.

Shape suffixes: N images, C classes, H rows, W columns.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from nearsight.data.segmentation import MaskedImages
from nearsight.metrics.segmentation import confusion_matrix
from nearsight.probe.bootstrap import image_counts
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import pixel_logits
from nearsight.probe.segmentation.sizes import whole_size
from nearsight.probe.segmentation.training import Features


class Prediction(NamedTuple):
    """An image, what is on it and what a head sees on it."""

    image_CHW: Tensor
    """uint8, at its own size."""
    truth_HW: Tensor
    prediction_HW: Tensor
    """On the device of the head; the others are where they were read."""


class Tester:
    """Predicts the classes of all pixels of whole images."""

    def __init__(
        self, images: MaskedImages, features: Features, head: nn.Module, config: SegmentConfig, *, step: int
    ) -> None:
        self._images, self._features, self._head, self._config, self._step = images, features, head, config, step

    def predictions(self, indices: Sequence[int], device: torch.device) -> Iterator[Prediction]:
        """In the order of `indices`; images are read and resized in threads, some ahead of the model."""
        num_threads = os.cpu_count() or 1
        waiting: deque[Future[tuple[Tensor, Tensor, Tensor]]] = deque()
        with ThreadPoolExecutor(num_threads) as threads:
            try:
                for index in indices:
                    waiting.append(threads.submit(self._prepared, index))
                    if len(waiting) > 2 * num_threads:
                        yield self._predicted(*waiting.popleft().result(), device)
                while waiting:
                    yield self._predicted(*waiting.popleft().result(), device)
            finally:
                threads.shutdown(cancel_futures=True)

    def _prepared(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(the image, its mask, the image as the model gets it)."""
        image_CHW, truth_HW = self._images[index]
        rows, columns = whole_size((image_CHW.shape[1], image_CHW.shape[2]), self._config, self._step)
        picture = Image.fromarray(image_CHW.permute(1, 2, 0).numpy())
        resized_HWC = np.asarray(picture.resize((columns, rows), Image.Resampling.BILINEAR))
        return image_CHW, truth_HW, torch.from_numpy(resized_HWC.transpose(2, 0, 1).copy())

    @torch.no_grad()
    def _predicted(self, image_CHW: Tensor, truth_HW: Tensor, resized_CHW: Tensor, device: torch.device) -> Prediction:
        features = self._features(resized_CHW.unsqueeze(0).to(device))
        rows, columns = truth_HW.shape
        labels_HW = pixel_logits(self._head, features, (rows, columns)).argmax(1)[0]
        return Prediction(image_CHW, truth_HW, labels_HW)

    def confusion(
        self, num_classes: int, ignore_index: int, device: torch.device, after_image: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """The confusion matrix of all images [C, C] and the `image_counts` of each [N, 3, C], int64 on the CPU.

        `after_image` is told how many are done.
        """
        total_CC = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        counts: list[Tensor] = []
        every = range(len(self._images))
        for done, (_, truth_HW, labels_HW) in enumerate(self.predictions(every, device), start=1):
            of_image_CC = confusion_matrix(labels_HW, truth_HW.to(device), num_classes, ignore_index)
            total_CC += of_image_CC
            counts.append(image_counts(of_image_CC))
            after_image(done)
        return total_CC.cpu(), torch.stack(counts).cpu()
