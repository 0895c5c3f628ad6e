"""Gradients of attention with Gaussians by keys and values: a program per tile of keys, which goes over all queries.

Shape suffixes: N queries of a tile, M key slots of a tile = R grid rows × C grid columns, d head size.
"""

from nearsight.locat.kernels.parts import (
    add_products,
    key_slots,
    load_columns,
    load_rows,
    places,
    program_place,
    row_factors,
    squares,
    store_rows,
)
from nearsight.triton_language import kernel, tl


@kernel
def backward_key_kernel(
    query,
    key,
    value,
    out_grad,
    notes,
    key_grad,
    value_grad,
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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PREFIX: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    CLAMPED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """`notes` are by `backward_query_kernel`. A tile's slots without a token need no masks: what is made of them goes
    nowhere. Queries past the last are the last again, with weights of 0.
    """
    TOKENS: tl.constexpr = PREFIX + ROWS * COLS
    TILES_DOWN: tl.constexpr = (ROWS + TILE_ROWS - 1) // TILE_ROWS
    TILES_ACROSS: tl.constexpr = (COLS + TILE_COLS - 1) // TILE_COLS
    PREFIX_ROWS: tl.constexpr = (PREFIX + TILE_COLS - 1) // TILE_COLS
    TILES_MORE: tl.constexpr = (ROWS + PREFIX_ROWS + TILE_ROWS - 1) // TILE_ROWS - TILES_DOWN
    image, head, tile = program_place(TILES_DOWN * TILES_ACROSS + TILES_MORE, num_heads)
    across = tl.minimum(tile // TILES_DOWN, TILES_ACROSS - 1)
    first_col = across * TILE_COLS
    first_row = (tile - across * TILES_DOWN) * TILE_ROWS
    token_M, used_M = key_slots(first_row, first_col, ROWS, COLS, PREFIX, TILE_ROWS, TILE_COLS, WHOLE=False)
    # Loaded as columns: rows would be written to shared memory again for every tile of queries.
    key_dM = load_columns(key + image * key_b + head * key_h, token_M, used_M, key_n, WIDTH, WIDTH_BLOCK)
    value_dM = load_columns(value + image * value_b + head * value_h, token_M, used_M, value_n, WIDTH, WIDTH_BLOCK)
    query += image * query_b + head * query_h
    out_grad += image * out_grad_b + head * out_grad_h
    notes += 5 * (image * num_heads + head) * TOKENS

    key_grad_Md = tl.zeros([TILE_ROWS * TILE_COLS, WIDTH_BLOCK], tl.float32)
    value_grad_Md = tl.zeros([TILE_ROWS * TILE_COLS, WIDTH_BLOCK], tl.float32)
    for first_query in range(0, TOKENS, QUERIES):
        token_N = first_query + tl.arange(0, QUERIES)
        near_N = tl.minimum(token_N, TOKENS - 1)
        query_Nd = load_rows(query, near_N, near_N >= 0, query_n, WIDTH, WIDTH_BLOCK, WIDTH != WIDTH_BLOCK)
        out_grad_Nd = load_rows(out_grad, near_N, near_N >= 0, out_grad_n, WIDTH, WIDTH_BLOCK, WIDTH != WIDTH_BLOCK)
        log_sum_N = tl.where(token_N < TOKENS, tl.load(notes + near_N), float("inf"))
        mean_grad_N = tl.load(notes + TOKENS + near_N)
        height_N = tl.load(notes + 2 * TOKENS + near_N)
        steep_y_N = tl.load(notes + 3 * TOKENS + near_N)
        steep_x_N = tl.load(notes + 4 * TOKENS + near_N)
        logit_NM = tl.dot(query_Nd, key_dM, input_precision=PRODUCTS)
        weight_grad_NM = tl.dot(out_grad_Nd, value_dM, input_precision=PRODUCTS)
        y_N, x_N = places(token_N, PREFIX, COLS)
        col_NC = tl.exp2(squares(x_N, first_col, TILE_COLS, furthest, CLAMPED) * steep_x_N[:, None])
        square_NR = squares(y_N, first_row, TILE_ROWS, furthest, CLAMPED)
        row_NR = row_factors(square_NR, steep_y_N, first_row, ROWS, WHOLE=False) * height_N[:, None]
        logit_NM = add_products(logit_NM, row_NR, col_NC)
        weight_NM = tl.exp2(logit_NM * (scale * 1.4426950408889634) - log_sum_N[:, None])
        weight_MN = tl.trans(weight_NM.to(query_Nd.dtype))
        value_grad_Md = tl.dot(weight_MN, out_grad_Nd, value_grad_Md, input_precision=PRODUCTS)
        logit_grad_NM = weight_NM * (weight_grad_NM - mean_grad_N[:, None])
        logit_grad_MN = tl.trans(logit_grad_NM.to(query_Nd.dtype))
        key_grad_Md = tl.dot(logit_grad_MN, query_Nd, key_grad_Md, input_precision=PRODUCTS)

    in_rows = (image * TOKENS * num_heads + head) * WIDTH
    store_rows(key_grad + in_rows, key_grad_Md * scale, token_M, used_M, num_heads * WIDTH, WIDTH, WIDTH_BLOCK)
    store_rows(value_grad + in_rows, value_grad_Md, token_M, used_M, num_heads * WIDTH, WIDTH, WIDTH_BLOCK)
