"""What it costs to ask about every head: `nearsight.ablate` against whole forwards, and against a loop of hooks.

Every head in turn attends to its own patch alone, and the model answers all images. Three ways in one process: ours,
where what comes before the head's layer is computed once and several heads run as one batch; the same code with a whole
forward per head; and what one would write without it, a forward per head with unfused attention and a hook that changes
the map in memory. Predictions of ours and of whole forwards have to agree but for rounding, and are counted.

What to expect. With L layers, sharing saves at most 2 L / (L + 1) of the blocks: 1.78 times at 8 layers, 1.85 at 12.
Maps in memory cost several passes over B·H·N² numbers per layer, which is little at 65 tokens and much at 1,025.

    nearsight bench ablate --device cuda --model vit_base_patch16_224 --num-images 5000
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.bench.costs import wait_for
from nearsight.errors import InputError, check_at_least
from nearsight.lens import Identity, Survey
from nearsight.models import create_model
from nearsight.probe.ablation import every_head
from nearsight.probe.readouts import Classes, Labelled
from nearsight.probe.variants import Variant, try_variants

Heads = Sequence[tuple[int, int]]
"""(layer, head)."""


@dataclass(frozen=True, kw_only=True)
class AblateRow:
    """All heads of a model, over some images."""

    model: str
    device: str
    dtype: str
    num_heads: int
    num_images: int
    seconds: float
    """Ours, all images, start-up included."""
    num_compared: int
    """Images of the three ways that follow."""
    ours_s: float
    whole_s: float
    """A whole forward per head."""
    hooks_s: float
    """A forward per head with maps in memory."""
    differ: int
    """Predictions of ours that are others than those of whole forwards."""
    differ_to_hooks: int
    predictions: int


def bench_ablate(
    *,
    device: str,
    model: str = "compact_vit",
    num_images: int | None = None,
    num_compared: int | None = None,
    batch_size: int | None = None,
    variants_at_once: int = 8,
    dtype: torch.dtype | None = None,
) -> list[AblateRow]:
    """One row. bfloat16 on CUDA, float32 elsewhere; weights and images are random. By default 10,000 images on a GPU,
    of which 1,000 are compared in batches of 500, and 16 in batches of 8 elsewhere."""
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    num_images = num_images or (10_000 if on_gpu else 16)
    num_compared = min(num_images, num_compared or (1000 if on_gpu else 16))
    batch_size = batch_size or (500 if on_gpu else 8)
    for name, value in (("num_images", num_images), ("num_compared", num_compared), ("batch_size", batch_size)):
        check_at_least(name, value, 1)
    torch.manual_seed(0)
    vit: Any = create_model(model).to(device, dtype).eval()
    if not all(hasattr(getattr(block, "attn", None), "attn_drop") for block in getattr(vit, "blocks", [None])):
        raise InputError(f"{model} is not a ViT of timm's, whose maps hooks change; take vit_base_patch16_224, say")
    side = vit.patch_embed.img_size
    batches = [
        torch.randn(min(batch_size, num_images - start), 3, *side, device=device, dtype=dtype)
        for start in range(0, num_images, batch_size)
    ]
    heads = [(layer, head) for layer, block in enumerate(vit.blocks) for head in range(block.attn.num_heads)]

    def asked(images: Sequence[Tensor], *, share: bool) -> Tensor:
        """Predictions [heads, images]."""
        read = _Predictions()
        with_truth: Labelled = ((batch, torch.zeros(len(batch), dtype=torch.int64)) for batch in images)
        try_variants(vit, with_truth, _every_head, read, variants_at_once=variants_at_once, share=share)
        return read.predictions(len(heads))

    some, counted = [], 0
    for batch in batches:
        some.append(batch[: num_compared - counted])
        counted += len(some[-1])
        if counted == num_compared:
            break
    asked([some[0][:2]], share=True)  # finds libraries and compiles, once per process
    _by_hooks(vit, [some[0][:2]], heads[:1])
    seconds, _ = _timed(lambda: asked(batches, share=True), device)
    ours_s, ours = _timed(lambda: asked(some, share=True), device)
    whole_s, whole = _timed(lambda: asked(some, share=False), device)
    hooks_s, by_hooks = _timed(lambda: _by_hooks(vit, some, heads), device)
    row = AblateRow(
        model=model,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        num_heads=len(heads),
        num_images=num_images,
        seconds=seconds,
        num_compared=num_compared,
        ours_s=ours_s,
        whole_s=whole_s,
        hooks_s=hooks_s,
        differ=int((ours != whole).sum()),
        differ_to_hooks=int((ours != by_hooks).sum()),
        predictions=ours.numel(),
    )
    return [row]


def _every_head(found: Survey) -> list[Variant]:
    return every_head(found, Identity, "identity")


class _Predictions(Classes):
    """Keeps the classes that are predicted, whatever is true."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def kept(self, output_B: Tensor, truth: Any) -> Tensor:
        self._kept.append(output_B.argmax(-1))
        return super().kept(output_B, truth)

    def predictions(self, num_variants: int) -> Tensor:
        """[variants, images]; what is kept first of each batch is of the unchanged model."""
        per_batch = num_variants + 1
        batches = [self._kept[start + 1 : start + per_batch] for start in range(0, len(self._kept), per_batch)]
        return torch.cat([torch.stack(batch) for batch in batches], dim=1).cpu()


def _by_hooks(vit: Any, images: Sequence[Tensor], heads: Heads) -> Tensor:
    """Predictions [heads, images], as one would get them by hand."""
    attentions = [block.attn for block in vit.blocks]
    fused = [attention.fused_attn for attention in attentions]
    answers = []
    try:
        for attention in attentions:
            attention.fused_attn = False
        for layer, head in heads:
            hook = attentions[layer].attn_drop.register_forward_hook(_to_own_patch(head))
            try:
                with torch.no_grad():
                    answers.append(torch.cat([vit(batch).argmax(-1).cpu() for batch in images]))
            finally:
                hook.remove()
    finally:
        for attention, was_fused in zip(attentions, fused, strict=True):
            attention.fused_attn = was_fused
    return torch.stack(answers)


def _to_own_patch(head: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """CLS is the first token; a patch keeps what it gives to it."""

    def change(_module: nn.Module, _inputs: Any, weights_BHNN: Tensor) -> Tensor:
        weights_BHNN = weights_BHNN.clone()
        patches_BNN = weights_BHNN[:, head, 1:, 1:]
        weights_BHNN[:, head, 1:, 1:] = torch.diag_embed(patches_BNN.sum(-1))
        return weights_BHNN

    return change


def _timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    wait_for(device)
    return time.perf_counter() - start, found


def table(rows: Sequence[AblateRow]) -> str:
    lines = []
    for row in rows:
        lines += [
            f"{row.model}, {row.dtype}, {row.device}: {row.num_heads} heads × {row.num_images:,} images in "
            f"{row.seconds:,.1f} s",
            f"  of {row.num_compared:,} images: ours {row.ours_s:,.2f} s; a forward per head {row.whole_s:,.2f} s "
            f"({row.whole_s / row.ours_s:.2f} ×); a loop of hooks with maps {row.hooks_s:,.2f} s "
            f"({row.hooks_s / row.ours_s:.2f} ×)",
            f"  of {row.predictions:,} predictions {row.differ} differ from whole forwards, {row.differ_to_hooks} from "
            "the loop",
        ]
    return "\n".join(lines)
