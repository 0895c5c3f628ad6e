"""The k most similar of many vectors: exact, a piece at a time, so that no whole matrix of similarities ever exists.

A piece is one product of some queries with some of the memory. To find its k largest columns, the columns are dealt
into groups, and only the k groups with the largest maxima can hold them: one cheap pass of maxima and two small
selections instead of a selection over everything. `nearsight bench retrieve` compares it with FAISS.

Shape suffixes: Q queries, M vectors of the memory, C channels, k neighbours, q queries and m vectors of a piece,
g columns of a group, n groups.
"""

import importlib
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.errors import InputError, check_at_least

PIECE_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Largest piece of the similarities by default: one that a CPU's cache can partly hold, one that fills a GPU."""
_LARGEST_QUERIES = {"cpu": 1024, "cuda": 4096}
_GROUP = 64


class Index(Protocol):
    """A memory that can be searched."""

    def search(self, queries_QC: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(cosine similarities [Q, k] from the largest on, positions in the memory [Q, k])."""
        ...


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis, float32; a vector of zeros stays one."""
    return F.normalize(vectors.float(), dim=-1)


def check_enough(num_vectors: int, k: int, what: str) -> None:
    """At least k vectors, or an error that calls them by this name."""
    check_at_least("k", k, 1)
    if num_vectors < k:
        raise InputError(f"there are {num_vectors} {what}, but {k} neighbours of each query are asked for; lower k")


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
        num_columns = max((self._piece_bytes or PIECE_BYTES[kind]) // (4 * num_queries), k, _GROUP)
        found = [self._search(unit(part_qC), k, num_columns) for part_qC in queries_QC.split(num_queries)]
        similarity_Qk, position_Qk = (torch.cat(parts) for parts in zip(*found, strict=True))
        return similarity_Qk, position_Qk

    def _search(self, queries_qC: Tensor, k: int, num_columns: int) -> tuple[Tensor, Tensor]:
        best_qk: Tensor | None = None
        position_qk: Tensor | None = None
        piece_qm: Tensor | None = None
        for begin in range(0, len(self.memory_MC), num_columns):
            part_mC = self.memory_MC[begin : begin + num_columns].to(queries_qC.device, torch.float32)
            # Fresh memory for every piece would cost more than the selection.
            whole = piece_qm is not None and len(part_mC) == piece_qm.shape[1]
            piece_qm = torch.mm(queries_qC, part_mC.T, out=piece_qm if whole else None)
            values, columns = largest(piece_qm, min(k, len(part_mC)))
            columns += begin
            if best_qk is not None and position_qk is not None:
                values, columns = torch.cat([best_qk, values], 1), torch.cat([position_qk, columns], 1)
            best_qk, chosen = values.topk(min(k, values.shape[1]), dim=1)
            position_qk = columns.gather(1, chosen)
        assert best_qk is not None
        assert position_qk is not None
        return best_qk, position_qk


def largest(values_qm: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` along the rows, in one pass over them: (values [q, k], columns [q, k])."""
    num_columns = values_qm.shape[1]
    num_groups = num_columns // _GROUP
    if num_groups <= 2 * k:
        values, columns = values_qm.topk(k, dim=1)
        return values, columns
    # Group j holds columns j, j + n, j + 2n, …: the maxima of all groups are then maxima of whole rows.
    grouped_qgn = values_qm[:, : num_groups * _GROUP].unflatten(1, (_GROUP, num_groups))
    group_qk = grouped_qgn.amax(1).topk(k, dim=1, sorted=False).indices
    columns_qgk = group_qk.unsqueeze(1) + num_groups * torch.arange(_GROUP, device=values_qm.device).unsqueeze(-1)
    columns = columns_qgk.flatten(1)
    rest = torch.arange(num_groups * _GROUP, num_columns, device=values_qm.device).expand(len(values_qm), -1)
    columns = torch.cat([columns, rest], dim=1)
    values, chosen = values_qm.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, chosen)


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
    """FAISS, which is not among what this package needs, or an error that says how to get it."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise InputError("the index 'faiss' needs FAISS; install it with: pip install faiss-cpu") from error
