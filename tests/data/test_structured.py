"""Structured patches against loops, enumeration and the laws they are drawn from."""

import itertools
import math

import pytest
import torch
from scipy import stats

from nearsight.configuration import decode, encode
from nearsight.data.structured import GaussianPatches, PatchData, StructuredPatches
from nearsight.data.structured_samples import FreshSamples, ProjectedSamples, StoredSamples
from nearsight.errors import InputError

SEEDS = torch.tensor([3, 17, 5])


def drawn(data: PatchData, num_samples: int, seeds: torch.Tensor = SEEDS) -> tuple[StoredSamples, torch.Tensor]:
    feature = data.feature(seeds)
    return StoredSamples.draw(data, feature, seeds, "train", num_samples), feature


def patches_of(samples: StoredSamples) -> torch.Tensor:
    """[S, N, D, d], as one would write them down."""
    return samples.patch_SdM.unflatten(-1, (samples.num_samples, -1)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("partition", ["contiguous", "strided", "random"])
def test_partitions_are_equal_sets(partition: str) -> None:
    data = StructuredPatches(num_sets=4, set_size=3, dim=30, partition=partition)  # type: ignore[arg-type]
    sets = data.sets().tolist()
    assert sorted(sets) == sorted([0, 1, 2, 3] * 3)
    expected = {"contiguous": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], "strided": [0, 1, 2, 3] * 3}
    assert partition == "random" or sets == expected[partition]


