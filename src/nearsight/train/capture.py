"""Programs as CUDA graphs: launched as a whole, with nothing for the host to do in between."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed
from torch import Tensor

Advance = Callable[[], None]
"""Does the next piece of work; where it is, is on the device."""

_NUM_WARM_UPS = 2


def captured(program: Advance, state: Sequence[Tensor], device: torch.device) -> Advance:
    """`program` as one graph. `state` is what it changes; that is left as it was.

    Kernels are compiled and libraries find their memory while it warms up, neither of which a graph can hold.
    """
    with torch.cuda.device(device):
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                program()
                # Each time: there may be only one piece of work, and none to go on to.
                _put_back(state, before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Where processes talk, a thread of their library watches over it, and must not be taken for part of this.
        mode = "thread_local" if torch.distributed.is_initialized() else "global"
        with torch.cuda.graph(graph, capture_error_mode=mode):
            program()
        replay: Advance = graph.replay
        return replay


def _put_back(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
