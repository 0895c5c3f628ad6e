"""The k largest of each row of a matrix, in little more than one pass over it.

Columns are dealt into groups, and the maxima of all groups are taken in one cheap pass. Only the k groups with the
largest maxima can hold the k largest; and once k are known, only groups whose maximum is larger than the least of them.

Shape suffixes: q rows, m columns, k largest, g columns of a group, n groups, h groups of any rows, w groups of a row.
"""

import torch
from torch import Tensor

GROUP = 64


def largest(values_qm: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` along the rows: (values [q, k], columns [q, k])."""
    num_groups = values_qm.shape[1] // GROUP
    if num_groups <= 2 * k:
        values, columns = values_qm.topk(k, dim=1)
        return values, columns
    group_qk = _maxima(values_qm, num_groups).topk(k, dim=1, sorted=False).indices
    columns = torch.cat([_columns(group_qk, num_groups).flatten(1), _rest(values_qm, num_groups)], dim=1)
    values, chosen = values_qm.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, chosen)


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of both, (values [q, k], positions [q, k]) from the largest on."""
    values, positions = (torch.cat(parts, dim=1) for parts in zip(one, other, strict=True))
    best_qk, chosen = values.topk(min(k, values.shape[1]), dim=1)
    return best_qk, positions.gather(1, chosen)


def improved(best: tuple[Tensor, Tensor], values_qm: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """The k largest of these values and of the k best so far, (values from the largest on, positions), each [q, k].

    `begin`: the position of the first column. It waits for the device; of random vectors, the later, the less is left.
    """
    best_qk, _ = best
    num_rows, num_groups = len(values_qm), values_qm.shape[1] // GROUP
    row_h, group_h = (_maxima(values_qm, num_groups) > best_qk[:, -1:]).nonzero().unbind(1)
    count_q = torch.bincount(row_h, minlength=num_rows)
    slot_h = torch.arange(len(row_h), device=row_h.device) - (count_q.cumsum(0) - count_q)[row_h]
    num_slots = int(count_q.max()) if len(row_h) else 0
    columns_hg = _columns(group_h, num_groups)
    new_qwg = values_qm.new_full((num_rows, num_slots, GROUP), -torch.inf)
    position_qwg = columns_hg.new_zeros(new_qwg.shape)
    new_qwg[row_h, slot_h] = values_qm[row_h.unsqueeze(1), columns_hg]
    position_qwg[row_h, slot_h] = columns_hg + begin
    rest = _rest(values_qm, num_groups)
    new = torch.cat([new_qwg.flatten(1), values_qm.gather(1, rest)], dim=1)
    positions = torch.cat([position_qwg.flatten(1), rest + begin], dim=1)
    return merged(best, (new, positions), best_qk.shape[1]) if new.shape[1] else best


def _maxima(values_qm: Tensor, num_groups: int) -> Tensor:
    """[q, n]. Group j holds columns j, j + n, j + 2n, …: the maxima of all groups are then maxima of whole rows."""
    if num_groups == 0:
        return values_qm[:, :0]
    grouped_qgn: Tensor = values_qm[:, : num_groups * GROUP].unflatten(1, (GROUP, num_groups))
    return grouped_qgn.amax(1)


def _columns(groups: Tensor, num_groups: int) -> Tensor:
    """[…, g]: those of each group."""
    return groups.unsqueeze(-1) + num_groups * torch.arange(GROUP, device=groups.device)


def _rest(values_qm: Tensor, num_groups: int) -> Tensor:
    """Columns that are in no group, of every row."""
    num_rows, num_columns = values_qm.shape
    return torch.arange(num_groups * GROUP, num_columns, device=values_qm.device).expand(num_rows, -1)
