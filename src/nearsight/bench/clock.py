"""How long the steps of an epoch take, without making them slower."""

import time
from itertools import pairwise

import torch


class StepClock:
    """When the steps of an epoch end, as an `on_step` callback.

    On CUDA it records events on the device's own time line, to be read when the epoch is over: asking for the time
    there and then would make every step wait for the host, and the host's clock would only show when work was queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.events: list[torch.cuda.Event] = []
        self.times: list[float] = []

    def __call__(self, step: int) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From the end of each step to the end of the next; the device must be done."""
        if self.on_gpu:
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(self.events)]
        return [later - earlier for earlier, later in pairwise(self.times)]
