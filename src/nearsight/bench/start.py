"""How long it takes from the start of a process to its first training step, cold and then again.

Before a GPU trains, libraries are imported, augmentations and kernels are compiled and a step is captured. What is
compiled is kept in the user's cache, by torch and Triton, which know their versions and the device: a second process
finds it there. Here each number of cells has an empty cache first, and then the one that the first process left.

Training is the real engine's, by the Modern protocol, on made-up images of CIFAR's size. On a CPU nothing is compiled,
so that both starts take the same.

    nearsight bench start --device cuda
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nearsight.bench.costs import check_counts, wait_for
from nearsight.bench.train import cifar_like
from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, modern
from nearsight.train.engine import Stack


@dataclass(frozen=True, kw_only=True)
class StartRow:
    """One process: seconds since it was started."""

    what: str
    """cold: with an empty cache; again: with what the cold one left there."""
    num_cells: int
    imported: float
    """When the engine's modules were there."""
    ready: float
    """When data and models lay on the device."""
    first_step: float
    """When the first step was done, and with it all that is compiled and captured."""


def bench_start(
    *, device: str, num_cells: Sequence[int] | None = None, batch_size: int = 128, model: ModelConfig | None = None
) -> list[StartRow]:
    """Two processes for each number of cells that train at once: 1 and 24 by default on a GPU, and 1 elsewhere."""
    if num_cells is None:
        num_cells = (1, 24) if torch.device(device).type == "cuda" else (1,)
    check_counts("num_cells", num_cells)
    check_counts("batch_size", [batch_size])
    config = RunConfig(
        model=model or ModelConfig(),
        data=DataConfig(name="cifar100"),
        protocol=dataclasses.replace(modern(), batch_size=batch_size),
        precision="bf16" if torch.device(device).type == "cuda" else "fp32",
    )
    rows = []
    for cells in num_cells:
        asked = [device, cells, config.to_json()]
        with tempfile.TemporaryDirectory(prefix="nearsight-bench-") as folder:
            rows += [_process(what, cells, asked, Path(folder)) for what in ("cold", "again")]
    return rows


def _process(what: str, num_cells: int, asked: list[Any], cache: Path) -> StartRow:
    places = {
        "TORCHINDUCTOR_CACHE_DIR": cache / "inductor",
        "TRITON_CACHE_DIR": cache / "triton",
        "CUDA_CACHE_PATH": cache / "cuda",
    }
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}}
    began = time.time()  # a clock that the other process reads, too
    reached = cache / "reached.json"
    command = [sys.executable, "-m", "nearsight.bench.start", json.dumps([*asked, str(reached)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(f"a process that trains {num_cells} cells did not start: {reason}")
    times = json.loads(reached.read_text(encoding="utf-8"))
    return StartRow(what=what, num_cells=num_cells, **{name: moment - began for name, moment in times.items()})


def _until_the_first_step(asked: str) -> None:
    """In a process of its own: write down what was reached when, by the clock."""
    times = {"imported": time.time()}
    device, num_cells, config, path = json.loads(asked)
    where, config = torch.device(device), RunConfig.from_json(config, "the benchmark")
    configs = [dataclasses.replace(config, seed=seed) for seed in range(num_cells)]
    stack = Stack.start(configs, cifar_like(10 * config.protocol.batch_size), where)

    def reached(name: str) -> None:
        if name not in times:
            wait_for(where)
            times[name] = time.time()

    reached("ready")
    stack.run_epoch(lambda step: reached("first_step"))
    write_text(Path(path), json.dumps(times))


def table(rows: Sequence[StartRow]) -> str:
    titles = f"{'seconds until':<14}{'cells':>6}{'imported':>10}{'ready':>8}{'first step':>12}"
    lines = [
        f"{row.what:<14}{row.num_cells:>6}{row.imported:>10.1f}{row.ready:>8.1f}{row.first_step:>12.1f}" for row in rows
    ]
    return "\n".join([titles, *lines])


if __name__ == "__main__":
    _until_the_first_step(sys.argv[1])
