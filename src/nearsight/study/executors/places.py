"""Where several processes of this machine work."""

import os

import torch


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def places(device: torch.device, workers: int | None) -> list[str]:
    """The device of each process: by default every GPU, or a CPU once per core."""
    if str(device) == "cuda":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [gpus[number % len(gpus)] for number in range(workers or len(gpus))]
    return [str(device)] * (workers or (num_cores() if device.type == "cpu" else 1))
