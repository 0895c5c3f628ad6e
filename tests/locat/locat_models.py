"""Small models of every family that LocAt can be added to, with heads that are far from their start."""

from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from locat_paper import Paper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nearsight import add_locat

VIT = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 40, "num_classes": 7}
SWIN = {
    **{"img_size": 56, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "window_size": 7, "num_classes": 7},
    "drop_path_rate": 0.0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {**VIT, "dynamic_img_size": True}),
    "qk-norm": ("vit_tiny_patch16_224", {**VIT, "dynamic_img_size": True, "qk_norm": True}),
    "registers": ("vit_small_patch14_reg4_dinov2", {**VIT, "dynamic_img_size": True}),
    "deit3": ("deit3_small_patch16_224", {**VIT, "dynamic_img_size": True}),
    "siglip-gap": ("vit_base_patch16_siglip_gap_224", {**VIT, "dynamic_img_size": True}),
    "rope": ("vit_small_patch16_rope_mixed_224", {**VIT, "dynamic_img_size": True}),
    "eva": ("eva02_tiny_patch14_224", {**VIT, "dynamic_img_size": True, "rope_grid_offset": 0.5}),
    "swin": ("swin_tiny_patch4_window7_224", {**SWIN, "strict_img_size": False}),
}


def plain_model(family: str, **options: Any) -> Any:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**settings, **options}).eval()
    for parameter in model.parameters():  # LayerScale of 1e-5 would hide all attention
        if parameter.dim() == 1 and 0 < parameter.abs().max() < 1e-2:
            nn.init.normal_(parameter)
    return model


@torch.no_grad()
def excite(model: nn.Module, seed: int = 1) -> None:
    """Heads that give other widths and strengths to every query, and positions that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".gaug." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        elif name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight", "relative_position_bias_table")):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def attention_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(".attn")]


def papers(model: Any, images: Tensor, initial: tuple[int, int] | None = None, **variant: Any) -> dict[str, Paper]:
    """What the paper says of each attention of a model, for images of this size."""
    found = {}
    for name in attention_names(model):
        attention = model.get_submodule(name)
        if hasattr(attention, "window_size"):
            window = tuple(attention.window_size)
            found[name] = Paper(window, initial or window, 0, **variant)
        else:
            rows_cols = tuple(side // patch for side, patch in zip(images.shape[-2:], (8, 8), strict=True))
            found[name] = Paper(rows_cols, initial or (5, 5), model.num_prefix_tokens, **variant)
    return found


def local_vit() -> Any:
    model = add_locat(plain_model("vit"))
    excite(model)
    return model.train()


def write_gradients(rank: int, batch: Tensor, folder: Path) -> None:
    """Training in two processes: each takes every other image, and writes what both agree on. Here and not in a test,
    because a new process has to be able to import it."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    model = local_vit()
    parallel = DistributedDataParallel(model)
    parallel(batch[rank::2]).square().sum().backward()
    torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, folder / f"{rank}.pt")
    dist.destroy_process_group()
