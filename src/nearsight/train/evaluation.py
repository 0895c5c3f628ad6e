"""Loss and accuracy of every cell on the same images: like a step, a program that finds its place by itself.

Shape suffixes: K cells, B samples, E batches, N images, C channels or classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import normalize
from nearsight.data import DeviceImages
from nearsight.train.capture import Advance, captured
from nearsight.train.processes import Processes
from nearsight.train.stacked import Weights, stacked_forward

_LARGEST_BATCH = 512


class Evaluation:
    """Cells of a stack on some images, without augmentation or smoothing."""

    def __init__(
        self,
        skeleton: nn.Module,
        weights: Weights,
        images: DeviceImages,
        index_N: Tensor,
        mean_C: Tensor,
        std_C: Tensor,
        *,
        reduced: bool,
        processes: Processes | None = None,
    ) -> None:
        """`weights` are looked at anew in every run. `processes` are those that share the images, if several do."""
        self.processes, self.num_of_all = processes or Processes(), len(index_N)
        index_N = self.processes.share(index_N)
        self.skeleton, self.weights, self.images, self.reduced = skeleton, weights, images, reduced
        self.mean_C, self.std_C = mean_C, std_C
        device, num_cells = images.device, len(next(iter(weights.values())))
        self.batch_size = min(_LARGEST_BATCH, len(index_N))
        num_batches = -(-len(index_N) // self.batch_size)
        # Every batch is whole, as a captured graph wants it: the last one is filled up with images that do not count.
        self.index_EB = torch.zeros(num_batches, self.batch_size, dtype=index_N.dtype, device=device)
        self.index_EB.view(-1)[: len(index_N)] = index_N
        self.num_images = len(index_N)
        """Of this process."""
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss_K = torch.zeros(num_cells, dtype=torch.float64, device=device)
        self.correct_K = torch.zeros(num_cells, dtype=torch.int64, device=device)
        self._advance: Advance | None = None

    def __call__(self) -> tuple[list[float], list[float]]:
        """(mean cross-entropy, accuracy) of every cell."""
        for tensor in self._state:
            tensor.zero_()
        with _in_eval_mode(self.skeleton):
            self._run()
        loss_K, correct_K = self.processes.summed([self.loss_K, self.correct_K])
        return (loss_K / self.num_of_all).tolist(), (correct_K.double() / self.num_of_all).tolist()

    def capture(self) -> None:
        """Run as a graph from now on, where there are graphs; worth it if it runs more than once."""
        if self.images.resident and self.images.device.type == "cuda":
            with _in_eval_mode(self.skeleton):
                self._advance = captured(self._next, self._state, self.images.device)

    def _run(self) -> None:
        if self.images.resident:
            advance = self._advance or self._next
            for _ in self.index_EB:
                advance()
        else:
            for batch in self.images.stream(self.images.positions(self.index_EB)):
                self._next(batch)

    @property
    def _state(self) -> list[Tensor]:
        return [self.number, self.loss_K, self.correct_K]

    @torch.no_grad()
    def _next(self, batch: tuple[Tensor, Tensor] | None = None) -> None:
        index_B = self.index_EB.index_select(0, self.number)[0]
        images_BCHW, labels_B = batch or (self.images.gather(index_B), self.images.labels(index_B))
        normal = normalize(images_BCHW, self.mean_C, self.std_C)
        num_cells = len(self.loss_K)
        images_KBCHW = normal.expand(num_cells, *normal.shape)
        logits_KBC = stacked_forward(self.skeleton, self.weights, images_KBCHW, reduced=self.reduced)
        labels_KB = labels_B.expand(num_cells, -1)
        position_B = self.number * self.batch_size + torch.arange(self.batch_size, device=index_B.device)
        counts_B = position_B < self.num_images
        losses_KB = F.cross_entropy(logits_KBC.movedim(-1, 1), labels_KB, reduction="none")
        self.loss_K += (losses_KB.double() * counts_B).sum(-1)
        self.correct_K += ((logits_KBC.argmax(-1) == labels_KB) & counts_B).sum(-1)
        self.number += 1


@contextmanager
def _in_eval_mode(skeleton: nn.Module) -> Iterator[None]:
    """Batch norms then use their running statistics, and leave them as they are."""
    training = skeleton.training
    try:
        skeleton.eval()
        yield
    finally:
        skeleton.train(training)
