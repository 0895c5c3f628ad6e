"""The k most similar of many vectors: exact, a piece at a time, so that no whole matrix of similarities ever exists.

A piece is one product of some queries with some of the memory, of which the k largest of each row are found in little
more than one pass: columns are dealt into groups, and the maxima of all groups are taken in one cheap pass. Only the k
groups with the largest maxima can hold the k largest; and once k are known, only groups whose maximum is larger than
the least of them. `nearsight bench retrieve` compares it with FAISS.

Shape suffixes: Q queries, M vectors of the memory, C channels, k neighbours, q queries and m vectors of a piece,
g columns of a group, n groups, h groups of any rows, w groups of a row.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from nearsight.augment.pipeline import one_thread
from nearsight.errors import InputError, check_at_least
from nearsight.lazy import F, np, torch

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 64
PIECE_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Largest piece of the similarities by default: one that a CPU's cache can partly hold, one that fills a GPU."""
_LARGEST_QUERIES = {"cpu": 1024, "cuda": 4096}


class Index(Protocol):
    """A memory that can be searched."""

    def search(self, queries_QC: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(cosine similarities [Q, k] from the largest on, positions in the memory [Q, k])."""
        ...


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis, float32; a vector of zeros stays one."""
    return F.normalize(vectors.float(), dim=-1)


def check_enough(num_vectors: int, k: int, what: str) -> None:
    """Refuse fewer than k vectors; `what` names them in the error."""
    check_at_least("k", k, 1)
    if num_vectors < k:
        raise InputError(f"there are {num_vectors} {what}, but {k} neighbours of each query are requested; lower k")


class ExactIndex:
    """Searches all of the memory. It lies where it was given, and goes to the queries piece by piece."""

    def __init__(self, memory_MC: Tensor, *, normalized: bool = False, piece_bytes: int | None = None) -> None:
        """`normalized`: the vectors have length 1 already, and are not copied."""
        if memory_MC.dim() != 2:
            raise InputError(f"a memory of vectors [M, C] is needed, not {list(memory_MC.shape)}")
        self.memory_MC = memory_MC if normalized else unit(memory_MC)
        self._piece_bytes = piece_bytes

    def search(self, queries_QC: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_enough(len(self.memory_MC), k, "vectors in the memory")
        if queries_QC.shape[-1] != self.memory_MC.shape[-1]:
            widths = queries_QC.shape[-1], self.memory_MC.shape[-1]
            raise InputError(f"queries have {widths[0]} channels, but the memory has {widths[1]}: of another model?")
        kind = "cuda" if queries_QC.is_cuda else "cpu"
        num_queries = min(_LARGEST_QUERIES[kind], len(queries_QC)) or 1
        num_columns = max((self._piece_bytes or PIECE_BYTES[kind]) // (4 * num_queries), k, GROUP)
        # Torch's threads keep spinning for a while after their work and slow down those that multiply.
        with one_thread():
            found = [self._search(unit(part_qC), k, num_columns) for part_qC in queries_QC.split(num_queries)]
        similarity_Qk, position_Qk = (torch.cat(parts) for parts in zip(*found, strict=True))
        return similarity_Qk, position_Qk

    def _search(self, queries_qC: Tensor, k: int, num_columns: int) -> tuple[Tensor, Tensor]:
        best: tuple[Tensor, Tensor] | None = None
        # `improved` would have to wait for another device at every piece.
        improves = queries_qC.device.type == "cpu"
        for begin, piece_qm in self.pieces(queries_qC, num_columns):
            if improves and best is not None and best[0].shape[1] == k:
                best = improved(best, piece_qm, begin)
                continue
            values, columns = largest(piece_qm, min(k, piece_qm.shape[1]))
            found = values, columns + begin
            best = found if best is None else merged(best, found, k)
        assert best is not None
        return best

    def pieces(self, queries_qC: Tensor, num_columns: int) -> Iterator[tuple[int, Tensor]]:
        """(where it begins, the similarities of these queries to the next vectors): all in the same memory, one after
        the other, since fresh memory for every piece would cost more than the selection."""
        room_qm = queries_qC.new_empty(len(queries_qC), min(num_columns, len(self.memory_MC)))
        for begin in range(0, len(self.memory_MC), num_columns):
            part_mC = self.memory_MC[begin : begin + num_columns].to(queries_qC.device, torch.float32)
            piece_qm = room_qm[:, : len(part_mC)]
            if queries_qC.device.type == "cpu":
                # By numpy's BLAS: on AMD's processors faster than torch's, which is Intel's (docs/log.md).
                np.matmul(queries_qC.numpy(), part_mC.numpy().T, out=piece_qm.numpy())
            else:
                torch.mm(queries_qC, part_mC.T, out=piece_qm)
            yield begin, piece_qm


class FaissIndex:
    """FAISS's flat index of inner products, on the CPU."""

    def __init__(self, memory_MC: Tensor, *, normalized: bool = False) -> None:
        self._size = len(memory_MC)
        self._index: Any = import_faiss().IndexFlatIP(memory_MC.shape[1])
        self._index.add((memory_MC.float() if normalized else unit(memory_MC)).cpu().contiguous().numpy())

    def search(self, queries_QC: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_enough(self._size, k, "vectors in the memory")
        similarity_Qk, position_Qk = self._index.search(unit(queries_QC).cpu().numpy(), k)
        device = queries_QC.device
        return torch.from_numpy(similarity_Qk).to(device), torch.from_numpy(position_Qk).to(device)


def import_faiss() -> Any:
    """FAISS, which is not a dependency of this package, or an error that says how to install it."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise InputError("the index 'faiss' needs FAISS; install it with: pip install faiss-cpu") from error


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
