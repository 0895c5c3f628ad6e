"""What the kernels of attention share: which image and head, and the rows of its tokens.

Keys are a tuple of blocks, the main one first, then the tail if there is one. Tokens may be taken in another order, as
if the first ones came last: `FIRST` is the token to begin with.

Shape suffixes: N tokens, d head size. Names in capitals are known to the compiler.
"""

from nearsight.triton_language import kernel, tl


@kernel
def image_and_head(HEADS, HEADS_PER_PROGRAM):
    """The image of a program, and the first of its heads."""
    image = (tl.program_id(0) // (HEADS // HEADS_PER_PROGRAM)).to(tl.int64)
    return image, tl.program_id(0) % (HEADS // HEADS_PER_PROGRAM) * HEADS_PER_PROGRAM


@kernel
def zeros_like(blocks):
    zeros = ()
    for j in tl.static_range(len(blocks)):
        zeros += (tl.zeros(blocks[j].shape, tl.float32),)
    return zeros


@kernel
def weights_of(logits, scale):
    """The exponentials of scale · logits relative to the largest, a tile per block of keys, and their sum."""
    peak_N = tl.max(logits[0], 1)
    for j in tl.static_range(1, len(logits)):
        peak_N = tl.maximum(peak_N, tl.max(logits[j], 1))
    scale *= 1.4426950408889634  # for powers of 2 instead of e
    weights = ()
    sum_N = tl.zeros_like(peak_N)
    for j in tl.static_range(len(logits)):
        weights += (tl.exp2(logits[j] * scale - (peak_N * scale)[:, None]),)
        sum_N += tl.sum(weights[j], 1)
    return weights, sum_N


@kernel
def without_empty_slots(logit_NM, start, TOKENS):
    """The logits of keys from `start` on, with none left for those past the last token."""
    if start + logit_NM.shape[1] > TOKENS:
        key_M = start + tl.arange(0, logit_NM.shape[1])
        logit_NM = tl.where((key_M < TOKENS)[None, :], logit_NM, float("-inf"))
    return logit_NM


@kernel
def weighed(weights, sum_N, values, PRECISION):
    """The mean of the values by the weights, whose sum this is."""
    out_Nd = tl.zeros([weights[0].shape[0], values[0].shape[1]], tl.float32)
    for j in tl.static_range(len(values)):
        out_Nd = tl.dot(weights[j].to(values[j].dtype), values[j], out_Nd, input_precision=PRECISION)
    return out_Nd * (1.0 / sum_N)[:, None]


@kernel
def shares_of(weights, sum_N, values, out_grad_Nd, PRECISION):
    """Weights that add up to 1, their gradients, each a tile per block of keys, and the mean of these by those."""
    inverse_N1 = (1.0 / sum_N)[:, None]
    shares = ()
    share_grads = ()
    mean_grad_N = tl.zeros_like(sum_N)
    for j in tl.static_range(len(values)):
        shares += (weights[j] * inverse_N1,)
        share_grads += (tl.dot(out_grad_Nd, tl.trans(values[j]), input_precision=PRECISION),)
        mean_grad_N += tl.sum(shares[j] * share_grads[j], 1)
    return shares, share_grads, mean_grad_N


@kernel
def load_all(matrix, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, TAIL):
    """The rows of all tokens: those of the main block, and those of the tail if there is one."""
    blocks = (load(matrix, 0, MAIN, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK),)
    if TOKENS > MAIN:
        blocks += (load(matrix, MAIN, TAIL, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK),)
    return blocks


@kernel
def load_numbers(numbers, WIDTH, WIDTH_BLOCK):
    """As many as a row has; 0 past the last."""
    width_d = tl.arange(0, WIDTH_BLOCK)
    return tl.load(numbers + width_d, mask=width_d < WIDTH, other=0.0)


@kernel
def add_bias(rows_Nd, bias_d):
    return rows_Nd + bias_d.to(rows_Nd.dtype)[None, :]


@kernel
def load(matrix, start, SIZE, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK):
    """The rows of SIZE tokens; 0 past the last token and past the last number of a row."""
    offset_Nd, used_Nd = _offsets(start, SIZE, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
    return tl.load(matrix + offset_Nd, mask=used_Nd, other=0.0)


@kernel
def store(matrix, rows_Nd, start, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK):
    offset_Nd, used_Nd = _offsets(start, rows_Nd.shape[0], ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
    tl.store(matrix + offset_Nd, rows_Nd.to(matrix.dtype.element_ty), mask=used_Nd)


@kernel
def _offsets(start, SIZE, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK):
    """Where numbers of tokens lie, and which of them there are."""
    at_N, used_N = places_of(start, SIZE, ROW, TOKENS, FIRST)
    width_1d = tl.arange(0, WIDTH_BLOCK)[None, :]
    return at_N[:, None] + width_1d, used_N[:, None] & (width_1d < WIDTH)


@kernel
def places_of(start, SIZE, ROW, TOKENS, FIRST):
    """Where tokens lie in a matrix with rows that are ROW numbers apart, and which of them there are."""
    position_N = start + tl.arange(0, SIZE)
    token_N = position_N
    if FIRST > 0:
        token_N = tl.where(position_N < TOKENS - FIRST, position_N + FIRST, position_N + FIRST - TOKENS)
    return token_N * ROW, position_N < TOKENS
