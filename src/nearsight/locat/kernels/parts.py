"""What the kernels share: where tokens lie, how a bias falls with distance, and which keys are near.

Shape suffixes: N queries of a tile, M key slots of a tile = R grid rows × C grid columns, d head size.
"""

from nearsight.triton_language import kernel, tl


@kernel
def program_place(TILES, num_heads):
    """(image, head, tile) of a program: neighbours work on the same head, and find its rows in the cache."""
    head = tl.program_id(0) // TILES
    return (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64), tl.program_id(0) % TILES


@kernel
def key_slots(first_row, first_col, ROWS, COLS, PREFIX, TILE_ROWS, TILE_COLS, WHOLE):
    """(token, whether there is one) of the slots of a tile. WHOLE: no slot lies below the last row."""
    down_M = tl.arange(0, TILE_ROWS * TILE_COLS) // TILE_COLS
    across_M = tl.arange(0, TILE_ROWS * TILE_COLS) % TILE_COLS
    row_M = first_row + down_M
    col_M = first_col + across_M
    token_M = PREFIX + row_M * COLS + col_M
    used_M = col_M < COLS
    if not WHOLE:
        # Prefix tokens lie below the last row, in the tiles of the last columns.
        prefix_M = (row_M - ROWS) * TILE_COLS + across_M
        is_prefix_M = (prefix_M >= 0) & (prefix_M < PREFIX) & (col_M - across_M + TILE_COLS >= COLS)
        used_M = ((row_M < ROWS) & used_M) | is_prefix_M
        token_M = tl.where(is_prefix_M, prefix_M, token_M)
    return token_M, used_M


@kernel
def load_rows(matrix, token_N, used_N, stride, WIDTH, WIDTH_BLOCK, MASKED):
    """The rows of some tokens; 0 where there is none, and past the last number of a row."""
    width_1d = tl.arange(0, WIDTH_BLOCK)[None, :]
    place_Nd = matrix + token_N[:, None] * stride + width_1d
    if MASKED:
        return tl.load(place_Nd, mask=used_N[:, None] & (width_1d < WIDTH), other=0.0)
    return tl.load(place_Nd)


@kernel
def load_columns(matrix, token_M, used_M, stride, WIDTH, WIDTH_BLOCK):
    """The rows of some tokens, as columns."""
    width_d1 = tl.arange(0, WIDTH_BLOCK)[:, None]
    place_dM = matrix + token_M[None, :] * stride + width_d1
    return tl.load(place_dM, mask=used_M[None, :] & (width_d1 < WIDTH), other=0.0)


@kernel
def store_rows(matrix, rows_Nd, token_N, used_N, stride, WIDTH, WIDTH_BLOCK):
    width_1d = tl.arange(0, WIDTH_BLOCK)[None, :]
    place_Nd = matrix + token_N[:, None] * stride + width_1d
    tl.store(place_Nd, rows_Nd.to(matrix.dtype.element_ty), mask=used_N[:, None] & (width_1d < WIDTH))


@kernel
def load_bumps(precision, strength, token_N, precision_p, precision_a, strength_p, PREFIX, TOKENS, SHAPE):
    """(steepness by y, steepness by x, strength) of the biases of some queries.

    A factor of a Gaussian is 2^(steepness · distance²); of the other shapes, r² is a sum of steepness · distance².
    Prefix tokens, and those past the last, have strength 0.
    """
    STEEP: tl.constexpr = -1.4426950408889634 if SHAPE == "gaussian" else 2.0
    patch_N = token_N - PREFIX
    used_N = (patch_N >= 0) & (token_N < TOKENS)
    steep_y_N = tl.load(precision + patch_N * precision_p, mask=used_N, other=0.0) * STEEP
    steep_x_N = tl.load(precision + patch_N * precision_p + precision_a, mask=used_N, other=0.0) * STEEP
    strength_N = tl.load(strength + patch_N * strength_p, mask=used_N, other=0.0)
    return steep_y_N, steep_x_N, strength_N