def test_a_random_partition_is_neither_and_depends_on_its_seed() -> None:
    partitions = {tuple(StructuredPatches(partition_seed=seed).sets().tolist()) for seed in range(5)}
    assert len(partitions) == 5
    assert not partitions & {tuple(range(5)) * 2, tuple(j // 2 for j in range(10))}


def test_definition_2_1_patch_by_patch() -> None:
    """Every sample has one set that is all y; the others carry the feature as often as they should."""
    data = StructuredPatches(num_sets=4, set_size=3, dim=12, probability=0.4, noise=0.2)
    samples, feature = drawn(data, 4000)
    assert torch.allclose(feature.norm(dim=-1), torch.ones(3))
    strength = torch.einsum("sndk,sk->snd", patches_of(samples).double(), feature.double())
    rounded = strength.round()
    assert torch.allclose(strength, rounded, atol=1e-5)  # the noise has nothing along the feature
    sets, labels = data.sets(), samples.label_SN
    assert set(labels.unique().tolist()) == {-1.0, 1.0}
    is_y = torch.stack([(rounded[..., sets == k] == labels[..., None]).all(-1) for k in range(4)], dim=-1)
    assert is_y.any(-1).all()
    # Where only one set can be the signal, the others are by chance.
    one = is_y.sum(-1) == 1
    share = (is_y & one[..., None]).sum((0, 1)) / one.sum()
    assert torch.allclose(share, torch.full((4,), 0.25), atol=4 * math.sqrt(0.25 * 0.75 / one.sum()))
    counts = [int((rounded == value).sum()) for value in (-1, 0, 1)]
    total = rounded.numel()
    expected = [total * (0.25 * 0.5 + 0.75 * 0.2), total * 0.75 * 0.6, total * (0.25 * 0.5 + 0.75 * 0.2)]
    # The signal set's patches are alike, so their number varies three times as much as if they were not.
    assert stats.chisquare(counts, expected).statistic / 3 < stats.chi2.ppf(1 - 1e-4, 2)


def test_the_noise_is_normal_and_across_the_feature() -> None:
    data = StructuredPatches(dim=6, probability=0.3, noise=0.5)
    samples, feature = drawn(data, 3000, SEEDS[:1])
    strength = torch.einsum("sndk,sk->snd", patches_of(samples), feature).round()
    noise = (patches_of(samples) - strength[..., None] * feature[:, None, None]).flatten(0, 2).double()
    covariance = noise.T @ noise / len(noise)
    w = feature[0].double()
    assert torch.allclose(covariance, 0.25 * (torch.eye(6) - torch.outer(w, w)), atol=5 * 0.25 / len(noise) ** 0.5)
    across = torch.linalg.qr(torch.stack([w, *torch.eye(6, dtype=torch.float64)[:5]]).T).Q[:, 1:]
    assert stats.kstest((noise @ across).flatten().numpy() / 0.5, "norm").pvalue > 1e-4


def test_the_control_is_independent_and_labelled_by_a_cubic_convolution() -> None:
    data = GaussianPatches(dim=8, scale=0.7)
    samples, feature = drawn(data, 3000)
    patches = patches_of(samples).double()
    along = torch.einsum("sndk,sk->snd", patches, feature.double())
    cubes = along.pow(3).sum(-1)
    clear = cubes.abs() > 1e-5
    assert torch.equal(samples.label_SN[clear].double(), cubes.sign()[clear])
    assert clear.float().mean() > 0.99
    assert stats.kstest(patches.flatten().numpy()[:50_000] / 0.7, "norm").pvalue > 1e-4
    flat = patches.flatten(0, 1).flatten(1)
    correlation = torch.corrcoef(flat.T) - torch.eye(flat.shape[1])
    assert correlation.abs().max() < 6 / len(flat) ** 0.5


@pytest.mark.parametrize("data", [StructuredPatches(dim=10), GaussianPatches(dim=10)], ids=lambda data: data.name)
def test_a_sample_does_not_depend_on_what_is_drawn_with_it(data: PatchData) -> None:
    samples, feature = drawn(data, 50)
    alone, its_feature = drawn(data, 20, SEEDS[1:2])
    assert torch.equal(its_feature[0], feature[1])
    assert torch.allclose(patches_of(alone)[0], patches_of(samples)[1, :20], atol=1e-6)
    assert torch.equal(alone.label_SN[0], samples.label_SN[1, :20])
    index = torch.arange(50)
    together = ProjectedSamples.draw(data, feature, SEEDS, "test", 4, index)
    later = ProjectedSamples.draw(data, feature[1:2], SEEDS[1:2], "test", 4, index[30:])
    assert torch.equal(later.noise_SND[0], together.noise_SND[1, 30:])
    assert torch.equal(later.strength_SND[0], together.strength_SND[1, 30:])
    assert not torch.equal(ProjectedSamples.draw(data, feature, SEEDS, "test", 5, index).noise_SND, together.noise_SND)
    assert not torch.equal(data.feature(SEEDS, 1), feature)


def test_pieces_are_all_samples_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearsight.data import structured_samples

    data = StructuredPatches(dim=10)
    samples, feature = drawn(data, 50)
    monkeypatch.setattr(structured_samples, "PATCHES_AT_ONCE", 7 * 3 * 10)
    pieces = list(samples.pieces(0))
    assert [piece.num_samples for piece in pieces] == [7] * 7 + [1]
    v = torch.randn(3, 10)
    assert torch.allclose(torch.cat([piece.project(v) for piece in pieces], dim=1), samples.project(v), atol=1e-5)
    fresh = FreshSamples(data, feature, SEEDS, "train", 50)
    labels = torch.cat([piece.label_SN for piece in fresh.pieces(2)], dim=1)
    assert torch.equal(labels, data.signals(SEEDS, "train", 2, torch.arange(50))[1])


@pytest.mark.parametrize("num_seeds", [1, 3, 25])
def test_fresh_pieces_do_not_depend_on_the_seeds_beside(num_seeds: int) -> None:
    """Nor does what is drawn once for each; of ten seeds they are as large as committed results had them."""
    data = StructuredPatches()

    def pieces(seeds: torch.Tensor) -> list[ProjectedSamples]:
        return list(FreshSamples(data, data.feature(seeds), seeds, "train", 2000).pieces(1))

    of_ten, others = pieces(torch.arange(10)), pieces(torch.arange(num_seeds))
    assert [piece.label_SN.shape[1] for piece in of_ten] == [1310, 690]
    for one, other in zip(of_ten, others, strict=True):
        for name in ("across_Sd", "noise_SND", "strength_SND", "label_SN"):
            assert torch.equal(getattr(one, name)[0], getattr(other, name)[0])


def test_projected_samples_have_the_law_of_whole_ones() -> None:
    """The projections and a weighted sum of the patches, in mean and covariance, over many draws of both kinds."""
    data = StructuredPatches(num_sets=2, set_size=2, dim=5, probability=0.4, noise=0.6)
    seeds = torch.arange(12_000)
    feature = data.feature(torch.tensor([7])).expand(len(seeds), -1)
    v = torch.tensor([0.3, -0.8, 0.5, 0.1, 0.4]).expand(len(seeds), -1)

    def seen(samples: StoredSamples | ProjectedSamples) -> torch.Tensor:
        projected = samples.project(v)
        weights = projected**3 - 0.4 * projected + 0.2 * samples.label_SN[..., None]
        return torch.cat([projected.flatten(1), samples.weighted_sum(weights, v)], dim=-1).double()

    one_row = StoredSamples.draw(data, feature[:1], seeds[:1], "whole", 2 * len(seeds))
    apart = one_row.patch_SdM[0].unflatten(-1, (len(seeds), -1)).transpose(0, 1)
    whole = seen(StoredSamples(apart, one_row.label_SN.view(len(seeds), 2)))
    short = seen(ProjectedSamples.draw(data, feature, seeds, "short", 0, torch.arange(2)))
    for numbers in (lambda x: x, lambda x: (x[:, :, None] * x[:, None]).flatten(1)):
        one, other = numbers(whole), numbers(short)
        error = ((one.var(0) + other.var(0)) / len(seeds)).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() / error).max() < 4.8


def test_a_weighted_sum_is_a_loop() -> None:
    samples, _ = drawn(StructuredPatches(dim=7), 6)
    weights = torch.randn(3, 6, 10)
    found = samples.weighted_sum(weights, torch.zeros(3, 7))
    patches = patches_of(samples).double()
    for seed in range(3):
        expected = torch.zeros(7, dtype=torch.float64)
        for n, j in itertools.product(range(6), range(10)):
            expected += weights[seed, n, j].double() * patches[seed, n, j]
        assert torch.allclose(found[seed].double(), expected, atol=1e-5)


@pytest.mark.parametrize(("sets", "size", "q"), [(2, 2, 0.5), (3, 2, 0.9), (2, 3, 0.3), (4, 2, 0.0), (3, 2, 1.0)])
def test_the_best_classifier_by_enumeration(sets: int, size: int, q: float) -> None:
    """Every possible row of strengths, with its probability under both labels."""
    data = StructuredPatches(num_sets=sets, set_size=size, dim=50, probability=q, partition="contiguous")
    accuracy = risk = 0.0
    for strengths in itertools.product((-1, 0, 1), repeat=sets * size):
        by_label = []
        for label in (-1, 1):
            p = 0.0
            for signal in range(sets):
                inside = [s == label for j, s in enumerate(strengths) if j // size == signal]
                outside = [q / 2 if s else 1 - q for j, s in enumerate(strengths) if j // size != signal]
                p += 0.5 / sets * all(inside) * math.prod(outside)
            by_label.append(p)
        accuracy += max(by_label)
        risk -= sum(p * math.log(p / sum(by_label)) for p in by_label if p)
    assert data.best_accuracy == pytest.approx(accuracy, abs=1e-12)
    assert data.best_risk == pytest.approx(risk, abs=1e-12)


def test_defaults_are_those_of_s3() -> None:
    data = StructuredPatches()
    assert (data.num_patches, data.dim) == (10, 100)
    assert data.chance == pytest.approx(math.log(100) / 10)
    assert data.noise_std == pytest.approx(0.1)


@pytest.mark.parametrize("data", [StructuredPatches(probability=0.2, partition="strided"), GaussianPatches(scale=2.0)])
def test_configs_survive_json(data: PatchData) -> None:
    assert decode(PatchData, encode(data)) == data


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_sets": 1}, "num_sets is 1"),
        ({"set_size": 1}, "set_size is 1"),
        ({"probability": 1.2}, "probability is 1.2"),
        ({"noise": -1.0}, "noise is -1.0"),
        ({"noise": math.inf}, "noise is inf, but must be finite"),
        ({"num_sets": 2.5}, "num_sets is 2.5, but must be of type int"),
        ({"partition": "blocks"}, "'blocks' is not a known partition; known: contiguous"),
        ({"num_sets": 2, "dim": 100}, "ln\\(d\\)/D is 1.15 with dim 100; set a probability"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        StructuredPatches(**settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="scale is 0"):
        GaussianPatches(scale=0.0)
