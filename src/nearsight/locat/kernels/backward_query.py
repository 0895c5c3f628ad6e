"""Gradients of attention with Gaussians by queries, precisions and strengths: a program per tile of queries.

What a query's Gaussian gets is two sums over the grid rows for each grid column, one multiply-add each per pair of
tokens; what is left to do with them is done once per query.

Shape suffixes: N queries of a tile, M key slots of a tile = R grid rows × C grid columns, d head size.
"""

from nearsight.locat.kernels.parts import (
    add_products,
    add_rows,
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
def backward_query_kernel(
    query,
    key,
    value,
    out_grad,
    precision,
    strength,
    log_sum,
    out,
    notes,
    query_grad,
    precision_grad,
    strength_grad,
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
    out_grad_b,
    out_grad_h,
    out_grad_n,
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
    """Weights are made again from the logarithms of their sums, which the forward left. Of each query, five numbers are
    noted for the pass that is for keys: this logarithm, the weighted mean of gradients by weights, and its Gaussian.
    """
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
    out_grad_Nd = load_rows(
        out_grad + image * out_grad_b + head * out_grad_h, token_N, used_N, out_grad_n, WIDTH, WIDTH_BLOCK, MASKED=True
    )
    in_rows = (image * TOKENS * num_heads + head) * WIDTH
    out_Nd = load_rows(out + in_rows, token_N, used_N, num_heads * WIDTH, WIDTH, WIDTH_BLOCK, MASKED=True)
    mean_grad_N = tl.sum(out_Nd.to(tl.float32) * out_grad_Nd.to(tl.float32), 1)
    of_head = (image * num_heads + head) * TOKENS
    log_sum_N = tl.load(log_sum + of_head + token_N, mask=used_N, other=float("inf"))
    y_N, x_N, steep_y_N, steep_x_N, strength_N = load_bumps(
        precision + image * precision_b + head * precision_h,
        strength + image * strength_b + head * strength_h,
        token_N, precision_p, precision_a, strength_p, PREFIX, COLS, TOKENS,
    )  # fmt: skip
    height_N = strength_N * (1.0 / scale)
    notes += 5 * of_head + token_N
    tl.store(notes, log_sum_N, mask=used_N)
    tl.store(notes + TOKENS, mean_grad_N, mask=used_N)
    tl.store(notes + 2 * TOKENS, height_N, mask=used_N)
    tl.store(notes + 3 * TOKENS, steep_y_N, mask=used_N)
    tl.store(notes + 4 * TOKENS, steep_x_N, mask=used_N)

    query_grad_Nd = tl.zeros([QUERIES, WIDTH_BLOCK], tl.float32)
    level_N = tl.zeros([QUERIES], tl.float32)  # Σ gradient · Gaussian
    level_y_N = tl.zeros([QUERIES], tl.float32)  # the same times squared distances
    level_x_N = tl.zeros([QUERIES], tl.float32)
    for first_col in range(0, COLS, TILE_COLS):
        square_NC = squares(x_N, first_col, TILE_COLS, furthest, CLAMPED)
        col_NC = tl.exp2(square_NC * steep_x_N[:, None])
        sums = query_grad_Nd, tl.zeros([QUERIES, TILE_COLS], tl.float32), tl.zeros([QUERIES, TILE_COLS], tl.float32)
        for first_row in range(0, WHOLE_ROWS, TILE_ROWS):
            sums = _attend_back(
                sums, query_Nd, out_grad_Nd, log_sum_N, mean_grad_N, key, value, key_n, value_n, y_N, steep_y_N,
                height_N, col_NC, first_row, first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK,
                TILE_ROWS, TILE_COLS, CLAMPED, PRODUCTS, True,
            )  # fmt: skip
        # The tiles of the last columns go further down, to the prefix tokens.
        for first_row in tl.range(
            WHOLE_ROWS, ROWS + (first_col + 1) // (LAST_COL + 1) * PREFIX_ROWS, TILE_ROWS, num_stages=REST_STAGES
        ):
            sums = _attend_back(
                sums, query_Nd, out_grad_Nd, log_sum_N, mean_grad_N, key, value, key_n, value_n, y_N, steep_y_N,
                height_N, col_NC, first_row, first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK,
                TILE_ROWS, TILE_COLS, CLAMPED, PRODUCTS, False,
            )  # fmt: skip
        query_grad_Nd, level_NC, level_y_NC = sums
        level_N += tl.sum(level_NC * col_NC, 1)
        level_y_N += tl.sum(level_y_NC * col_NC, 1)
        level_x_N += tl.sum(level_NC * col_NC * square_NC, 1)

    store_rows(query_grad + in_rows, query_grad_Nd * scale, token_N, used_N, num_heads * WIDTH, WIDTH, WIDTH_BLOCK)
    patch_N = (image * num_heads + head) * (ROWS * COLS) + token_N - PREFIX
    is_patch_N = used_N & (token_N >= PREFIX)
    tl.store(strength_grad + patch_N, level_N, mask=is_patch_N)
    tl.store(precision_grad + 2 * patch_N, -strength_N * level_y_N, mask=is_patch_N)
    tl.store(precision_grad + 2 * patch_N + 1, -strength_N * level_x_N, mask=is_patch_N)


@kernel
def _attend_back(
    sums, query_Nd, out_grad_Nd, log_sum_N, mean_grad_N, key, value, key_n, value_n, y_N, steep_y_N,
    height_N, col_NC, first_row, first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK,
    TILE_ROWS, TILE_COLS, CLAMPED, PRODUCTS, WHOLE,
):  # fmt: skip
    """(gradient by the queries / scale, Σ over rows of gradient · row factor, the same times squared distances), with
    one tile of keys more.
    """
    MASKED: tl.constexpr = not WHOLE or COLS % TILE_COLS != 0
    token_M, used_M = key_slots(first_row, first_col, ROWS, COLS, PREFIX, TILE_ROWS, TILE_COLS, WHOLE)
    key_Md = load_rows(key, token_M, used_M, key_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    value_Md = load_rows(value, token_M, used_M, value_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    square_NR = squares(y_N, first_row, TILE_ROWS, furthest, CLAMPED)
    row_NR = row_factors(square_NR, steep_y_N, first_row, ROWS, WHOLE)
    logit_NM = tl.dot(query_Nd, tl.trans(key_Md), input_precision=PRODUCTS)
    weight_grad_NM = tl.dot(out_grad_Nd, tl.trans(value_Md), input_precision=PRODUCTS)
    logit_NM = add_products(logit_NM, row_NR * height_N[:, None], col_NC)
    weight_NM = tl.exp2(logit_NM * (scale * 1.4426950408889634) - log_sum_N[:, None])
    if MASKED:
        weight_NM = tl.where(used_M[None, :], weight_NM, 0.0)
    logit_grad_NM = weight_NM * (weight_grad_NM - mean_grad_N[:, None])

    query_grad_Nd, level_NC, level_y_NC = sums
    query_grad_Nd = tl.dot(logit_grad_NM.to(query_Nd.dtype), key_Md, query_grad_Nd, input_precision=PRODUCTS)
    level_NC = add_rows(level_NC, logit_grad_NM, row_NR)
    level_y_NC = add_rows(level_y_NC, logit_grad_NM, row_NR * square_NR)
    return query_grad_Nd, level_NC, level_y_NC
