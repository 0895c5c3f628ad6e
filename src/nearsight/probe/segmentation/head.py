"""The head on frozen features: what it is, how it is trained, and how it is tested (S2 App. A).

Training is cross-entropy of the pixels of crops, by AdamW; it can end and go on after any step. Testing is on whole
images, each at the config's scale and scored at its own size.

Shape suffixes: B images of a batch, N of a set, C channels of the features (of a confusion: classes), K classes,
L labels of masks, h rows and w columns of patches, H and W of pixels.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from nearsight.configuration import decode
from nearsight.data.segmentation import IGNORED, MaskedImages
from nearsight.errors import InputError
from nearsight.metrics.segmentation import confusion_matrix
from nearsight.probe.scores import image_counts
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.randomness import seeded
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train.runner import TrainingError

_START_DIVISOR, _END_DIVISOR = 25.0, 1e4
"""What the one-cycle schedule starts at, as part of its peak, and ends at, as part of its start; PyTorch's defaults."""


class SegmentationHead(nn.Sequential):
    """1×1 convolution, GroupNorm over all channels, GELU, 1×1 classifier: a class for each patch."""

    def __init__(self, num_features: int, num_classes: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(num_features, width, kernel_size=1),
            nn.GroupNorm(1, width),
            nn.GELU(),
            nn.Conv2d(width, num_classes, kernel_size=1),
        )


def new_head(num_features: int, num_classes: int, config: SegmentConfig) -> SegmentationHead:
    """A head with the initial weights of the config's seed, whatever the state of the global generator."""
    with seeded(config.seed):
        return SegmentationHead(num_features, num_classes, config.width)


def pixel_logits(head: nn.Module, features_BChw: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, K, H, W]: each pixel's logits lie between those of the patches around it."""
    return F.interpolate(head(features_BChw), size=size, mode="bilinear", align_corners=False)


def pixel_loss(logits_BKHW: Tensor, masks_BHW: Tensor, ignore_index: int, num_pixels: Tensor) -> Tensor:
    """Cross-entropy of the pixels with a class, as their part of the mean over `num_pixels` of them.

    Without such pixels it is 0, not NaN.
    """
    total = F.cross_entropy(logits_BKHW, masks_BHW, ignore_index=ignore_index, reduction="sum")
    return total / num_pixels.clamp(min=1)


def one_cycle(step: int, config: SegmentConfig) -> float:
    """The learning rate of a step (from 0): up to the peak and down again in two straight lines.

    `torch.optim.lr_scheduler.OneCycleLR` with its own constants, as a function of the step alone.
    """
    peak_at, last = config.rising * config.iterations - 1, config.iterations - 1
    start = config.lr / _START_DIVISOR
    if step <= peak_at:
        return start + (config.lr - start) * (step / peak_at if peak_at > 0 else 1.0)
    done = (step - peak_at) / (last - peak_at) if last > peak_at else 1.0
    return config.lr + (start / _END_DIVISOR - config.lr) * done


NUM_ROWS = 100
"""Lines of the history of a whole training, about."""

LOGITS_AT_ONCE = 2**27
"""Of all pixels and classes. A whole batch of ADE20K has ten times as many, 5 GB that four tensors would each need."""
NUM_LABELS = IGNORED + 1
"""Of a mask: classes, unused numbers, and the one to ignore."""

Features = Callable[[Tensor], Tensor]
"""Crops or images [B, 3, H, W] uint8 → features [B, C, h, w] without gradients."""


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """A line of history.csv."""

    iteration: int
    """Steps done, from 1."""
    loss: float
    """Mean over the steps since the line before."""
    lr: float


