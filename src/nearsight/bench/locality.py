"""What making attention local costs: inducers against plain attention, a bias in memory, and FlexAttention.

Attention, forward and backward, in one process: plain (`scaled_dot_product_attention`); `nearsight`, as a model has it
after `add_locality`, by fused kernels on a GPU where the inducer has a form for them; dense, where what is added
between all pairs is made in memory and given to plain attention as its mask; and on a GPU flex, torch's FlexAttention,
compiled, with the same bias, and with a block mask where there is a reach. Queries, keys and values are as timm packs
them. Gradients are by these and by all that the inducer learns; of gaug it is the attention alone, and widths and
strengths are inputs, too. Ways take turns, and times are medians of their turns.

    nearsight bench locality --device cuda
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.bench.costs import CostRow, Step, check_sizes, compare, cost_table, grid_of
from nearsight.errors import InputError, check_at_least
from nearsight.lens.attention import FusedAttention
from nearsight.lens.induced import Own, Place, asked_of_place, attend, changed_logits
from nearsight.lens.layout import Layout
from nearsight.locat import Grid
from nearsight.locat.attend import attend as attend_on_grid
from nearsight.locat.gaussian import bias_between_tokens, kernel_of
from nearsight.locat.inducers import Frame, Inducer, Radial, inducer_of

LIMITS_OF_BIASES = {197: 1.5, 1025: 1.25, 4097: 1.3}
LIMITS_OF_MASKS = {1025: 1.0, 4097: 1.0}
"""What forward and backward are to cost at most on a GPU, of plain attention, by the number of tokens."""
_KEY = ("sdpa", 0)
Wrap = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def bench_locality(
    *,
    device: str,
    inducers: Sequence[str] = ("gaug", "gaussian", "alibi2d", "neighborhood"),
    num_tokens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_heads: int = 12,
    head_size: int = 64,
    num_steps: int | None = None,
) -> list[CostRow]:
    """Rows for square grids of patches and CLS, and for each inducer, written as "neighborhood:radius=1.5".

    bfloat16 on CUDA, float32 elsewhere. Sizes that are left out depend on the device, too: see `sizes_of_work`.
    """
    on_gpu = torch.device(device).type == "cuda"
    sizes, num_steps = sizes_of_work(device, num_tokens, batch_sizes, num_steps)
    configs = [inducer_of(text) for text in inducers]
    if not configs:
        raise InputError("inducers is empty; give at least one, or leave it out")
    for config in configs:
        if not config.changes_attention:
            raise InputError(f"{config.name} is around an attention, not in it; take alibi2d or neighborhood, say")
    compiled = partial(torch.compile, dynamic=False) if on_gpu else None
    rows = []
    for tokens, batch_size in sizes:
        for config in configs:
            shared: dict[str, Any] = {"device": device, "dtype": "bfloat16" if on_gpu else "float32"}
            shared |= {"num_tokens": tokens, "batch_size": batch_size}
            if on_gpu:
                torch.compiler.reset()  # after some programs of a function it would not compile any more
            ways = attention_ways(config, grid_of(tokens), batch_size, num_heads, head_size, device, flex=compiled)
            problem = _problem(ways["flex"]) if "flex" in ways else ""
            if problem:
                del ways["flex"]
            limits = LIMITS_OF_MASKS if config.name == "neighborhood" else LIMITS_OF_BIASES
            limit = limits.get(tokens) if on_gpu else None
            rows += compare(config.text, ways, num_steps, limit=limit, **shared)
            if problem:
                none: dict[str, Any] = dict.fromkeys(("milliseconds", "ratio", "extra_bytes"))
                rows.append(CostRow(work=config.text, way="flex", note=problem, **none, **shared))
    return rows


def sizes_of_work(
    device: str, num_tokens: Sequence[int] | None, batch_sizes: Sequence[int] | None, num_steps: int | None
) -> tuple[list[tuple[int, int]], int]:
    """((tokens, images) of each piece of work, steps of a turn).

    By default a CPU gets 197 and 1,025 tokens, a GPU 4,097 as well, and both as many images as make a step of some
    milliseconds or seconds.
    """
    on_gpu = torch.device(device).type == "cuda"
    if num_tokens is None:
        num_tokens = (197, 1025, 4097) if on_gpu else (197, 1025)
    if batch_sizes is None:
        few = (2, 1, 1) if not on_gpu else (256, 32, 8)
        batch_sizes = [few[(tokens >= 1000) + (tokens >= 4000)] for tokens in num_tokens]
    num_steps = (10 if on_gpu else 1) if num_steps is None else num_steps
    check_sizes(num_tokens, batch_sizes)
    check_at_least("num_steps", num_steps, 1)
    return list(zip(num_tokens, batch_sizes, strict=True)), num_steps


def attention_ways(
    config: Inducer,
    grid: Grid,
    batch_size: int,
    num_heads: int,
    head_size: int,
    device: str,
    *,
    flex: Wrap | None = None,
) -> dict[str, Step]:
    """Steps forward and backward, by attention with an inducer, and plain."""
    attentions, inputs, out_grad = ways_to_attend(config, grid, batch_size, num_heads, head_size, device, flex=flex)

    def step(attend: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Step:
        return lambda: torch.autograd.grad(attend(), inputs, out_grad)

    return {way: step(attend, inputs[:3] if way == "plain" else inputs) for way, attend in attentions.items()}


def ways_to_attend(
    config: Inducer,
    grid: Grid,
    batch_size: int,
    num_heads: int,
    head_size: int,
    device: str,
    *,
    flex: Wrap | None = None,
) -> tuple[dict[str, Callable[[], Tensor]], list[Tensor], Tensor]:
    """(attention by each way, queries, keys, values and what is learned, gradient by the output).

    `flex`: what compiles FlexAttention; None leaves it out.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    packed = normal(batch_size, grid.num_tokens, 3, num_heads, head_size).to(dtype).permute(2, 0, 3, 1, 4)
    query, key, value = (matrix.requires_grad_() for matrix in packed.unbind(0))
    matrices, scale = (query, key, value), head_size**-0.5
    make = _given if config.needs_queries else _placed
    learned, radial_of, ours, added = make(config, grid, matrices, scale, normal)
    out_grad = normal(batch_size, grid.num_tokens, num_heads, head_size).to(dtype).transpose(1, 2)

    attentions = {
        "plain": lambda: F.scaled_dot_product_attention(*matrices),
        "nearsight": ours,
        "dense": lambda: F.scaled_dot_product_attention(*matrices, attn_mask=added().to(dtype)),
    }
    if flex is not None and radial_of() is not None:
        attentions["flex"] = _flexible(radial_of, grid, matrices, scale, flex)
    return attentions, [*matrices, *learned], out_grad


