"""Training in two processes; apart from the tests, because a new process has to be able to import it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from locat_models import excite, plain_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nearsight import add_locat


def local_vit() -> Any:
    model = add_locat(plain_model("vit"))
    excite(model)
    return model.train()


def write_gradients(rank: int, batch: Tensor, folder: Path) -> None:
    """Each process takes every other image, and writes what both agree on."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    model = local_vit()
    parallel = DistributedDataParallel(model)
    parallel(batch[rank::2]).square().sum().backward()
    torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, folder / f"{rank}.pt")
    dist.destroy_process_group()
