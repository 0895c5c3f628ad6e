"""The augmentations of K cells as one program: uint8 images and labels in, normalised images and targets out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells
from nearsight.augment.streams import Drawn
from nearsight.augment.threads import threads_for
from nearsight.errors import InputError
from nearsight.randomness import Draws


def normalize(images: Tensor, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """Grey levels [..., C, H, W] to zero mean and unit deviation, float32; means and deviations in grey levels."""
    # In place on the copy: on a CPU, fresh memory for every step costs more than the arithmetic.
    copy = images.to(torch.float32, copy=True)
    return copy.sub_(mean_C[:, None, None]).div_(std_C[:, None, None])


def grey_levels(per_channel: Sequence[float], device: torch.device) -> Tensor:
    """Channel means or deviations of images in [0, 1], as data sets publish them, in grey levels."""
    return torch.tensor(per_channel, device=device) * 255


@dataclass(frozen=True)
class Pipeline:
    """The augmentation lists of K cells, merged. Cells may differ in what they have and how strong it is."""

    stages: tuple[tuple[type[Augmentation], Cells], ...]
    num_classes: int
    mean_C: Tensor
    std_C: Tensor

    @classmethod
    def stack(
        cls,
        cells: Sequence[Sequence[Augmentation]],
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
    ) -> "Pipeline":
        """`mean` and `std` are per channel, for images scaled to [0, 1], as data sets publish them."""
        stages = []
        for kind in _merged_order([[type(augmentation) for augmentation in cell] for cell in cells]):
            configs = [next((a for a in cell if type(a) is kind and not a.is_idle), None) for cell in cells]
            if any(config is not None for config in configs):
                stages.append((kind, kind.stack(configs, device)))
        return cls(tuple(stages), num_classes, grey_levels(mean, device), grey_levels(std, device))

    def select(self, keep: Tensor) -> "Pipeline":
        """The pipeline of the cells with these positions."""
        stages = tuple((kind, cells.select(keep)) for kind, cells in self.stages)
        return Pipeline(stages, self.num_classes, self.mean_C, self.std_C)

    def __call__(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Normalised float32 images [K, B, C, H, W] and target distributions [K, B, classes]."""
        _check_grey_levels(images_KBCHW)
        if torch.compiler.is_compiling():
            return self._augmented(images_KBCHW, labels_KB, draws)
        with threads_for(images_KBCHW):
            return self._augmented(images_KBCHW, labels_KB, draws)

    def check(self, images_KBCHW: Tensor) -> None:
        """Refuse images that are not grey levels as they are stored, or too small for an augmentation."""
        _check_grey_levels(images_KBCHW)
        self._num_draws(images_KBCHW.shape[-3:])

    def _augmented(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        drawn = Drawn.of(draws, *self._num_draws(images_KBCHW.shape[-3:]))
        targets_KBC = F.one_hot(labels_KB, self.num_classes).to(torch.float32)
        batch = Batch(images_KBCHW, targets_KBC, self.mean_C, self.std_C)
        for kind, cells in self.stages:
            batch = kind.apply(batch, cells, drawn)
        return normalize(batch.images_KBCHW, self.mean_C, self.std_C), batch.targets_KBC

    def _num_draws(self, shape_CHW: torch.Size) -> tuple[dict[str, int], dict[str, int]]:
        """Stream → how many draws all stages together need per sample, and per batch."""
        sample_nums: dict[str, int] = {}
        batch_nums: dict[str, int] = {}
        for kind, cells in self.stages:
            sample_nums |= kind.sample_draws(cells, shape_CHW)
            batch_nums |= kind.batch_draws(cells)
            shape_CHW = kind.output_shape(cells, shape_CHW)
        return sample_nums, batch_nums


def _check_grey_levels(images_KBCHW: Tensor) -> None:
    if images_KBCHW.dtype != torch.uint8:
        raise InputError(
            f"the images are {images_KBCHW.dtype}, but augmentations take grey levels 0…255 as torch.uint8; give "
            "them as they are stored, neither scaled nor normalised"
        )


def _merged_order(lists: Sequence[Sequence[type[Augmentation]]]) -> list[type[Augmentation]]:
    """One order that keeps the order of every list: repeatedly take a head that is not further down another list."""
    for kinds in lists:
        if len(set(kinds)) < len(kinds):
            raise InputError(f"an augmentation is listed twice: {', '.join(kind.name for kind in kinds)}")
    remaining = [list(kinds) for kinds in lists if kinds]
    order: list[type[Augmentation]] = []
    while remaining:
        heads = dict.fromkeys(kinds[0] for kinds in remaining)
        free = [head for head in heads if not any(head in kinds[1:] for kinds in remaining)]
        if not free:
            raise InputError(f"cells of one stack apply {', '.join(h.name for h in heads)} in different orders")
        first = min(free, key=lambda kind: kind.stage)
        order.append(first)
        remaining = [kept for kinds in remaining if (kept := [kind for kind in kinds if kind is not first])]
    return order
