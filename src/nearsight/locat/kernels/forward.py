"""softmax(scale · Q Kᵀ + Gaussians) V: a program per tile of queries, which goes over all keys.

Shape suffixes: N queries of a tile, M key slots of a tile = R grid rows × C grid columns, d head size.
"""

from nearsight.locat.kernels.parts import (
    add_products,
    key_slots,
    load_bumps,
    load_rows,
    program_place,
    row_factors,
    squares,
    store_rows,
)
from nearsight.triton_language import kernel, tl


@kernel
def forward_kernel(
    query,
    key,
    value,
    precision,
    strength,
    out,
    log_sum,
    scale,
    furthest,
    num_heads,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    precision_b,
    precision_h,
    precision_p,
    precision_a,
    strength_b,
    strength_h,
    strength_p,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PREFIX: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    REST_STAGES: tl.constexpr,
    CLAMPED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    TOKENS: tl.constexpr = PREFIX + ROWS * COLS
    LAST_COL: tl.constexpr = (COLS - 1) // TILE_COLS * TILE_COLS
    PREFIX_ROWS: tl.constexpr = (PREFIX + TILE_COLS - 1) // TILE_COLS
    image, head, tile = program_place((TOKENS + QUERIES - 1) // QUERIES, num_heads)
    key += image * key_b + head * key_h
    value += image * value_b + head * value_h
    token_N = tile * QUERIES + tl.arange(0, QUERIES)
    used_N = token_N < TOKENS
    query_Nd = load_rows(
        query + image * query_b + head * query_h, token_N, used_N, query_n, WIDTH, WIDTH_BLOCK, MASKED=True
    )
    y_N, x_N, steep_y_N, steep_x_N, strength_N = load_bumps(
        precision + image * precision_b + head * precision_h,
        strength + image * strength_b + head * strength_h,
        token_N, precision_p, precision_a, strength_p, PREFIX, COLS, TOKENS,
    )  # fmt: skip
    strength_N *= 1.0 / scale  # products are scaled with what is added to them

    peak_N = tl.full([QUERIES], float("-inf"), tl.float32)
    sum_N = tl.zeros([QUERIES], tl.float32)
    out_Nd = tl.zeros([QUERIES, WIDTH_BLOCK], tl.float32)
    state = peak_N, sum_N, out_Nd
    for first_col in range(0, COLS, TILE_COLS):
        col_NC = tl.exp2(squares(x_N, first_col, TILE_COLS, furthest, CLAMPED) * steep_x_N[:, None])
        for first_row in range(0, WHOLE_ROWS, TILE_ROWS):
            state = _attend(
                state, query_Nd, key, value, key_n, value_n, y_N, steep_y_N, strength_N, col_NC, first_row, first_col,
                scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED, PRODUCTS, True,
            )  # fmt: skip
        # The tiles of the last columns go further down, to the prefix tokens.
        for first_row in tl.range(
            WHOLE_ROWS, ROWS + (first_col + 1) // (LAST_COL + 1) * PREFIX_ROWS, TILE_ROWS, num_stages=REST_STAGES
        ):
            state = _attend(
                state, query_Nd, key, value, key_n, value_n, y_N, steep_y_N, strength_N, col_NC, first_row, first_col,
                scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED, PRODUCTS, False,
            )  # fmt: skip

    peak_N, sum_N, out_Nd = state
    store_rows(
        out + (image * TOKENS * num_heads + head) * WIDTH, out_Nd * (1.0 / sum_N)[:, None], token_N, used_N,
        num_heads * WIDTH, WIDTH, WIDTH_BLOCK,
    )  # fmt: skip
    log_sum += (image * num_heads + head) * TOKENS
    tl.store(log_sum + token_N, peak_N * (scale * 1.4426950408889634) + tl.log2(sum_N), mask=used_N)


@kernel
def _attend(
    state, query_Nd, key, value, key_n, value_n, y_N, steep_y_N, strength_N, col_NC, first_row, first_col,
    scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED, PRODUCTS, WHOLE,
):  # fmt: skip
    """(largest logit / scale, sum of weights, weighted sum of values), with one tile of keys more."""
    MASKED: tl.constexpr = not WHOLE or COLS % TILE_COLS != 0
    token_M, used_M = key_slots(first_row, first_col, ROWS, COLS, PREFIX, TILE_ROWS, TILE_COLS, WHOLE)
    key_Md = load_rows(key, token_M, used_M, key_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    value_Md = load_rows(value, token_M, used_M, value_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    square_NR = squares(y_N, first_row, TILE_ROWS, furthest, CLAMPED)
    row_NR = row_factors(square_NR, steep_y_N, first_row, ROWS, WHOLE) * strength_N[:, None]
    logit_NM = tl.dot(query_Nd, tl.trans(key_Md), input_precision=PRODUCTS)
    logit_NM = add_products(logit_NM, row_NR, col_NC)
    if MASKED:
        logit_NM = tl.where(used_M[None, :], logit_NM, float("-inf"))

    peak_N, sum_N, out_Nd = state
    new_peak_N = tl.maximum(peak_N, tl.max(logit_NM, 1))
    scale *= 1.4426950408889634  # for powers of 2 instead of e
    weight_NM = tl.exp2(logit_NM * scale - (new_peak_N * scale)[:, None])
    shrink_N = tl.exp2((peak_N - new_peak_N) * scale)
    sum_N = sum_N * shrink_N + tl.sum(weight_NM, 1)
    out_Nd = tl.dot(weight_NM.to(query_Nd.dtype), value_Md, out_Nd * shrink_N[:, None], input_precision=PRODUCTS)
    return new_peak_N, sum_N, out_Nd