Made = tuple[list[Tensor], Callable[[], Radial | None], Callable[[], Tensor], Callable[[], Tensor]]
"""(what is learned, the inducer's form for kernels, the attention, what is added to its logits)."""


def _given(config: Any, grid: Grid, matrices: Sequence[Tensor], scale: float, normal: Callable[..., Tensor]) -> Made:
    """GAug with widths and strengths as at the start of training: variances of 1 and strengths of ln 2, or nearly."""
    query, key, value = matrices
    lead = *query.shape[:2], grid.num_patches
    precision = (0.45 * torch.exp(0.1 * normal(*lead, 2))).requires_grad_()
    strength = F.softplus(0.1 * normal(*lead)).requires_grad_()
    bumps, kernel = (precision, strength), config.kernel
    return (
        [precision, strength],
        lambda: Radial(kernel, precision, strength),
        lambda: attend_on_grid(query, key, value, *bumps, grid, scale=scale, kernel=kernel),
        lambda: bias_between_tokens(*bumps, grid, kernel=kernel, largest_half_square=torch.inf),
    )


def _placed(
    config: Inducer, grid: Grid, matrices: Sequence[Tensor], scale: float, normal: Callable[..., Tensor]
) -> Made:
    """Of places alone, as a model has it; what it learns is not at its start."""
    query, key, value = matrices
    lines = torch.arange(grid.rows), torch.arange(grid.cols)
    places_1N2 = F.pad(torch.cartesian_prod(*lines).float(), (0, 0, grid.num_prefix, 0), value=torch.nan)[None]
    extent, num_heads = (grid.rows, grid.cols), query.shape[1]
    frame = Frame("attention", 0, 1, num_heads, query.shape[-1], True, extent, places_1N2, places_1N2)
    place = Place("attention", Layout((), 0, (), (1,)), extent, places_1N2, places_1N2, 0, (-2, -1), num_heads)
    own = Own(config, frame, {_KEY: extent}).to(query.device)
    for parameter in own.parameters():
        parameter.data = 0.5 + 0.1 * normal(*parameter.shape)

    def asked(_: Own) -> Any:
        return asked_of_place(place, _KEY, own, query, slice(0, grid.num_tokens), query_BWHTd=query[:, None])

    def added() -> Tensor:
        bias, normaliser = changed_logits([own], asked, None)
        if bias is None or normaliser is not None:
            raise InputError(f"{config.name} is no bias and no mask; take alibi2d or neighborhood, say")
        return bias[(None,) * (5 - bias.dim())].squeeze(1)

    added()
    attention = FusedAttention(query, key, scale, value=value)
    return (
        list(own.parameters()),
        lambda: config.radial(own, asked(own)),
        lambda: attend(attention, place, _KEY, [own], 0.0),
        added,
    )


