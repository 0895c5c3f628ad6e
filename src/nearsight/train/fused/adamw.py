"""An AdamW update of K cells in one pass over their weights, gradients and moments.

Shape suffixes: K cells, P parameters of a cell.
"""

from torch import Tensor

from nearsight.triton_language import kernel, tl

_BLOCK = 2048


def adamw_update(
    weights_KP: Tensor,
    gradient_KP: Tensor,
    first_KP: Tensor,
    second_KP: Tensor,
    decays_P: Tensor,
    *,
    shrinkage_K: Tensor,
    shrinks_all_K: Tensor,
    gradient_scale_K: Tensor | None,
    step_K: Tensor,
    root_K: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update weights and moments in place.

    Args:
        decays_P: which parameters shrink where not all do.
        shrinkage_K: learning rate times weight decay.
        gradient_scale_K: by which a cell's gradient is clipped; None: not at all.
        step_K: learning rate over the first moment's bias correction.
        root_K: root of the second moment's bias correction.
    """
    num_cells, num_parameters = weights_KP.shape
    _adamw_kernel[(-(-num_parameters // _BLOCK), num_cells)](
        weights_KP,
        gradient_KP,
        first_KP,
        second_KP,
        decays_P,
        shrinkage_K,
        shrinks_all_K,
        gradient_scale_K,
        step_K,
        root_K,
        num_parameters,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@kernel
def _adamw_kernel(
    weights,
    gradient,
    first,
    second,
    decays,
    shrinkage,
    shrinks_all,
    gradient_scale,
    step,
    root,
    num_parameters,
    share1,
    beta2,
    share2,
    eps,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(1).to(tl.int64)
    place_P = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used_P = place_P < num_parameters
    at_P = cell * num_parameters + place_P
    gradient_P = tl.load(gradient + at_P, mask=used_P, other=0.0)
    if gradient_scale is not None:
        gradient_P *= tl.load(gradient_scale + cell)
    first_P = tl.load(first + at_P, mask=used_P, other=0.0)
    first_P += share1 * (gradient_P - first_P)
    second_P = tl.load(second + at_P, mask=used_P, other=0.0) * beta2 + gradient_P * gradient_P * share2
    shrinks_P = (tl.load(decays + place_P, mask=used_P, other=0) != 0) | (tl.load(shrinks_all + cell) != 0)
    factor_P = 1.0 - tl.load(shrinkage + cell) * tl.where(shrinks_P, 1.0, 0.0)
    moved_P = first_P / (tl.sqrt(second_P) / tl.load(root + cell) + eps) * tl.load(step + cell)
    weight_P = tl.load(weights + at_P, mask=used_P, other=0.0) * factor_P - moved_P
    tl.store(first + at_P, first_P, mask=used_P)
    tl.store(second + at_P, second_P, mask=used_P)
    tl.store(weights + at_P, weight_P, mask=used_P)