class HeadTraining:
    """A head, its optimiser, and how many steps are done."""

    def __init__(
        self, num_features: int, num_classes: int, ignore_index: int, config: SegmentConfig, device: torch.device
    ) -> None:
        self.config, self._device = config, device
        self._num_classes, self._ignore_index = num_classes, ignore_index
        self.head: nn.Module = new_head(num_features, num_classes, config).to(device)
        self._optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.steps_done = 0
        self.history: list[LossRow] = []
        self._loss_since = torch.zeros((), device=device, dtype=torch.float64)
        self.seen_L = torch.zeros(NUM_LABELS, device=device, dtype=torch.bool)
        """Which labels were in crops so far."""

    def train(
        self, batches: Iterable[tuple[Tensor, Tensor]], features: Features, after_step: Callable[[], object]
    ) -> None:
        """All steps that are left, a batch of images and masks for each.

        `after_step` may end it by an error; the steps done until then are kept.
        """
        self.head.train()
        for images_BCHW, masks_BHW in batches:
            self._step(features(images_BCHW), masks_BHW)
            after_step()
        self.head.eval()

    @torch.enable_grad()
    def _step(self, features_BChw: Tensor, masks_BHW: Tensor) -> None:
        lr = one_cycle(self.steps_done, self.config)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        rows, columns = masks_BHW.shape[1:]
        num_pixels = (masks_BHW != self._ignore_index).sum()
        at_once = max(1, LOGITS_AT_ONCE // (self._num_classes * rows * columns))
        for part_BChw, part_BHW in zip(features_BChw.split(at_once), masks_BHW.split(at_once), strict=True):
            logits_BKHW = pixel_logits(self.head, part_BChw, (rows, columns))
            loss = pixel_loss(logits_BKHW, part_BHW, self._ignore_index, num_pixels)
            loss.backward()
            self._loss_since += loss.detach()
        self._optimizer.step()
        self.steps_done += 1
        self.seen_L.index_fill_(0, masks_BHW.flatten(), True)
        every = max(1, self.config.iterations // NUM_ROWS)
        if self.steps_done % every == 0 or self.steps_done == self.config.iterations:
            self._note(lr)

    def _note(self, lr: float) -> None:
        before = self.history[-1].iteration if self.history else 0
        loss = float(self._loss_since) / (self.steps_done - before)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of the head became {loss} by iteration {self.steps_done}; try a lower --lr")
        self.history.append(LossRow(iteration=self.steps_done, loss=loss, lr=lr))
        self._loss_since.zero_()

    def save(self, path: Path, identity: str) -> None:
        """Everything that is needed to go on, in one file."""
        tensors = {f"head.{name}": weight for name, weight in self.head.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
        tensors |= {"loss_since": self._loss_since, "seen": self.seen_L}
        rows = [asdict(row) for row in self.history]
        save_tensors(path, tensors, {"identity": identity, "steps_done": self.steps_done, "history": rows})

    def load(self, path: Path, identity: str) -> None:
        """Restore the state that `save` wrote."""
        tensors, stored = load_tensors(path)
        if stored.get("identity") != identity:
            raise InputError(f"{path} belongs to probe {stored.get('identity')}, not {identity}; choose another --out")
        self.head.load_state_dict(
            {name.removeprefix("head."): value for name, value in tensors.items() if name.startswith("head.")}
        )
        states: dict[int, dict[str, Any]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                states.setdefault(int(number), {})[key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        self._loss_since.copy_(tensors["loss_since"])
        self.seen_L.copy_(tensors["seen"])
        self.steps_done = stored["steps_done"]
        self.history = [decode(LossRow, row, f"{path} history") for row in stored["history"]]


def whole_size(size: tuple[int, int], config: SegmentConfig, step: int) -> tuple[int, int]:
    """(rows, columns) at which an image of this size is tested: at the config's scale, rounded to multiples of `step`.

    Squeezing by less than half a patch needs no padding, about which a model knows nothing.
    """
    if config.square:
        return config.crop, config.crop
    factor = min(config.longest / max(size), config.shortest / min(size))
    rows, columns = (max(step, round(side * factor / step) * step) for side in size)
    return rows, columns


class Prediction(NamedTuple):
    """An image, its mask and the prediction of a head."""

    image_CHW: Tensor
    """uint8, at its own size."""
    truth_HW: Tensor
    prediction_HW: Tensor
    """On the device of the head; the others are where they were read."""


class Tester:
    """Predicts the classes of all pixels of whole images."""

    def __init__(
        self,
        images: MaskedImages,
        features: Features,
        head: nn.Module,
        config: SegmentConfig,
        *,
        step: int,
    ) -> None:
        self._images, self._features, self._head, self._config, self._step = images, features, head, config, step
        self.kept: Callable[[int], Tensor | None] = lambda _: None
        """The features of the image in a place [1, C, h, w], where they are known."""

    def predictions(self, indices: Sequence[int], device: torch.device) -> Iterator[Prediction]:
        """In the order of `indices`; images are read and resized in threads, some ahead of the model."""
        num_threads = os.cpu_count() or 1
        waiting: deque[tuple[int, Future[tuple[Tensor, Tensor, Tensor]]]] = deque()
        with ThreadPoolExecutor(num_threads) as threads:
            try:
                for index in indices:
                    waiting.append((index, threads.submit(self.prepared, index)))
                    if len(waiting) > 2 * num_threads:
                        yield self._predicted(*waiting.popleft(), device)
                while waiting:
                    yield self._predicted(*waiting.popleft(), device)
            finally:
                threads.shutdown(cancel_futures=True)

    def prepared(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(the image, its mask, the image as the model gets it)."""
        image_CHW, truth_HW = self._images[index]
        rows, columns = whole_size((image_CHW.shape[1], image_CHW.shape[2]), self._config, self._step)
        picture = Image.fromarray(image_CHW.permute(1, 2, 0).numpy())
        resized_HWC = np.asarray(picture.resize((columns, rows), Image.Resampling.BILINEAR))
        return image_CHW, truth_HW, torch.from_numpy(resized_HWC.transpose(2, 0, 1).copy())

    @torch.no_grad()
    def _predicted(
        self, index: int, prepared: Future[tuple[Tensor, Tensor, Tensor]], device: torch.device
    ) -> Prediction:
        image_CHW, truth_HW, resized_CHW = prepared.result()
        kept = self.kept(index)
        features = self._features(resized_CHW.unsqueeze(0).to(device)) if kept is None else kept.to(device)
        rows, columns = truth_HW.shape
        labels_HW = pixel_logits(self._head, features, (rows, columns)).argmax(1)[0]
        return Prediction(image_CHW, truth_HW, labels_HW)

    def confusion(
        self, num_classes: int, ignore_index: int, device: torch.device, after_image: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """The confusion matrix of all images [C, C] and the `image_counts` of each [N, 3, C], int64 on the CPU.

        `after_image` is called with the number of images done.
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
