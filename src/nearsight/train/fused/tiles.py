"""How kernels hold rows of channels.

Tiles have sides that are powers of two, and widths such as 192 are not: the channels of some rows are a tuple of
chunks.

Shape suffixes: R rows.
"""

from nearsight.triton_language import kernel, tl

_LARGEST_CHUNK = 64
_MOST_CHUNKS = 12


def chunk_of(width: int) -> int:
    """Channels of a chunk: a power of two that divides the width."""
    return min(_LARGEST_CHUNK, width & -width)


def is_supported_width(width: int) -> bool:
    """Whether a program can hold rows of so many channels."""
    return width % 16 == 0 and width // chunk_of(width) <= _MOST_CHUNKS


@kernel
def load_chunks(rows, at_R, used_R, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """All channels of some rows."""
    chunks = ()
    for c in tl.static_range(WIDTH // CHUNK):
        place = at_R[:, None] * WIDTH + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        chunks += (tl.load(rows + place, mask=used_R[:, None], other=0.0),)
    return chunks


@kernel
def store_chunks(rows, chunks, at_R, used_R, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    for c in tl.static_range(WIDTH // CHUNK):
        place = at_R[:, None] * WIDTH + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        tl.store(rows + place, chunks[c].to(rows.dtype.element_ty), mask=used_R[:, None])
