"""Training the head: frozen features of crops, cross-entropy of pixels, AdamW; it can end and go on after any step.

Shape suffixes: B images, C channels, K classes, H rows, W columns, L labels of masks.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.configuration import decode
from nearsight.data.segmentation import IGNORED
from nearsight.errors import InputError
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.crops import TrainingCrops
from nearsight.probe.segmentation.head import new_head, one_cycle, pixel_logits, pixel_loss
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train.runner import TrainingError

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
    """A head, its optimiser, and how far they are."""

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

    def train(self, crops: TrainingCrops, features: Features, after_step: Callable[[], None]) -> None:
        """All steps that are left. `after_step` may end it by an error; what was done until then stands."""
        self.head.train()
        batches = crops.batches(self.steps_done, self._device)
        try:
            for images_BCHW, masks_BHW in batches:
                self._step(features(images_BCHW), masks_BHW)
                after_step()
        finally:
            batches.close()  # type: ignore[attr-defined]  # ends its threads now
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
        """Be where `save` was called."""
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
