"""Attention distance and entropy against loops that nobody could get wrong, closed forms and properties."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.metrics import (
    attention_distance,
    attention_entropy,
    grid_distances,
    least_share_on_itself,
    next_patch_distance,
    uniform_attention_distance,
    within_reach,
)


def random_attention(*shape: int, num_tokens: int, seed: int = 0, sharpness: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, num_tokens, num_tokens, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(-1)


def distance_loop(attn: Tensor, grid_size: tuple[int, int], prefix: int, renormalize: bool) -> float:
    """MAD of one head of one image, equation by equation."""
    rows, cols = grid_size
    diagonal = math.sqrt((rows - 1) ** 2 + (cols - 1) ** 2)
    total = 0.0
    for i in range(rows * cols):
        row = [float(attn[prefix + i, prefix + j]) for j in range(rows * cols)]
        mass = sum(row) if renormalize else 1.0
        for j, weight in enumerate(row):
            apart = math.sqrt((i // cols - j // cols) ** 2 + (i % cols - j % cols) ** 2)
            total += weight / mass * (apart / diagonal if diagonal else 0.0)
    return total / (rows * cols)


def entropy_loop(attn: Tensor, prefix: int, eps: float) -> float:
    num_patches = attn.shape[-1] - prefix
    total = 0.0
    for i in range(num_patches):
        row = [float(attn[prefix + i, prefix + j]) for j in range(num_patches)]
        mass = sum(row)
        total += -sum(weight / mass * math.log(weight / mass + eps) for weight in row)
    return total / num_patches / math.log(num_patches)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("grid_size", [(3, 3), (2, 5), (4, 1)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_both_metrics_equal_the_loop(prefix: int, grid_size: tuple[int, int], renormalize: bool) -> None:
    attn = random_attention(2, 3, num_tokens=grid_size[0] * grid_size[1] + prefix)
    distance = attention_distance(attn, grid_size, num_prefix_tokens=prefix, renormalize=renormalize)
    entropy = attention_entropy(attn, num_prefix_tokens=prefix)
    assert distance.shape == entropy.shape == (2, 3)
    assert distance.dtype == entropy.dtype == torch.float64
    for image in range(2):
        for head in range(3):
            one = attn[image, head]
            assert float(distance[image, head]) == pytest.approx(
                distance_loop(one, grid_size, prefix, renormalize), rel=1e-12
            )
            assert float(entropy[image, head]) == pytest.approx(entropy_loop(one, prefix, 1e-12), rel=1e-12)


def test_identity_attention_is_perfectly_local() -> None:
    attn = torch.eye(65).expand(2, 65, 65)
    assert attention_distance(attn, (8, 8)).tolist() == [0, 0]
    assert attention_entropy(attn).tolist() == [0, 0]


def test_uniform_attention_on_the_papers_grid() -> None:
    attn = torch.full((1, 65, 65), 1 / 65)
    assert float(attention_distance(attn, (8, 8))) == pytest.approx(0.417848, abs=5e-7)
    assert uniform_attention_distance((8, 8)) == pytest.approx(0.417848, abs=5e-7)
    assert float(attention_entropy(attn)) == pytest.approx(1, abs=1e-9)


def test_farthest_token_attention_is_the_geometric_maximum() -> None:
    distances = grid_distances((8, 8))
    attn = torch.zeros(1, 65, 65)
    attn[0, 1:, 1:] = torch.nn.functional.one_hot(distances.argmax(-1), 64)
    maximum = float(attention_distance(attn, (8, 8)))
    assert maximum == pytest.approx(float(distances.max(-1).values.mean()), rel=1e-12)
    assert maximum == pytest.approx(0.7938, abs=5e-5)
    assert distances.max() == pytest.approx(1)


def test_without_renormalising_the_distance_is_understated_by_what_cls_receives() -> None:
    attn = torch.full((1, 65, 65), 0.5 / 64)
    attn[..., 0] = 0.5
    full = float(attention_distance(attn, (8, 8)))
    assert float(attention_distance(attn, (8, 8), renormalize=False)) == pytest.approx(full / 2, rel=1e-9)


def test_a_query_that_looks_at_no_patch_is_left_out() -> None:
    attn = random_attention(1, num_tokens=10)
    blind = attn.clone()
    blind[0, 4] = 0
    blind[0, 4, 0] = 1  # the fourth patch looks at CLS alone
    seeing = [i for i in range(9) if i != 3]
    rows = attn[0, 1:, 1:] / attn[0, 1:, 1:].sum(-1, keepdim=True)
    expected = (rows * grid_distances((3, 3))).sum(-1)[seeing].mean()
    assert float(attention_distance(blind, (3, 3))) == pytest.approx(float(expected), rel=1e-12)
    assert math.isfinite(float(attention_entropy(blind)))
    only_cls = torch.zeros(1, 10, 10)
    only_cls[..., 0] = 1
    assert math.isnan(float(attention_distance(only_cls, (3, 3))))
    assert math.isnan(float(attention_entropy(only_cls)))


def test_nan_attention_stays_visible() -> None:
    attn = random_attention(2, num_tokens=10)
    attn[1, 5, 5] = math.nan
    assert torch.isnan(attention_distance(attn, (3, 3))).tolist() == [False, True]
    assert torch.isnan(attention_entropy(attn)).tolist() == [False, True]


def test_without_eps_a_weight_of_zero_counts_for_nothing() -> None:
    attn = random_attention(2, 3, num_tokens=10)
    attn = attn * (attn > 0.1)
    attn[..., 0] = 0.01
    found = attention_entropy(attn, eps=0)
    for image in range(2):
        for head in range(3):
            rows = attn[image, head, 1:, 1:] / attn[image, head, 1:, 1:].sum(-1, keepdim=True)
            looking = [[p for p in row if p > 0] for row in rows.tolist() if not math.isnan(row[0])]
            entropies = [-sum(p * math.log(p) for p in row) / math.log(9) for row in looking]
            assert float(found[image, head]) == pytest.approx(sum(entropies) / len(entropies), rel=1e-12)
    assert attention_entropy(torch.eye(10).expand(2, 10, 10), eps=0).tolist() == [0, 0]
    attn[1, 1, 5, 5] = math.nan
    assert attention_entropy(attn, eps=0).isnan().sum() == 1


@pytest.mark.parametrize("eps", [-1e-12, math.nan, math.inf])
def test_an_eps_below_zero_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps is"):
        attention_entropy(random_attention(1, num_tokens=5), eps=eps)


def test_one_patch_has_distance_and_entropy_zero() -> None:
    attn = torch.full((1, 2, 2), 0.5)
    assert float(attention_distance(attn, (1, 1))) == 0
    assert float(attention_entropy(attn)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_input_is_reduced_in_float64(dtype: torch.dtype) -> None:
    attn = random_attention(3, num_tokens=17).to(dtype)
    assert torch.equal(attention_distance(attn, (4, 4)), attention_distance(attn.double(), (4, 4)))
    assert torch.equal(attention_entropy(attn), attention_entropy(attn.double()))


def test_gradients_are_those_of_the_definition() -> None:
    attn = random_attention(2, num_tokens=10).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: attention_distance(a, (3, 3)), attn)
    assert torch.autograd.gradcheck(attention_entropy, attn)


@pytest.mark.parametrize("eps", [1e-12, 0])
def test_a_query_that_looks_at_no_patch_has_no_gradient(eps: float) -> None:
    metrics = (lambda a: attention_distance(a, (3, 3)), lambda a: attention_entropy(a, eps=eps))
    attn = random_attention(1, num_tokens=10)
    attn[0, 4, 1:] = 0
    for metric in metrics:
        given = attn.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(metric(given).sum(), given)
        assert not gradient[0, 4].any()
        step = 1e-6 * torch.randn(attn.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        step[0, 4] = 0
        change = (metric(attn + step) - metric(attn - step)).sum() / 2
        assert float((gradient * step).sum()) == pytest.approx(float(change), rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "grid_size", "prefix", "message"),
    [
        ((1, 65, 65), (8, 7), 1, "65 tokens do not fit a 8×7 grid with 1 prefix tokens"),
        ((1, 64, 64), (8, 8), 1, "64 tokens do not fit"),
        ((1, 64, 65), (8, 8), 1, "is needed"),
        ((64, 64), (8, 8), 0, "is needed"),
        ((1, 4, 4), (2, 2), 4, "leave no patch"),
        ((1, 4, 4), (2, 2), -1, "leave no patch"),
    ],
)
def test_what_does_not_fit_is_a_value_error(
    shape: tuple[int, ...], grid_size: tuple[int, int], prefix: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attention_distance(torch.ones(shape), grid_size, num_prefix_tokens=prefix)


@pytest.mark.parametrize("distance", [grid_distances, uniform_attention_distance, next_patch_distance])
def test_a_grid_without_rows_is_refused(distance: Callable[[tuple[int, int]], object]) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        distance((0, 4))


@pytest.mark.parametrize("grid_size", [(8, 8), (3, 5), (1, 4), (1, 1), (14, 14)])
def test_uniform_attention_distance_is_the_mean_over_all_pairs(grid_size: tuple[int, int]) -> None:
    cells = [(row, column) for row in range(grid_size[0]) for column in range(grid_size[1])]
    total = sum(math.dist(a, b) for a in cells for b in cells)
    diagonal = math.hypot(grid_size[0] - 1, grid_size[1] - 1) or 1.0
    assert uniform_attention_distance(grid_size) == pytest.approx(total / len(cells) ** 2 / diagonal)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 3),
    st.floats(0, 30),
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_bounds(rows: int, cols: int, prefix: int, sharpness: float, seed: int, dtype: torch.dtype) -> None:
    attn = random_attention(2, num_tokens=rows * cols + prefix, seed=seed, sharpness=sharpness).to(dtype)
    most = float(grid_distances((rows, cols)).max(-1).values.mean())
    distance = attention_distance(attn, (rows, cols), num_prefix_tokens=prefix)
    entropy = attention_entropy(attn, num_prefix_tokens=prefix)
    assert ((distance >= 0) & (distance <= most + 1e-12)).all()
    assert ((entropy >= 0) & (entropy <= 1 + 1e-12)).all()


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_order_and_grouping_of_images_do_not_matter(order: list[int], cut: int) -> None:
    attn = random_attention(6, 2, num_tokens=10)
    whole = attention_distance(attn, (3, 3))
    assert torch.equal(attention_distance(attn[order], (3, 3)), whole[order])
    parts = [attention_distance(part, (3, 3)) for part in (attn[:cut], attn[cut:])]
    assert torch.equal(torch.cat(parts), whole)


GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 7)).filter(lambda grid: math.prod(grid) > 1)


@given(grid_size=GRIDS, seed=st.integers(0, 999), sharpness=st.floats(0, 12))
def test_no_head_gives_its_own_patch_less_than_its_distance_says(
    grid_size: tuple[int, int], seed: int, sharpness: float
) -> None:
    num = math.prod(grid_size)
    attn = (random_attention(1, num_tokens=num, seed=seed).log() + sharpness * torch.eye(num)).softmax(-1)
    distance = float(attention_distance(attn, grid_size, num_prefix_tokens=0))
    assert float(attn[0].diagonal().mean()) >= least_share_on_itself(distance, grid_size) - 1e-12


@given(grid_size=GRIDS, own=st.floats(0, 1))
def test_where_the_rest_goes_next_door_that_is_what_it_gives(grid_size: tuple[int, int], own: float) -> None:
    apart = grid_distances(grid_size)
    nearest = apart.masked_fill(apart == 0, math.inf).argmin(-1)
    attn = own * torch.eye(len(apart), dtype=torch.float64)
    attn[torch.arange(len(apart)), nearest] += 1 - own
    distance = float(attention_distance(attn[None], grid_size, num_prefix_tokens=0))
    assert distance == pytest.approx((1 - own) * next_patch_distance(grid_size), abs=1e-12)
    assert least_share_on_itself(distance, grid_size) == pytest.approx(own, abs=1e-12)


def test_the_next_patch_is_the_smallest_distance_there_is() -> None:
    assert next_patch_distance((8, 8)) == pytest.approx(0.101015, abs=5e-7)
    for grid_size in ((1, 2), (3, 1), (14, 14), (5, 9)):
        apart = grid_distances(grid_size)
        assert next_patch_distance(grid_size) == pytest.approx(float(apart[apart > 0].min()))
    # Alone, a patch has nothing else to look at.
    assert least_share_on_itself(0.0, (1, 1)) == 1.0


@pytest.mark.parametrize("grid_size", [(1, 1), (3, 5), (8, 8)])
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("reach", [0, 0.9, 1, math.sqrt(2), 1.5, math.sqrt(13), 4.0, math.inf])
def test_reach_is_that_of_a_loop(grid_size: tuple[int, int], prefix: int, reach: float) -> None:
    rows, cols = grid_size
    places: list[tuple[int, int] | None] = [None] * prefix + [(i, j) for i in range(rows) for j in range(cols)]
    expected = [[q is None or k is None or math.dist(q, k) <= reach for k in places] for q in places]
    assert within_reach(grid_size, reach, num_prefix_tokens=prefix).tolist() == expected


@pytest.mark.parametrize("reach", [-0.1, math.nan])
def test_no_reach_is_below_zero(reach: float) -> None:
    with pytest.raises(ValueError, match=f"reach is {reach}, but must be at least 0"):
        within_reach((2, 2), reach)
