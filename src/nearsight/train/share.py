"""What one of several processes does of a step: its samples of every batch, and those that they are mixed with.

Batches and random numbers are functions of the seed, the epoch and a sample's place in the data set, so every process
knows them all and makes its own samples by itself. CutMix and Mixup pair samples of the whole batch: a process also
augments the partners of its own, which doubles what it augments, and forgets them after the mixing.

Shape suffixes: K cells, B samples of a batch, S steps, R samples that a process augments, C classes.
"""

from typing import cast

import torch
from torch import Tensor

from nearsight.augment import Augmentation, Pipeline
from nearsight.augment.base import Batch, Cells, Stage
from nearsight.augment.mixing import permutation_of
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError
from nearsight.randomness import Draws, uniform
from nearsight.train.processes import Processes


class Share:
    """A process's part of batches of one size."""

    def __init__(self, processes: Processes, batch_size: int) -> None:
        if batch_size < processes.num:
            raise InputError(
                f"{processes.num} processes cannot share a batch of {batch_size} images; start fewer, or choose a "
                "larger --protocol.batch-size"
            )
        self._processes = processes
        self._own = processes.share(torch.arange(batch_size))
        self._weight = len(self._own) / batch_size

    @property
    def num_samples(self) -> int:
        return len(self._own)

    def pipeline(self, whole: Pipeline) -> Pipeline:
        """The same augmentations, for samples in the order of `needed`; only the process's own come out right."""
        distance = self.num_samples * 2 ** len(_mixing(whole))
        stages = []
        for kind, cells in whole.stages:
            if kind.stage is Stage.MIXING:
                distance //= 2
                kind = _paired(kind, distance)
            stages.append((kind, cells))
        return Pipeline(tuple(stages), whole.num_classes, whole.mean_C, whole.std_C)

    def needed(self, pipeline: Pipeline, seed_K: Tensor, epoch_K: Tensor, index_SKB: Tensor) -> Tensor:
        """Positions in the data set of what the process augments in every step, [S, K, R]: its own samples, then their
        partners in the last mixing, then the partners of all these in the one before, and so on."""
        place_SKR = self._own.to(index_SKB.device).expand(*index_SKB.shape[:2], -1)
        for kind in reversed(_mixing(pipeline)):
            draw_SKB1 = uniform(seed_K.unsqueeze(-1), _stream(kind), epoch_K.unsqueeze(-1), index_SKB, 1)
            partner_SKB = permutation_of(draw_SKB1.squeeze(-1))
            place_SKR = torch.cat((place_SKR, partner_SKB.gather(-1, place_SKR)), dim=-1)
        return index_SKB.gather(-1, place_SKR)

    def own(self, images_KRCHW: Tensor, targets_KRC: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Draws]:
        """The process's own samples, without the partners."""
        num = self.num_samples
        own_draws = Draws(draws.seed_K, draws.epoch, draws.step, draws.index_KB[:, :num])
        return images_KRCHW[:, :num], targets_KRC[:, :num], own_draws

    def weighted(self, loss_K: Tensor) -> Tensor:
        """A mean over the process's samples as its part of the mean over the batch: these add up to it."""
        return loss_K * self._weight

    def sum_(self, gradient_KP: Tensor) -> None:
        """Make a gradient of the process's part that of the batch, in place."""
        self._processes.sum_(gradient_KP)


def _mixing(pipeline: Pipeline) -> list[type[Augmentation]]:
    return [kind for kind, _ in pipeline.stages if kind.stage is Stage.MIXING]


def _stream(kind: type[Augmentation]) -> str:
    """The draws by which a mixing chooses partners."""
    return f"{kind.name}.partner"


def _paired(kind: type[Augmentation], distance: int) -> type[Augmentation]:
    """The augmentation, but the first `distance` samples are mixed with those that come so many places later."""

    def apply(batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        num_cells, num_samples = batch.images_KBCHW.shape[:2]
        place_R = torch.arange(num_samples, device=batch.images_KBCHW.device)
        partner_R = torch.where(place_R < distance, place_R + distance, place_R - distance)
        partner_R = torch.where(place_R < 2 * distance, partner_R, place_R)
        # Partners are the order of the draws, and a permutation that swaps two blocks is the order of itself.
        draw_KR1 = partner_R.to(torch.float32).expand(num_cells, -1).unsqueeze(-1)
        return kind.apply(batch, cells, Drawn(drawn.sample | {_stream(kind): draw_KR1}, drawn.batch))

    return cast("type[Augmentation]", type(kind.__name__, (kind,), {"apply": staticmethod(apply)}))
