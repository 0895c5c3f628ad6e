"""Neighbour coherence, pull towards CLS and CKA against loops, definitions and invariances."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics import linear_cka, local_distant_similarity, locality_score, patch_cls_similarity
from nearsight.metrics.features import similarity_by_distance


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / math.sqrt(float((a * a).sum()) * float((b * b).sum())))


@pytest.mark.parametrize("grid_size", [(3, 4), (1, 5), (5, 1), (2, 2)])
def test_locality_score_equals_the_loop(grid_size: tuple[int, int]) -> None:
    rows, cols = grid_size
    patches = tokens(2, rows * cols, 6)
    for image in range(2):
        scores = []
        for row, col in itertools.product(range(rows), range(cols)):
            near = [
                (r, c)
                for r, c in itertools.product(range(row - 1, row + 2), range(col - 1, col + 2))
                if 0 <= r < rows and 0 <= c < cols and (r, c) != (row, col)
            ]
            similar = [cosine(patches[image, row * cols + col], patches[image, r * cols + c]) for r, c in near]
            scores.append(sum(similar) / len(similar))
        expected = sum(scores) / len(scores)
        assert float(locality_score(patches, grid_size)[image]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("grid_size", "far"), [((3, 5), 3), ((4, 4), 6), ((1, 9), 6), ((7, 8), 6), ((2, 2), 1)])
def test_local_distant_similarity_equals_the_loop(grid_size: tuple[int, int], far: int) -> None:
    rows, cols = grid_size
    patches = tokens(2, rows * cols, 6)
    for image in range(2):
        near, distant = [], []
        for (r, c), (row, col) in itertools.combinations(itertools.product(range(rows), range(cols)), 2):
            similarity = cosine(patches[image, r * cols + c], patches[image, row * cols + col])
            steps = abs(r - row) + abs(c - col)
            near += [similarity] if steps == 1 else []
            distant += [similarity] if steps >= far else []
        expected = sum(near) / len(near) - sum(distant) / len(distant)
        assert float(local_distant_similarity(patches, grid_size, far=far)[image]) == pytest.approx(expected, abs=1e-13)
        in_tiles = similarity_by_distance(patches, grid_size, far=far, tile_bytes=700)
        assert float(in_tiles.difference[image]) == pytest.approx(expected, abs=1e-13)


def test_local_distant_similarity_is_0_for_collapsed_tokens() -> None:
    ones = torch.ones(1, 64, 3)
    assert locality_score(ones, (8, 8)).tolist() == pytest.approx([1])
    assert local_distant_similarity(ones, (8, 8)).tolist() == pytest.approx([0])
    assert math.isnan(float(local_distant_similarity(torch.ones(1, 9, 3), (3, 3))))  # none are 6 steps apart
    halves = torch.tensor([[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 8)[None]
    assert local_distant_similarity(halves, (1, 16), far=8).tolist() == pytest.approx([14 / 15])
    patches = tokens(2, 64, 16)
    single = similarity_by_distance(patches.to(torch.bfloat16), (8, 8)).difference
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), local_distant_similarity(patches, (8, 8)), rtol=0, atol=1e-3)
    with pytest.raises(InputError, match="far"):
        local_distant_similarity(patches, (8, 8), far=0)


def test_locality_score_knows_collapse_opposition_and_solitude() -> None:
    assert locality_score(torch.ones(1, 9, 3), (3, 3)).tolist() == pytest.approx([1])
    stripes = torch.tensor([1.0, -1.0]).repeat(3)[:, None].expand(1, 6, 1).contiguous()
    assert locality_score(stripes, (1, 6)).tolist() == pytest.approx([-1])
    assert math.isnan(float(locality_score(torch.ones(1, 1, 3), (1, 1))))


@pytest.mark.parametrize("prefix", [1, 5])
def test_patch_cls_similarity_equals_the_loop(prefix: int) -> None:
    every = tokens(3, prefix + 7, 4)
    for image in range(3):
        expected = sum(cosine(every[image, 0], every[image, prefix + patch]) for patch in range(7)) / 7
        assert float(patch_cls_similarity(every, prefix)[image]) == pytest.approx(expected, rel=1e-12)


def test_scale_and_precision_of_tokens_do_not_matter() -> None:
    patches = tokens(2, 9, 5)
    torch.testing.assert_close(locality_score(1e3 * patches, (3, 3)), locality_score(patches, (3, 3)))
    assert locality_score(patches.to(torch.bfloat16), (3, 3)).dtype == torch.float64
    assert patch_cls_similarity(patches.to(torch.float16)).dtype == torch.float64


def hsic(a: Tensor, b: Tensor) -> float:
    """The biased estimator from its definition: the trace of K H L H."""
    n = len(a)
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    return float(torch.trace(a @ centre @ b @ centre)) / (n - 1) ** 2


def unbiased_hsic_by_tuples(a: Tensor, b: Tensor) -> float:
    """Its definition as a U-statistic: means over pairs, triples and quadruples of different examples."""
    n = len(a)
    pairs = [float(a[i, j] * b[i, j]) for i, j in itertools.permutations(range(n), 2)]
    triples = [float(a[i, j] * b[i, q]) for i, j, q in itertools.permutations(range(n), 3)]
    quadruples = [float(a[i, j] * b[q, r]) for i, j, q, r in itertools.permutations(range(n), 4)]
    return sum(pairs) / len(pairs) - 2 * sum(triples) / len(triples) + sum(quadruples) / len(quadruples)


@pytest.mark.parametrize(("unbiased", "estimate"), [(False, hsic), (True, unbiased_hsic_by_tuples)])
def test_cka_equals_its_definition(unbiased: bool, estimate) -> None:
    x, y = tokens(7, 3), tokens(7, 5, seed=1)
    a, b = x @ x.T, y @ y.T
    expected = estimate(a, b) / math.sqrt(estimate(a, a) * estimate(b, b))
    assert float(linear_cka(x, y, unbiased=unbiased)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("unbiased", [False, True])
def test_cka_is_one_for_rotated_scaled_and_moved_copies(unbiased: bool) -> None:
    x = tokens(20, 6)
    rotation, _ = torch.linalg.qr(tokens(6, 6, seed=2))
    assert float(linear_cka(x, 3 * x @ rotation + 5, unbiased=unbiased)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("offset", [1e2, 1e4, 1e7])
def test_cka_does_not_see_where_the_mean_lies(unbiased: bool, offset: float) -> None:
    x, noise = tokens(50, 8), tokens(50, 6, seed=2)
    y = x @ tokens(8, 6, seed=1) + 0.5 * noise
    expected = float(linear_cka(x, y, unbiased=unbiased))
    assert 0.1 < expected < 0.95
    moved = x + offset * tokens(8, seed=3)
    assert float(linear_cka(moved, y - offset, unbiased=unbiased)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cka_of_what_is_the_same_for_all_examples_is_not_a_number(unbiased: bool, dtype: torch.dtype) -> None:
    varied, one, other = tokens(50, 6).to(dtype), torch.full((50, 8), 0.11, dtype=dtype), torch.full((50, 5), 0.37)
    last_bit = one.clone()
    last_bit[::3, ::2] = torch.nextafter(last_bit, 2 * last_bit)[::3, ::2]
    pairs = [(one, other), (one, varied), (varied, other), (torch.zeros(50, 2), varied)]
    # Half precision has its last bits where other features may yet have their values.
    pairs += [(last_bit, varied)] if dtype != torch.bfloat16 else []
    for x, y in pairs:
        assert math.isnan(float(linear_cka(x, y, unbiased=unbiased)))


def test_one_example_that_differs_tells_nothing_without_bias() -> None:
    """Then no two examples vary together: the unbiased estimate is 0 but for rounding."""
    x = torch.full((9, 3), 0.3, dtype=torch.float64)
    x[2] = 5.7
    assert math.isnan(float(linear_cka(x, tokens(9, 4), unbiased=True)))
    assert 0 < float(linear_cka(x, tokens(9, 4))) < 1


def test_cka_has_a_gradient() -> None:
    x, y = tokens(6, 3).requires_grad_(), tokens(6, 2, seed=1)
    for unbiased in (False, True):
        assert torch.autograd.gradcheck(lambda z, unbiased=unbiased: linear_cka(z, y, unbiased=unbiased), x)


def test_only_the_biased_estimate_grows_with_the_number_of_features() -> None:
    pairs = [(tokens(20, 500, seed=2 * i), tokens(20, 500, seed=2 * i + 1)) for i in range(30)]
    biased = [float(linear_cka(x, y)) for x, y in pairs]
    unbiased = [float(linear_cka(x, y, unbiased=True)) for x, y in pairs]
    assert min(biased) > 0.9
    assert abs(sum(unbiased) / len(unbiased)) < 0.05


def test_no_images_have_no_scores() -> None:
    assert locality_score(torch.ones(0, 4, 3), (2, 2)).shape == (0,)
    assert patch_cls_similarity(torch.ones(0, 4, 3)).shape == (0,)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InputError, match="at least one row and one column, not -2×-2"):
        locality_score(torch.ones(1, 4, 3), (-2, -2))
    with pytest.raises(InputError, match=r"\[B, 9, D\] are needed for a 3×3 grid, not \[2, 8, 4\]"):
        locality_score(torch.ones(2, 8, 4), (3, 3))
    with pytest.raises(InputError, match="with CLS among 0 prefix tokens"):
        patch_cls_similarity(torch.ones(2, 8, 4), 0)
    with pytest.raises(InputError, match="equally many rows"):
        linear_cka(torch.ones(4, 2), torch.ones(5, 2))
    with pytest.raises(InputError, match="3 examples are too few"):
        linear_cka(torch.ones(3, 2), torch.ones(3, 2), unbiased=True)
