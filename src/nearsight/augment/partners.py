"""What all mixing augmentations share: who is mixed with whom, and one draw per batch or one per sample."""

import torch
from torch import Tensor

from nearsight.augment.base import Cells
from nearsight.augment.streams import Drawn


def permutation_of(draw_KB: Tensor) -> Tensor:
    """A random permutation of each cell's batch from one uniform draw per sample: [K, B], positions in the batch."""
    return draw_KB.argsort(dim=-1, stable=True)


def of_partners(values_KB: Tensor, partner_KB: Tensor) -> Tensor:
    """The values [K, B, ...] of everybody's partner."""
    num_cells, num_samples = partner_KB.shape
    cell_K1 = torch.arange(num_cells, device=partner_KB.device).unsqueeze(-1)
    if torch.compiler.is_compiling():
        # From one index into the flattened batch a program for any K takes a remainder by K for every pixel.
        return values_KB[cell_K1, partner_KB]
    # index_select on the flattened batch copies whole images; gather would need an index per pixel.
    picked = values_KB.flatten(0, 1).index_select(0, (partner_KB + cell_K1 * num_samples).flatten())
    return picked.view_as(values_KB)


def mixed_targets(targets_KBC: Tensor, partner_KB: Tensor, share_of_partner: Tensor) -> Tensor:
    """Targets mixed by `share_of_partner` [K, b]; a share of 0 returns them bit-identical."""
    share = share_of_partner.unsqueeze(-1)
    return targets_KBC * (1 - share) + of_partners(targets_KBC, partner_KB) * share


def batch_or_sample_draws(cells: Cells, drawn: Drawn, stream: str, num: int) -> Tensor:
    """The first `num` draws of the stream, [K, b, num]: b = 1 if all cells draw once per batch, else B.

    Cells say which in `per_sample`. The batch's draws are the stream `{stream}.batch`.
    """
    shared_K1n = drawn.batch[f"{stream}.batch"][..., :num].unsqueeze(1)
    if not cells.largest["per_sample"]:
        return shared_K1n
    own_KBn = drawn.sample[stream][..., :num]
    return torch.where(cells["per_sample"].to(torch.bool)[:, None, None], own_KBn, shared_K1n)