def _flexible(
    radial_of: Callable[[], Radial | None], grid: Grid, matrices: Sequence[Tensor], scale: float, wrap: Wrap
) -> Callable[[], Tensor]:
    """The same by FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def number(tensor: Tensor, *at: Tensor) -> Tensor:
        """Of an image, a head and a patch; a size of 1 stands for all."""
        index = [each if size > 1 else torch.zeros_like(each) for each, size in zip(at, tensor.shape, strict=True)]
        return tensor[tuple(index)]

    def squares(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Δ² by row and by column."""
        (q_row, q_col), (k_row, k_col) = (
            ((token - grid.num_prefix) // grid.cols, (token - grid.num_prefix) % grid.cols) for token in (q, k)
        )
        return (q_row - k_row) ** 2, (q_col - k_col) ** 2

    def has_prefix(q: Tensor, k: Tensor) -> Tensor:
        return (q < grid.num_prefix) | (k < grid.num_prefix)

    first = radial_of()
    assert first is not None
    shape, blocks = first.shape, None
    if (reach := first.reach) is not None:

        def is_near(_: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            down, right = squares(q, k)
            return has_prefix(q, k) | (down + right <= number(reach, h) ** 2)

        heads = len(reach) if len(reach) > 1 else None
        blocks = create_block_mask(
            is_near, None, heads, grid.num_tokens, grid.num_tokens, device=str(matrices[0].device)
        )

    def run(query: Tensor, key: Tensor, value: Tensor, precision: Tensor, strength: Tensor) -> Any:
        def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            at = b, h, (q - grid.num_prefix).clamp(min=0)
            down, right = squares(q, k)
            by_row, by_col = (number(precision, *at, axis) for axis in (torch.zeros_like(h), torch.ones_like(h)))
            half_square = by_row * down + by_col * right
            bias = number(strength, *at) * kernel_of(half_square, shape)
            return score + torch.where(has_prefix(q, k), 0.0, bias)

        mod = None if shape == "none" else biased
        return flex_attention(query, key, value, score_mod=mod, block_mask=blocks, scale=scale)

    compiled = wrap(run)

    def attended() -> Tensor:
        radial = radial_of()
        assert radial is not None
        none = matrices[0].new_zeros((), dtype=torch.float32)
        numbers = [none if given is None else given for given in (radial.precision, radial.strength)]
        sized = (
            each.reshape((1,) * (dim - each.dim()) + each.shape) for dim, each in zip((4, 3), numbers, strict=True)
        )
        output: Tensor = compiled(*matrices, *sized)
        return output

    return attended


def _problem(step: Step) -> str:
    """Why FlexAttention does not do this, in a line; nothing if it does. Compilers fail in many ways."""
    try:
        step()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # whoever measures will find out
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"[:200]
    return ""


def table(rows: Sequence[CostRow]) -> str:
    lines = [cost_table(rows, f"attention, forward and backward on {rows[0].device}; ratios are to plain")]
    for row in rows:
        if row.note:
            lines.append(f"{row.work} at {row.num_tokens} tokens, {row.way}: {row.note}")
        if row.limit is not None and row.ratio is not None:
            verdict = "met" if row.ratio <= row.limit else "missed"
            lines.append(f"{row.work} at {row.num_tokens} tokens: {row.ratio:.2f}, aim ≤ {row.limit:.2f}, {verdict}")
    return "\n".join(lines)
