"""What exact retrieval costs: our search against FAISS's flat index, and against the matrix products alone.

Three ways in one process, on the same unit vectors: `nearsight`, exact and a piece at a time; `faiss`, IndexFlatIP on
the same number of threads, where it is installed and on a CPU; and `products`, the same matrix products with nothing
done to them, which is what any exact search has to compute. Ways take turns, and times are medians of their turns.

What to expect. A product takes 2·C operations for each similarity (1,536 for 768 channels), and finding the largest
takes one comparison: a search should be as fast as the products but for the memory traffic of one more pass. FAISS
keeps a heap for each query instead. `results/bench-retrieve/` and docs/probe.md have what was measured.

    nearsight bench retrieve --memory-size 1000000 --num-queries 1024
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.bench.costs import PeakMemory
from nearsight.errors import InputError, check_at_least
from nearsight.probe.search import PIECE_BYTES, ExactIndex, FaissIndex, check_enough, import_faiss, unit
from nearsight.probe.settings import RETRIEVE_K

_PART = 65_536
"""Vectors that are drawn at once."""


@dataclass(frozen=True, kw_only=True)
class RetrieveRow:
    """One way of finding the nearest."""

    way: str
    """nearsight, faiss or products."""
    device: str
    memory_size: int
    num_channels: int
    num_queries: int
    k: int
    seconds: float
    """Median of the turns."""
    ratio: float | None
    """To faiss; None where it is not there."""
    teraflops: float
    """Operations of the products per second, by 10¹²."""
    share_of_products: float
    """Of the rate that the products alone reach."""
    extra_bytes: int | None
    """Peak memory beyond the memory of vectors and the queries."""
    agrees: float | None
    """Share of the neighbours that FAISS finds, too; None without it."""


def bench_retrieve(
    *,
    device: str,
    memory_size: int | None = None,
    num_channels: int = 768,
    num_queries: int | None = None,
    k: int = RETRIEVE_K,
    num_turns: int = 3,
) -> list[RetrieveRow]:
    """Rows for random directions; by default 1 M vectors and 512 queries on a CPU, 4 M and 16,384 on a GPU."""
    on_gpu = torch.device(device).type == "cuda"
    if memory_size is None:
        memory_size = 4_000_000 if on_gpu else 1_000_000
    if num_queries is None:
        num_queries = 16_384 if on_gpu else 512
    check_at_least("memory_size", memory_size, 1)
    check_at_least("num_channels", num_channels, 1)
    check_at_least("num_queries", num_queries, 1)
    check_at_least("num_turns", num_turns, 1)
    check_enough(memory_size, k, "vectors in the memory")
    memory_MC = _directions(memory_size, num_channels, 0, device)
    queries_QC = _directions(num_queries, num_channels, 1, device)
    ways = _ways(memory_MC, queries_QC, k, on_gpu)
    found = {way: search() for way, search in ways.items()}  # which warms up, too
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    extra: dict[str, int | None] = {}
    for _ in range(num_turns):
        for way, search in ways.items():
            peak = PeakMemory(device)
            start = time.perf_counter()
            search()
            if on_gpu:
                torch.cuda.synchronize()
            seconds[way].append(time.perf_counter() - start)
            extra[way] = peak.growth()
    median = {way: statistics.median(times) for way, times in seconds.items()}
    reference = found.get("faiss")
    operations = 2 * memory_size * num_queries * num_channels
    return [
        RetrieveRow(
            way=way,
            device=device,
            memory_size=memory_size,
            num_channels=num_channels,
            num_queries=num_queries,
            k=k,
            seconds=median[way],
            ratio=median[way] / median["faiss"] if "faiss" in median else None,
            teraflops=operations / median[way] / 1e12,
            share_of_products=median["products"] / median[way],
            extra_bytes=extra[way],
            agrees=None if way == "products" or reference is None else _agreement(found[way], reference),
        )
        for way in ways
    ]


def _directions(num: int, num_channels: int, seed: int, device: str) -> Tensor:
    """Random vectors of length 1; a part at a time, so that no second copy of the memory ever exists."""
    generator = torch.Generator(device).manual_seed(seed)
    vectors = torch.empty(num, num_channels, device=device)
    for part in vectors.split(_PART):
        part.copy_(unit(torch.randn(part.shape, device=device, generator=generator)))
    return vectors


def _ways(memory_MC: Tensor, queries_QC: Tensor, k: int, on_gpu: bool) -> dict[str, Callable[[], Tensor]]:
    """Each gives the positions of the neighbours, [Q, k]."""
    exact = ExactIndex(memory_MC, normalized=True)
    ways: dict[str, Callable[[], Tensor]] = {"nearsight": lambda: exact.search(queries_QC, k)[1]}
    if not on_gpu:
        try:
            flat = FaissIndex(memory_MC, normalized=True)
        except InputError:
            pass  # it is an extra
        else:
            import_faiss().omp_set_num_threads(torch.get_num_threads())
            ways["faiss"] = lambda: flat.search(queries_QC, k)[1]
    num_columns = max(PIECE_BYTES["cuda" if on_gpu else "cpu"] // (4 * len(queries_QC)), 1)

    def products() -> Tensor:
        """Every piece as the search gets it, and nothing done with it."""
        return [piece for _, piece in exact.pieces(queries_QC, num_columns)][-1]

    ways["products"] = products
    return ways


def _agreement(one_Qk: Tensor, other_Qk: Tensor) -> float:
    """Share of neighbours that both found, in whatever order."""
    return float((one_Qk.unsqueeze(2) == other_Qk.unsqueeze(1)).any(2).double().mean())


def table(rows: Sequence[RetrieveRow]) -> str:
    first = rows[0]
    lines = [
        f"{first.num_queries:,} queries, {first.memory_size:,} vectors of {first.num_channels} channels, "
        f"k = {first.k}, {first.device}",
        f"{'way':<12}{'seconds':>9}{'to faiss':>10}{'TFLOP/s':>9}{'of products':>13}{'extra MB':>10}{'agrees':>9}",
    ]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        extra = "-" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:.0f}"
        agrees = "-" if row.agrees is None else f"{row.agrees:.4f}"
        lines.append(
            f"{row.way:<12}{row.seconds:>9.2f}{ratio:>10}{row.teraflops:>9.3f}{row.share_of_products:>13.2f}"
            f"{extra:>10}{agrees:>9}"
        )
    return "\n".join(lines)