@kernel
def places(token_N, PREFIX, COLS):
    """(y, x) of some patches; of other tokens, anything.

    In floating point, where it is exact for some millions of patches: the compiler would make distances between
    integers of distances between floats, and convert each.
    """
    patch_N = (token_N - PREFIX).to(tl.float32)
    y_N = tl.floor((patch_N + 0.5) * (1.0 / COLS))
    return y_N, patch_N - y_N * COLS


@kernel
def squares(place_N, first, SIZE, furthest, CLAMPED):
    """Squared distances, by one axis, to the grid lines from `first` on."""
    # Matrix units leave a thread every eighth column or so. What it has to know of its columns is then two numbers.
    LANES: tl.constexpr = 8 if SIZE >= 8 else SIZE
    away_NL = (place_N - tl.cast(first, tl.float32))[:, None] - tl.arange(0, LANES).to(tl.float32)[None, :]
    step_S = (tl.arange(0, SIZE // LANES) * LANES).to(tl.float32)
    away_NSL = away_NL[:, None, :] - step_S[None, :, None]
    square_NS = tl.reshape(away_NSL * away_NSL, (place_N.shape[0], SIZE))
    return tl.minimum(square_NS, furthest) if CLAMPED else square_NS


@kernel
def row_factors(square_NR, steep_y_N, first_row, ROWS, WHOLE):
    """What the Gaussians are by their rows: 0 below the last, where prefix tokens lie."""
    return on_grid(tl.exp2(square_NR * steep_y_N[:, None]), first_row, ROWS, WHOLE, 0.0)


@kernel
def on_grid(of_row_NR, first_row, ROWS, WHOLE, below):
    """Numbers of grid rows, and another one below the last row."""
    if not WHOLE:
        row_1R = first_row + tl.arange(0, of_row_NR.shape[1])[None, :]
        of_row_NR = tl.where(row_1R < ROWS, of_row_NR, below)
    return of_row_NR


@kernel
def in_tile(of_row_NR, of_col_NC):
    """Numbers of rows, and numbers of columns, for each key of a tile."""
    shape: tl.constexpr = (of_row_NR.shape[0], of_row_NR.shape[1], of_col_NC.shape[1])
    size: tl.constexpr = (shape[0], shape[1] * shape[2])
    of_row_NM = tl.reshape(tl.broadcast_to(of_row_NR[:, :, None], shape), size)
    return of_row_NM, tl.reshape(tl.broadcast_to(of_col_NC[:, None, :], shape), size)


@kernel
def of_columns(square_NC, steep_x_N, SHAPE):
    """What biases are by their columns: factors of Gaussians, or parts of r²."""
    steep_NC = square_NC * steep_x_N[:, None]
    return tl.exp2(steep_NC) if SHAPE == "gaussian" else steep_NC


@kernel
def biases(square_NR, steep_y_N, col_NC, first_row, ROWS, WHOLE, SHAPE):
    """(by row, by column, slope): biases are the product of the first two, 0 below the last row.

    But for Gaussians, they are no product of a row and a column: these have one number for each pair, and slopes.
    """
    if SHAPE == "gaussian":
        row_NR = row_factors(square_NR, steep_y_N, first_row, ROWS, WHOLE)
        other, slope = col_NC, col_NC
    else:
        row_NR = on_grid(tl.zeros_like(square_NR) + 1.0, first_row, ROWS, WHOLE, 0.0)
        y_NM, x_NM = in_tile(square_NR * steep_y_N[:, None], col_NC)
        other, slope = falls(y_NM + x_NM, SHAPE)
    return row_NR, other, slope


@kernel
def falls(square_NM, SHAPE):
    """(bias where r² is this, slope): by a precision, it changes by −slope·Δ².

    Where r is 0 there is no slope: a patch that looks at itself has it by no precision.
    """
    radius_NM = tl.sqrt(square_NM)
    inverse_NM = tl.where(square_NM < 1.2e-38, 0.0, 1.0 / radius_NM)
    if SHAPE == "laplace":
        fall_NM = tl.exp(-radius_NM)
        slope_NM = fall_NM * inverse_NM
    elif SHAPE == "inverse":
        fall_NM = 1.0 / (1.0 + radius_NM)
        slope_NM = fall_NM * fall_NM * inverse_NM
    else:  # "distance"
        fall_NM = radius_NM
        slope_NM = -inverse_NM
    return fall_NM, slope_NM


@kernel
def add_bias(tile_NM, row_NR, other, SHAPE):
    """A tile, plus biases in the two parts that `biases` gives."""
    if SHAPE == "gaussian":
        tile_NM = add_products(tile_NM, row_NR, other)
    else:
        shape: tl.constexpr = (tile_NM.shape[0], row_NR.shape[1], tile_NM.shape[1] // row_NR.shape[1])
        row_NM = tl.reshape(tl.broadcast_to(row_NR[:, :, None], shape), tile_NM.shape)
        tile_NM = tl.fma(row_NM, other, tile_NM)
    return tile_NM


@kernel
def add_products(tile_NM, row_NR, col_NC):
    """A tile, plus the product of the factors of its rows and columns."""
    row_NM, col_NM = in_tile(row_NR, col_NC)
    return tl.fma(row_NM, col_NM, tile_NM)


@kernel
def load_reach(reach, place, token_N, PREFIX, NEAR):
    """(reach of a head in patches, its square for each query): prefix tokens see everything."""
    away = float("inf")
    if NEAR:
        away = tl.load(reach + place)
    return away, tl.where(token_N >= PREFIX, away * away, float("inf"))


@kernel
def are_near(square_NR, left_NC, first_row, ROWS, WHOLE):
    """Which keys of a tile queries see: those with no more Δ² by row than is left by column, and prefix tokens."""
    square_NM, left_NM = in_tile(on_grid(square_NR, first_row, ROWS, WHOLE, float("-inf")), left_NC)
    return square_NM <= left_NM


@kernel
def rows_within(first_row, last_row, away, ROWS):
    """(first, end) of the grid rows that are so near to some."""
    whole = tl.minimum(away, ROWS).to(tl.int32)
    return tl.maximum(first_row - whole, 0), tl.minimum(last_row + whole + 1, ROWS)


@kernel
def rows_of_keys(first_token, QUERIES, away, ROWS, COLS, PREFIX, TILE_ROWS, NEAR):
    """(first, end) of the grid rows that queries from `first_token` on see; tiles start with the first."""
    first, end = 0, ROWS
    if NEAR:
        last_token = tl.minimum(first_token + QUERIES, PREFIX + ROWS * COLS) - 1
        away = tl.where(first_token < PREFIX, float("inf"), away)
        row = tl.maximum(first_token - PREFIX, 0) // COLS
        first, end = rows_within(row, tl.maximum(last_token - PREFIX, 0) // COLS, away, ROWS)
        first = first // TILE_ROWS * TILE_ROWS
    return first, end


@kernel
def add_rows(sum_NC, tile_NM, row_NR):
    """A sum, plus the grid rows of a tile times their factors.

    They are added one after the other, which is a multiply-add each; `tl.sum` would add them in pairs.
    """
    tile_NRC = tl.reshape(tile_NM, (tile_NM.shape[0], row_NR.shape[1], sum_NC.shape[1]))
    parts = (tile_NRC * row_NR[:, :, None],)
    for _ in tl.static_range(6):
        if parts[0].shape[1] > 1:
            parts = _halves(parts, parts[0].shape[0], parts[0].shape[1], parts[0].shape[2])
    for i in tl.static_range(len(parts)):
        sum_NC += tl.reshape(parts[i], sum_NC.shape)
    return sum_NC


@kernel
def _halves(parts, N, R, C):
    halves = ()
    for i in tl.static_range(len(parts)):
        halves += tl.split(tl.permute(tl.reshape(parts[i], (N, 2, R // 2, C)), (0, 2, 3, 1)))
    return halves
