"""The three passes of attention with Gaussians: softmax(scale · Q Kᵀ + Gaussians) V, and its gradients.

A program is for a tile of queries and goes over all keys, or in the last pass for a tile of keys, over all queries.

Shape suffixes: N queries of a tile, M key slots of a tile = R grid rows × C grid columns, d head size.
"""

from nearsight.locat.kernels.parts import (
    add_products,
    add_rows,
    key_slots,
    load_bumps,
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
def forward_kernel(
    query, key, value, precision, strength, out, log_sum, scale, furthest, num_heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, precision_b, precision_h, precision_p,
    precision_a, strength_b, strength_h, strength_p,
    ROWS: tl.constexpr, COLS: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    REST_STAGES: tl.constexpr, CLAMPED: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
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


@kernel
def backward_query_kernel(
    query, key, value, out_grad, precision, strength, log_sum, out, notes, query_grad, precision_grad, strength_grad,
    scale, furthest, num_heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, out_grad_b, out_grad_h, out_grad_n,
    precision_b, precision_h, precision_p, precision_a, strength_b, strength_h, strength_p,
    ROWS: tl.constexpr, COLS: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    REST_STAGES: tl.constexpr, CLAMPED: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Gradients by queries, precisions and strengths.

    Weights are made again from the logarithms of their sums, which the forward left. What a query's Gaussian gets is
    two sums over the grid rows for each grid column, one multiply-add each per pair of tokens; what is left to do with
    them is done once per query. Of each query, five numbers are noted for the pass that is for keys: this logarithm,
    the weighted mean of gradients by weights, and its Gaussian.
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


@kernel
def backward_key_kernel(
    query, key, value, out_grad, notes, key_grad, value_grad, scale, furthest, num_heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, out_grad_b, out_grad_h, out_grad_n,
    ROWS: tl.constexpr, COLS: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, CLAMPED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Gradients by keys and values.

    `notes` are by `backward_query_kernel`. A tile's slots without a token need no masks: what is made of them goes
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
