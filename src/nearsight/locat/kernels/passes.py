"""The three passes of attention with a local bias: softmax(scale · Q Kᵀ + bias) V, and its gradients.

A program is for a tile of queries and goes over all keys, or in the last pass for a tile of keys, over all queries.
Where heads have a reach, it goes over the grid rows within it alone, and over the tiles that hold prefix tokens.

SHAPE is how biases fall with distance ("none": there are none), NEAR whether heads have a reach, WANTED which gradients
of biases are asked for: 0 none, 1 by strengths, 2 by precisions, too.

Shape suffixes: N queries of a tile, M key slots of a tile = R grid rows × C grid columns, d head size.
"""

from nearsight.locat.kernels.parts import (
    add_bias,
    add_rows,
    are_near,
    biases,
    key_slots,
    load_bumps,
    load_columns,
    load_reach,
    load_rows,
    of_columns,
    places,
    program_place,
    rows_of_keys,
    rows_within,
    squares,
    store_rows,
)
from nearsight.triton_language import kernel, tl


@kernel
def forward_kernel(
    query, key, value, precision, strength, reach, out, log_sum, scale, furthest, num_heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, precision_b, precision_h, precision_p,
    precision_a, strength_b, strength_h, strength_p, reach_b, reach_h,
    ROWS: tl.constexpr, COLS: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    REST_STAGES: tl.constexpr, CLAMPED: tl.constexpr, SHAPE: tl.constexpr, NEAR: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = PREFIX + ROWS * COLS
    LAST_COL: tl.constexpr = (COLS - 1) // TILE_COLS * TILE_COLS
    END: tl.constexpr = ROWS + (PREFIX + TILE_COLS - 1) // TILE_COLS if PREFIX > 0 else 0  # of rows with prefix tokens
    image, head, tile = program_place((TOKENS + QUERIES - 1) // QUERIES, num_heads)
    key += image * key_b + head * key_h
    value += image * value_b + head * value_h
    token_N = tile * QUERIES + tl.arange(0, QUERIES)
    used_N = token_N < TOKENS
    query_Nd = load_rows(
        query + image * query_b + head * query_h, token_N, used_N, query_n, WIDTH, WIDTH_BLOCK, MASKED=True
    )
    y_N, x_N = places(token_N, PREFIX, COLS)
    steep_y_N, steep_x_N, strength_N = load_bumps(
        precision + image * precision_b + head * precision_h,
        strength + image * strength_b + head * strength_h,
        token_N, precision_p, precision_a, strength_p, PREFIX, TOKENS, SHAPE,
    )  # fmt: skip
    strength_N *= 1.0 / scale  # products are scaled with what is added to them
    away, reach_N = load_reach(reach, image * reach_b + head * reach_h, token_N, PREFIX, NEAR)
    top, bottom = rows_of_keys(tile * QUERIES, QUERIES, away, ROWS, COLS, PREFIX, TILE_ROWS, NEAR)

    peak_N = tl.full([QUERIES], float("-inf"), tl.float32)
    sum_N = tl.zeros([QUERIES], tl.float32)
    out_Nd = tl.zeros([QUERIES, WIDTH_BLOCK], tl.float32)
    state = peak_N, sum_N, out_Nd
    for first_col in range(0, COLS, TILE_COLS):
        col_NC = of_columns(squares(x_N, first_col, TILE_COLS, furthest, CLAMPED), steep_x_N, SHAPE)
        left_NC = reach_N[:, None] - squares(x_N, first_col, TILE_COLS, furthest, False)
        for first_row in range(top, tl.minimum(bottom, WHOLE_ROWS), TILE_ROWS):
            state = _attend(
                state, query_Nd, key, value, key_n, value_n, y_N, steep_y_N, strength_N, col_NC, left_NC, first_row,
                first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED,
                SHAPE, NEAR, PRODUCTS, True,
            )  # fmt: skip
        # The tiles of the last columns go further down, to the prefix tokens.
        end = tl.maximum(bottom, (first_col + 1) // (LAST_COL + 1) * END)
        for first_row in tl.range(tl.maximum(top, WHOLE_ROWS), end, TILE_ROWS, num_stages=REST_STAGES):
            state = _attend(
                state, query_Nd, key, value, key_n, value_n, y_N, steep_y_N, strength_N, col_NC, left_NC, first_row,
                first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED,
                SHAPE, NEAR, PRODUCTS, False,
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
    state, query_Nd, key, value, key_n, value_n, y_N, steep_y_N, strength_N, col_NC, left_NC, first_row,
    first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH, WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED,
    SHAPE, NEAR, PRODUCTS, WHOLE,
):  # fmt: skip
    """(largest logit / scale, sum of weights, weighted sum of values), with one tile of keys more."""
    MASKED: tl.constexpr = not WHOLE or COLS % TILE_COLS != 0
    token_M, used_M = key_slots(first_row, first_col, ROWS, COLS, PREFIX, TILE_ROWS, TILE_COLS, WHOLE)
    key_Md = load_rows(key, token_M, used_M, key_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    value_Md = load_rows(value, token_M, used_M, value_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    logit_NM = tl.dot(query_Nd, tl.trans(key_Md), input_precision=PRODUCTS)
    if SHAPE != "none":
        square_NR = squares(y_N, first_row, TILE_ROWS, furthest, CLAMPED)
        row_NR, fall, _ = biases(square_NR, steep_y_N, col_NC, first_row, ROWS, WHOLE, SHAPE)
        logit_NM = add_bias(logit_NM, row_NR * strength_N[:, None], fall, SHAPE)
    if NEAR:
        near_NM = are_near(squares(y_N, first_row, TILE_ROWS, furthest, False), left_NC, first_row, ROWS, WHOLE)
        logit_NM = tl.where(near_NM, logit_NM, float("-inf"))
    if MASKED:
        logit_NM = tl.where(used_M[None, :], logit_NM, float("-inf"))

    peak_N, sum_N, out_Nd = state
    new_peak_N = tl.maximum(peak_N, tl.max(logit_NM, 1))
    if NEAR:  # a query may have seen no key so far
        new_peak_N = tl.where(new_peak_N == float("-inf"), -1e30, new_peak_N)
    scale *= 1.4426950408889634  # for powers of 2 instead of e
    weight_NM = tl.exp2(logit_NM * scale - (new_peak_N * scale)[:, None])
    shrink_N = tl.exp2((peak_N - new_peak_N) * scale)
    sum_N = sum_N * shrink_N + tl.sum(weight_NM, 1)
    out_Nd = tl.dot(weight_NM.to(query_Nd.dtype), value_Md, out_Nd * shrink_N[:, None], input_precision=PRODUCTS)
    return new_peak_N, sum_N, out_Nd


@kernel
def backward_query_kernel(
    query, key, value, out_grad, precision, strength, reach, log_sum, out, notes, query_grad, precision_grad,
    strength_grad, scale, furthest, num_heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, out_grad_b, out_grad_h, out_grad_n,
    precision_b, precision_h, precision_p, precision_a, strength_b, strength_h, strength_p, reach_b, reach_h,
    ROWS: tl.constexpr, COLS: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    REST_STAGES: tl.constexpr, CLAMPED: tl.constexpr, SHAPE: tl.constexpr, NEAR: tl.constexpr, WANTED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Gradients by queries, precisions and strengths.

    Weights are made again from the logarithms of their sums, which the forward left. What a query's bias gets is sums
    over the grid rows for each grid column, of a Gaussian two, one multiply-add each per pair of tokens; what is left
    to do with them is done once per query. Of each query, five numbers are noted for the pass that is for keys: this
    logarithm, the weighted mean of gradients by weights, and its bias.
    """
    TOKENS: tl.constexpr = PREFIX + ROWS * COLS
    LAST_COL: tl.constexpr = (COLS - 1) // TILE_COLS * TILE_COLS
    END: tl.constexpr = ROWS + (PREFIX + TILE_COLS - 1) // TILE_COLS if PREFIX > 0 else 0  # of rows with prefix tokens
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
    y_N, x_N = places(token_N, PREFIX, COLS)
    steep_y_N, steep_x_N, strength_N = load_bumps(
        precision + image * precision_b + head * precision_h,
        strength + image * strength_b + head * strength_h,
        token_N, precision_p, precision_a, strength_p, PREFIX, TOKENS, SHAPE,
    )  # fmt: skip
    height_N = strength_N * (1.0 / scale)
    away, reach_N = load_reach(reach, image * reach_b + head * reach_h, token_N, PREFIX, NEAR)
    top, bottom = rows_of_keys(tile * QUERIES, QUERIES, away, ROWS, COLS, PREFIX, TILE_ROWS, NEAR)
    notes += 5 * of_head + token_N
    tl.store(notes, log_sum_N, mask=used_N)
    tl.store(notes + TOKENS, mean_grad_N, mask=used_N)
    tl.store(notes + 2 * TOKENS, height_N, mask=used_N)
    tl.store(notes + 3 * TOKENS, steep_y_N, mask=used_N)
    tl.store(notes + 4 * TOKENS, steep_x_N, mask=used_N)

    query_grad_Nd = tl.zeros([QUERIES, WIDTH_BLOCK], tl.float32)
    level_N = tl.zeros([QUERIES], tl.float32)  # Σ gradient · bias / strength
    level_y_N = tl.zeros([QUERIES], tl.float32)  # Σ gradient · slope · squared distance
    level_x_N = tl.zeros([QUERIES], tl.float32)
    for first_col in range(0, COLS, TILE_COLS):
        square_NC = squares(x_N, first_col, TILE_COLS, furthest, CLAMPED)
        col_NC = of_columns(square_NC, steep_x_N, SHAPE)
        left_NC = reach_N[:, None] - squares(x_N, first_col, TILE_COLS, furthest, False)
        none_NC = tl.zeros([QUERIES, TILE_COLS], tl.float32)
        sums = query_grad_Nd, none_NC, none_NC, none_NC
        for first_row in range(top, tl.minimum(bottom, WHOLE_ROWS), TILE_ROWS):
            sums = _attend_back(
                sums, query_Nd, out_grad_Nd, log_sum_N, mean_grad_N, key, value, key_n, value_n, y_N, steep_y_N,
                height_N, col_NC, left_NC, first_row, first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH,
                WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED, SHAPE, NEAR, WANTED, PRODUCTS, True,
            )  # fmt: skip
        # The tiles of the last columns go further down, to the prefix tokens.
        end = tl.maximum(bottom, (first_col + 1) // (LAST_COL + 1) * END)
        for first_row in tl.range(tl.maximum(top, WHOLE_ROWS), end, TILE_ROWS, num_stages=REST_STAGES):
            sums = _attend_back(
                sums, query_Nd, out_grad_Nd, log_sum_N, mean_grad_N, key, value, key_n, value_n, y_N, steep_y_N,
                height_N, col_NC, left_NC, first_row, first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH,
                WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED, SHAPE, NEAR, WANTED, PRODUCTS, False,
            )  # fmt: skip
        query_grad_Nd, level_NC, level_y_NC, slope_NC = sums
        if SHAPE == "gaussian":
            level_NC *= col_NC
            level_y_NC *= col_NC
            slope_NC = level_NC
        level_N += tl.sum(level_NC, 1)
        level_y_N += tl.sum(level_y_NC, 1)
        level_x_N += tl.sum(slope_NC * square_NC, 1)

    store_rows(query_grad + in_rows, query_grad_Nd * scale, token_N, used_N, num_heads * WIDTH, WIDTH, WIDTH_BLOCK)
    patch_N = (image * num_heads + head) * (ROWS * COLS) + token_N - PREFIX
    is_patch_N = used_N & (token_N >= PREFIX)
    if WANTED >= 1:
        tl.store(strength_grad + patch_N, level_N, mask=is_patch_N)
    if WANTED >= 2:
        tl.store(precision_grad + 2 * patch_N, -strength_N * level_y_N, mask=is_patch_N)
        tl.store(precision_grad + 2 * patch_N + 1, -strength_N * level_x_N, mask=is_patch_N)


@kernel
def _attend_back(
    sums, query_Nd, out_grad_Nd, log_sum_N, mean_grad_N, key, value, key_n, value_n, y_N, steep_y_N,
    height_N, col_NC, left_NC, first_row, first_col, scale, furthest, ROWS, COLS, PREFIX, WIDTH,
    WIDTH_BLOCK, TILE_ROWS, TILE_COLS, CLAMPED, SHAPE, NEAR, WANTED, PRODUCTS, WHOLE,
):  # fmt: skip
    """(gradient by the queries / scale, sums over rows of gradient · bias, of gradient · slope · squared distance by
    row, and of gradient · slope), with one tile of keys more. Of Gaussians, factors by columns are left out, and with
    them bias and slope are the same.
    """
    MASKED: tl.constexpr = not WHOLE or COLS % TILE_COLS != 0
    token_M, used_M = key_slots(first_row, first_col, ROWS, COLS, PREFIX, TILE_ROWS, TILE_COLS, WHOLE)
    key_Md = load_rows(key, token_M, used_M, key_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    value_Md = load_rows(value, token_M, used_M, value_n, WIDTH, WIDTH_BLOCK, MASKED or WIDTH != WIDTH_BLOCK)
    logit_NM = tl.dot(query_Nd, tl.trans(key_Md), input_precision=PRODUCTS)
    weight_grad_NM = tl.dot(out_grad_Nd, tl.trans(value_Md), input_precision=PRODUCTS)
    if SHAPE != "none":
        square_NR = squares(y_N, first_row, TILE_ROWS, furthest, CLAMPED)
        row_NR, fall, slope = biases(square_NR, steep_y_N, col_NC, first_row, ROWS, WHOLE, SHAPE)
        logit_NM = add_bias(logit_NM, row_NR * height_N[:, None], fall, SHAPE)
    weight_NM = tl.exp2(logit_NM * (scale * 1.4426950408889634) - log_sum_N[:, None])
    if NEAR:
        near_NM = are_near(squares(y_N, first_row, TILE_ROWS, furthest, False), left_NC, first_row, ROWS, WHOLE)
        weight_NM = tl.where(near_NM, weight_NM, 0.0)
    if MASKED:
        weight_NM = tl.where(used_M[None, :], weight_NM, 0.0)
    logit_grad_NM = weight_NM * (weight_grad_NM - mean_grad_N[:, None])

    query_grad_Nd, level_NC, level_y_NC, slope_NC = sums
    query_grad_Nd = tl.dot(logit_grad_NM.to(query_Nd.dtype), key_Md, query_grad_Nd, input_precision=PRODUCTS)
    if SHAPE == "gaussian":
        if WANTED >= 1:
            level_NC = add_rows(level_NC, logit_grad_NM, row_NR)
        if WANTED >= 2:
            level_y_NC = add_rows(level_y_NC, logit_grad_NM, row_NR * square_NR)
    elif WANTED >= 1:
        level_NC = add_rows(level_NC, logit_grad_NM * fall, row_NR)
        if WANTED >= 2:
            level_y_NC = add_rows(level_y_NC, logit_grad_NM * slope, row_NR * square_NR)
            slope_NC = add_rows(slope_NC, logit_grad_NM * slope, row_NR)
    return query_grad_Nd, level_NC, level_y_NC, slope_NC


@kernel
def backward_key_kernel(
    query, key, value, out_grad, reach, notes, key_grad, value_grad, scale, furthest, num_heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, out_grad_b, out_grad_h, out_grad_n,
    reach_b, reach_h,
    ROWS: tl.constexpr, COLS: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, CLAMPED: tl.constexpr,
    SHAPE: tl.constexpr, NEAR: tl.constexpr, PRODUCTS: tl.constexpr,
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
    away, _ = load_reach(reach, image * reach_b + head * reach_h, token_M, PREFIX, NEAR)
    end, skipped = _queries_within(
        first_row, across == TILES_ACROSS - 1, away, ROWS, COLS, PREFIX, QUERIES, TILE_ROWS, NEAR
    )
    for start in range(0, end, QUERIES):  # tiles with prefix tokens come first, and then those of near rows
        token_N = tl.where(start < PREFIX, start, start + skipped) + tl.arange(0, QUERIES)
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
        if SHAPE != "none":
            col_NC = of_columns(squares(x_N, first_col, TILE_COLS, furthest, CLAMPED), steep_x_N, SHAPE)
            square_NR = squares(y_N, first_row, TILE_ROWS, furthest, CLAMPED)
            row_NR, fall, _slope = biases(square_NR, steep_y_N, col_NC, first_row, ROWS, False, SHAPE)
            logit_NM = add_bias(logit_NM, row_NR * height_N[:, None], fall, SHAPE)
        weight_NM = tl.exp2(logit_NM * (scale * 1.4426950408889634) - log_sum_N[:, None])
        if NEAR:
            reach_N = tl.where(token_N >= PREFIX, away * away, float("inf"))
            left_NC = reach_N[:, None] - squares(x_N, first_col, TILE_COLS, furthest, False)
            near_NM = are_near(squares(y_N, first_row, TILE_ROWS, furthest, False), left_NC, first_row, ROWS, False)
            weight_NM = tl.where(near_NM, weight_NM, 0.0)
        weight_MN = tl.trans(weight_NM.to(query_Nd.dtype))
        value_grad_Md = tl.dot(weight_MN, out_grad_Nd, value_grad_Md, input_precision=PRODUCTS)
        logit_grad_NM = weight_NM * (weight_grad_NM - mean_grad_N[:, None])
        logit_grad_MN = tl.trans(logit_grad_NM.to(query_Nd.dtype))
        key_grad_Md = tl.dot(logit_grad_MN, query_Nd, key_grad_Md, input_precision=PRODUCTS)

    in_rows = (image * TOKENS * num_heads + head) * WIDTH
    store_rows(key_grad + in_rows, key_grad_Md * scale, token_M, used_M, num_heads * WIDTH, WIDTH, WIDTH_BLOCK)
    store_rows(value_grad + in_rows, value_grad_Md, token_M, used_M, num_heads * WIDTH, WIDTH, WIDTH_BLOCK)


@kernel
def _queries_within(first_row, is_last, away, ROWS, COLS, PREFIX, QUERIES, TILE_ROWS, NEAR):
    """(end, how many are skipped behind the tiles with prefix tokens) of the queries that see a tile of keys."""
    end, skipped = PREFIX + ROWS * COLS, 0
    if NEAR:
        last_row = first_row + TILE_ROWS - 1
        if PREFIX > 0:  # which all queries see
            away = tl.where(is_last & (last_row >= ROWS), float("inf"), away)
        first, end_row = rows_within(first_row, last_row, away, ROWS)
        tiles = (PREFIX + QUERIES - 1) // QUERIES * QUERIES
        skipped = tl.maximum((PREFIX + first * COLS) // QUERIES * QUERIES - tiles, 0)
        end = PREFIX + end_row * COLS - skipped
    return end, skipped
