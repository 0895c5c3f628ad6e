"""What GAug costs: attention with the Gaussian bias against plain attention, and a whole training step with LocAt.

Attention, forward and backward, three ways in one process: plain (`scaled_dot_product_attention`); `nearsight`, by its
fused kernels where there are some, else by plain torch a tile at a time; and dense, where the bias of all pairs is made
in memory and given to plain attention as its mask, and autograd finds the gradients of widths and strengths. Queries,
keys and values are as timm packs them. Gradients are by all inputs there are. Then a training step of a whole model by
AdamW in bfloat16 autocast, plain and with LocAt. Ways take turns, and times are medians of their turns.

What to expect on a GPU. Per pair of tokens and head size 64, attention takes 256 FLOP forward and 640 backward; the
backward by two kernels, one for queries and one for keys, computes the weights twice: 896. That bounds it to 1.29 times
plain attention if both were bound by matrix units. The bias adds one multiply-add in each of three passes and two for
its own gradients, beside four to six operations per pair that are there anyway.

    nearsight bench gaug --device cuda
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nearsight.bench.costs import CostRow, Step, compare, cost_table, grid_of
from nearsight.bench.locality import attention_ways, sizes_of_work
from nearsight.errors import InputError
from nearsight.locat import add_locat
from nearsight.locat.inducers import inducer
from nearsight.models import create_model


def bench_gaug(
    *,
    device: str,
    num_tokens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_heads: int = 12,
    head_size: int = 64,
    num_steps: int | None = None,
    model: str | None = "vit_base_patch16_224",
    model_batch_size: int | None = None,
) -> list[CostRow]:
    """Rows for square grids of patches and CLS, and for the model unless it is None.

    bfloat16 on CUDA, float32 elsewhere. What is left out depends on the device, too: a CPU gets 197 and 1,025 tokens,
    a GPU 4,097 as well, and both as many images as make a step of some milliseconds or seconds. `num_steps` is the
    length of a turn, of which each way has five.
    """
    on_gpu = torch.device(device).type == "cuda"
    sizes, num_steps = sizes_of_work(device, num_tokens, batch_sizes, num_steps)
    _check_model(model)
    rows = []
    for tokens, batch_size in sizes:
        ways = attention_ways(inducer("gaug"), grid_of(tokens), batch_size, num_heads, head_size, device)
        dtype = "bfloat16" if on_gpu else "float32"
        rows += compare(
            "attention", ways, num_steps, device=device, dtype=dtype, num_tokens=tokens, batch_size=batch_size
        )
    if model is not None:
        batch_size = model_batch_size or (256 if on_gpu else 1)
        ways, tokens = _model_ways(model, batch_size, device)
        rows += compare(
            model, ways, num_steps, device=device, dtype="bfloat16", num_tokens=tokens, batch_size=batch_size
        )
    return rows


def _check_model(model: str | None) -> None:
    """Before anything takes its time."""
    if model is not None:
        with torch.device("meta"):
            local: Any = add_locat(create_model(model))
        if local.num_classes == 0:
            raise InputError(f"{model} has no classifier to train; take vit_base_patch16_224, say")


def _model_ways(name: str, batch_size: int, device: str) -> tuple[dict[str, Step], int]:
    """(training steps of the model as it is and with LocAt, its number of tokens)."""
    on_gpu = torch.device(device).type == "cuda"

    def training_step(model: Any) -> Step:
        model = model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
        images = torch.randn(batch_size, *model.pretrained_cfg["input_size"], device=device)
        labels = torch.arange(batch_size, device=device) % model.num_classes

        def step() -> None:
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = F.cross_entropy(model(images).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain: Any = create_model(name)
    local = add_locat(create_model(name))
    num_tokens = plain.patch_embed.num_patches + getattr(plain, "num_prefix_tokens", 0)
    return {"plain": training_step(plain), "nearsight": training_step(local)}, num_tokens


def table(rows: Sequence[CostRow]) -> str:
    return cost_table(rows, f"forward and backward on {rows[0].device}; models: a whole training step")
