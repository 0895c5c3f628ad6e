"""One of two processes that pretrain together: the test's own, and one that it starts from this file."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from nearsight.train.dino import DinoFolder, pretrain

_TIMEOUT = timedelta(seconds=120)


def pretrain_together(asked: Path, out: Path, meeting: Path, rank: int) -> None:
    """As the config in the folder `asked` says; both find each other at a file."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=_TIMEOUT
    )
    try:
        pretrain(DinoFolder(asked).read_config(), out)
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretrain_together(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
