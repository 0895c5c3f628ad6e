"""Augmentation of any number of cells as one compiled program.

Step by step a pipeline is hundreds of small operations, and a GPU spends its time on starting them. Compiled they are
fused, and the program may be captured in a CUDA graph: shapes never depend on the draws, nothing comes from the host.
The program does not depend on K, so a stack that loses cells goes on with the one it has. One cell alone has a program
of its own, and so has every other batch size, image size and set of augmentations.

Made for GPUs. On a CPU the pipeline itself is faster, because there it leaves out work that no image needs.

Shape suffixes: K cells, B samples, C channels (images) or classes (targets), H rows, W columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearsight.augment.pipeline import Pipeline
from nearsight.augment.smoothing import smooth_targets
from nearsight.randomness import Draws

_MOST_PROGRAMS = 256
"""torch refuses to compile one function more than 8 times; a study may meet more sizes and sets of augmentations."""


class CompiledPipeline:
    """Calls pipelines, compiled. Objects share their programs, so that one per stack or one for all is the same."""

    def __init__(self, *, backend: str | Callable[..., Any] = "inductor") -> None:
        self._program = torch.compile(_augmented, backend=backend, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def __call__(
        self,
        pipeline: Pipeline,
        images_KBCHW: Tensor,
        labels_KB: Tensor,
        draws: Draws,
        smoothing_K: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `pipeline` returns, its targets smoothed where `smoothing_K` is given.

        Marks the first axis of the tensors with K cells as dynamic, which other compiled functions will see too.
        """
        pipeline.check(images_KBCHW)  # here, because a compiled program cannot say what is wrong
        for tensor in (images_KBCHW, labels_KB, draws.seed_K, draws.epoch, draws.index_KB, smoothing_K):
            _mark(tensor)
        for _, cells in pipeline.stages:
            for tensor in cells.numbers.values():
                _mark(tensor)
        with torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS):
            return self._program(pipeline, images_KBCHW, labels_KB, draws, smoothing_K)


def _mark(tensor: Tensor | None) -> None:
    if tensor is not None and tensor.ndim > 0:  # an epoch that is the same for all cells has no axis
        # "maybe", because a single cell is compiled for that number; to insist would be an error then.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _augmented(
    pipeline: Pipeline, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws, smoothing_K: Tensor | None
) -> tuple[Tensor, Tensor]:
    images_KBCHW, targets_KBC = pipeline(images_KBCHW, labels_KB, draws)
    return images_KBCHW, targets_KBC if smoothing_K is None else smooth_targets(targets_KBC, smoothing_K)
