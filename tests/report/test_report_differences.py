"""Differences of two models: against SciPy's tests, whatever the order of the images, and no more than they show."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nearsight.lens.perimage import PerImage
from nearsight.report.differences import SMALLEST, Quantity, differ, first_layer_mean, most_local_head
from nearsight.report.inputs import ModelHeads
from nearsight.report.reading import compare


def model_of(label, mad_NLH, entropy_NLH=None, digests=None, *, with_images=True):
    """A model whose heads had these values on these images."""
    entropy_NLH = mad_NLH if entropy_NLH is None else entropy_NLH
    digests = np.arange(len(mad_NLH)) if digests is None else digests
    layer, head = np.nonzero(np.ones(mad_NLH.shape[1:]))
    numbers = {
        name: values
        for metric, values_NLH in (("mad", mad_NLH), ("entropy", entropy_NLH))
        for name, values in ((metric, values_NLH.mean(0)), (f"{metric}_std", values_NLH.std(0)))
    }
    heads = pd.DataFrame(
        {"epoch": 0, "layer": layer, "layer_name": "", "head": head, "num_images": len(mad_NLH)}
        | {name: values[layer, head] for name, values in numbers.items()}
    )
    images = PerImage.of(np.asarray(digests, dtype=np.uint64), mad_NLH, entropy_NLH)
    return ModelHeads(label=label, heads=heads, per_image=images if with_images else None)


def alike(num_images=200, shift=0.05, noise=0.01, seed=0):
    """Two models of one head: images spread widely, in both alike, and the second is higher by `shift`."""
    random = np.random.default_rng(seed)
    common = random.uniform(0.2, 0.6, num_images)
    one, other = (common + random.normal(level, noise / 2**0.5, num_images) for level in (0.0, shift))
    return one, other


def two_models(one, other, **of_both):
    return [model_of(label, values[:, None, None], **of_both) for label, values in (("a", one), ("b", other))]


def first_layers(a, b, metric="mad"):
    return differ(first_layer_mean(a, metric), first_layer_mean(b, metric))


class TestImageByImage:
    @pytest.mark.parametrize("num_images", [2, 7, 1000])
    def test_it_is_the_paired_t_test(self, num_images):
        one, other = alike(num_images)
        found = first_layers(*two_models(one, other))
        expected = stats.ttest_rel(*(values.astype(np.float32).astype(np.float64) for values in (one, other)))
        interval = expected.confidence_interval(0.95)
        assert found.is_paired
        assert found.estimate.n == num_images
        assert found.estimate.value / found.estimate.error == pytest.approx(expected.statistic)
        assert (found.estimate.low, found.estimate.high) == pytest.approx((interval.low, interval.high))
        differences = one - other
        assert found.effect == pytest.approx(differences.mean() / differences.std(ddof=1), rel=1e-3)
        assert found.agreeing == pytest.approx((differences < 0).mean())

    def test_spread_is_not_uncertainty(self):
        """The images of both overlap almost wholly, and yet one model is lower on nearly all of them."""
        a, b = two_models(*alike(1000, shift=0.05, noise=0.02))
        found, reading = first_layers(a, b), compare(a, b)
        assert found.a.high > found.b.mean > found.b.low  # which was "no clear difference" once
        assert found.lower is found.a
        assert found.agreeing > 0.98
        assert reading.more_local == "a"
        assert reading.headline == "“a” attends more locally than “b”."
        low, high = (f"{abs(end):.3f}" for end in (found.estimate.high, found.estimate.low))
        assert f"In “a” it is lower by 0.050 (95 % interval {low} to {high}, " in reading.sentences[2]
        assert "(spread over images " in reading.sentences[2]
        assert any(
            "over 1,000 images that both models were measured on, image by image" in s for s in reading.sentences
        )

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**16), st.integers(2, 60))
    def test_the_order_of_images_does_not_matter(self, seed, num_images):
        random = np.random.default_rng(seed)
        one, other = random.uniform(size=(2, num_images, 2, 3))
        digests = random.choice(2**40, num_images, replace=False)
        reading = compare(model_of("a", one, digests=digests), model_of("b", other, digests=digests))
        turn, other_turn = random.permutation(num_images), random.permutation(num_images)
        again = compare(
            model_of("a", one[turn], digests=digests[turn]),
            model_of("b", other[other_turn], digests=digests[other_turn]),
        )
        assert [found.as_json() for found in numbers(again)] == [found.as_json() for found in numbers(reading)]
        assert again.sentences == reading.sentences

    def test_only_images_of_both_count_and_each_once(self):
        one, other = alike(50)
        a = model_of("a", one[:, None, None])
        later = model_of("b", other[20:, None, None], digests=np.arange(20, 50))
        found = first_layers(a, later)
        assert found.estimate.n == 30
        assert found.estimate.value == pytest.approx((one[20:] - other[20:]).mean(), rel=1e-5)
        twice = model_of("b", np.tile(other[20:], 2)[:, None, None], digests=np.tile(np.arange(20, 50), 2))
        assert first_layers(a, twice).estimate == found.estimate

    def test_several_heads_are_averaged_on_each_image(self):
        random = np.random.default_rng(3)
        one, other = random.uniform(size=(2, 40, 2, 3))
        found = first_layers(model_of("a", one), model_of("b", other), "entropy")
        expected = stats.ttest_rel(one[:, 0].mean(1), other[:, 0].mean(1)).confidence_interval(0.95)
        assert (found.estimate.low, found.estimate.high) == pytest.approx((expected.low, expected.high), rel=1e-4)
        assert found.a.std == pytest.approx(one[:, 0].mean(1).std(), rel=1e-5)  # and not the mean of the heads'


def numbers(reading):
    return reading.most_local_head, reading.first_layer, reading.focus


class TestMeansAlone:
    @pytest.mark.parametrize(("num_a", "num_b"), [(2, 2), (50, 7), (1000, 900)])
    def test_it_is_welchs_t_test(self, num_a, num_b):
        random = np.random.default_rng(num_a)
        one, other = random.normal(0.4, 0.1, num_a), random.normal(0.45, 0.02, num_b)
        a, b = (model_of(name, values[:, None, None], with_images=False) for name, values in (("a", one), ("b", other)))
        found = first_layers(a, b)
        expected = stats.ttest_ind(one, other, equal_var=False)
        interval = expected.confidence_interval(0.95)
        assert not found.is_paired
        assert (found.estimate.low, found.estimate.high) == pytest.approx((interval.low, interval.high))
        assert found.estimate.p == pytest.approx(expected.pvalue)
        assert found.estimate.value / found.estimate.error == pytest.approx(expected.statistic)

    def test_it_says_why(self):
        one, other = alike(100)
        a, b = two_models(one, other)
        (words,) = (s for s in compare(a, replace(b, per_image=None)).sentences if "Welch" in s)
        assert words.startswith("What “b” did on single images is not known: ")
        (words,) = (
            s for s in compare(replace(a, per_image=None), replace(b, per_image=None)).sentences if "Welch" in s
        )
        assert words.startswith("What “a” and “b” did on single images is not known: ")
        elsewhere = model_of("b", other[:, None, None], digests=np.arange(100, 200))
        (words,) = (s for s in compare(a, elsewhere).sentences if "Welch" in s)
        assert words.startswith("The models were measured on different images, which may be what differs: ")
        assert not any("Welch" in s for s in compare(a, b).sentences)

    def test_images_that_are_all_alike(self):
        a, b = (
            model_of(name, np.full((3, 1, 1), value), with_images=False) for name, value in (("a", 0.25), ("b", 0.5))
        )
        found = first_layers(a, b)
        assert (found.estimate.low, found.estimate.high) == (-0.25, -0.25)
        assert found.lower is found.a
        assert "standard deviations" not in compare(a, b).sentences[1]


class TestSmallDifferences:
    @pytest.mark.parametrize(
        ("shift", "num_images", "kind", "words"),
        [
            (0.05, 500, "clear", "“a” attends more selectively."),
            (0.008, 500, "small", "less than 0.02, too little to be called a difference."),
            (0.0215, 30, "perhaps small", "there is a difference, but perhaps of less than 0.02."),
            (0.0, 5, "not shown", "the interval includes 0, so no difference is shown."),
        ],
    )
    def test_each_kind_has_its_words(self, shift, num_images, kind, words):
        a, b = two_models(*alike(num_images, shift, noise=0.025))
        reading = compare(a, b)
        assert {found.kind for found in numbers(reading)} == {kind}
        assert reading.sentences[3].endswith(words)
        assert reading.clear == (kind == "clear")

    def test_the_headline_says_which(self):
        """Clear is only what is shown to be large enough, however many images show it."""
        random = np.random.default_rng(0)
        common = random.uniform(0.3, 0.5, (4000, 2, 2))
        near = model_of("near", common)
        for shift, headline in (
            (0.008, "In locality “near” and “far” differ by less than 0.02 of the diagonal."),
            (0.0202, "No clear difference in locality between “near” and “far”."),
            (0.05, "“near” attends more locally than “far”."),
        ):
            far = model_of("far", common + random.normal(shift, 0.03, common.shape))
            assert compare(near, far).headline == headline
        assert compare(near, model_of("far", common, np.sqrt(common))).headline == (
            "In locality “near” and “far” differ by less than 0.02 of the diagonal; "
            "“near” attends more selectively in its first layer."
        )
        common[:, 1, 0] -= 0.1  # the most local head is not in the first layer
        assert compare(model_of("near", common), model_of("far", common + np.array([[0.05], [0.0]]))).headline == (
            "“near” has a more local first layer than “far”; their most local heads differ by less than 0.02."
        )

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 2**16), st.integers(2, 30), st.floats(-0.05, 0.05), st.integers(2, 5))
    def test_more_images_that_agree_never_weaken_it(self, seed, num_images, shift, times):
        """Every image again so many times, as other images that say the same."""
        one, other = alike(num_images, shift, noise=0.02, seed=seed)
        found = first_layers(*two_models(one, other))
        more = first_layers(*two_models(np.tile(one, times), np.tile(other, times)))
        assert found.estimate.low <= more.estimate.low <= more.estimate.high <= found.estimate.high
        for settled in ("clear", "small"):
            assert found.kind != settled or more.kind == settled
        assert more.agreeing == pytest.approx(found.agreeing)

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 2**16), st.integers(1, 20), st.floats(-0.05, 0.05), st.booleans())
    def test_the_other_way_round_it_is_the_opposite(self, seed, num_images, shift, paired):
        a, b = two_models(*alike(num_images, shift, seed=seed), with_images=paired)
        forth, back = compare(a, b), compare(b, a)
        for one, other in zip(numbers(forth), numbers(back), strict=True):
            assert one.kind == other.kind
            np.testing.assert_array_equal(
                [one.estimate.low, one.estimate.high], [-other.estimate.high, -other.estimate.low]
            )
        assert (forth.clear, forth.more_local) == (back.clear, back.more_local)
        assert set(forth.headline.split()) == set(back.headline.split()) or not forth.clear


def test_one_image_has_no_interval_and_says_so():
    for paired in (True, False):
        reading = compare(*two_models(np.array([0.1]), np.array([0.5]), with_images=paired))
        assert not reading.clear
        assert {found.kind for found in numbers(reading)} == {"no interval"}
        assert "0.100 (one image)" in reading.sentences[1]
        assert (
            "They differ by 0.400; an interval needs at least two images, so nothing can be said."
            in reading.sentences[1]
        )


class TestTheMostLocalHead:
    def test_each_half_is_measured_on_the_head_that_the_other_half_chose(self):
        random = np.random.default_rng(5)
        values = random.uniform(0.2, 0.6, (21, 2, 3)).astype(np.float32)
        head = most_local_head(model_of("a", values, digests=np.arange(21)))
        flat = values.reshape(21, 6).astype(np.float64)
        expected = [
            flat[
                place, min(range(6), key=lambda head: np.mean([flat[n, head] for n in range(21) if n % 2 != place % 2]))
            ]
            for place in range(21)
        ]
        np.testing.assert_allclose(head.values, expected)
        assert head.mean == pytest.approx(flat.mean(0).min())

    def test_the_same_head_is_itself(self):
        values = np.random.default_rng(6).uniform(0.2, 0.6, (40, 2, 3))
        values[:, 1, 2] -= 0.2
        head = most_local_head(model_of("a", values))
        assert (head.layer, head.head, head.is_settled) == (1, 2, True)
        np.testing.assert_allclose(head.values, values[:, 1, 2], rtol=1e-6)

    def test_chance_does_not_make_a_model_of_many_heads_more_local(self):
        """One head against twelve that are no different: the smallest of twelve means would win."""
        random = np.random.default_rng(7)
        naive, halves = [], []
        for _ in range(300):
            one, many = random.normal(0.4, 0.1, (8, 1, 1)), random.normal(0.4, 0.1, (8, 1, 12))
            found = differ(most_local_head(model_of("a", one)), most_local_head(model_of("b", many)))
            halves.append(found.estimate.value)
            naive.append(found.a.mean - found.b.mean)
        assert np.mean(naive) > 0.04
        assert abs(np.mean(halves)) < 3 * np.std(halves) / 300**0.5

    def test_a_choice_that_hangs_on_the_images_is_named(self):
        values = np.full((10, 1, 2), 0.4) + np.random.default_rng(8).normal(0, 0.01, (10, 1, 2))
        values[::2, 0, 0] -= 0.1
        values[1::2, 0, 1] -= 0.1
        unsettled, other = model_of("a", values), model_of("b", np.full((10, 1, 1), 0.5))
        (words,) = (s for s in compare(unsettled, other).sentences if "depends on the images" in s)
        assert words.startswith("Which head of “a” is the most local depends on the images")
        assert not any("depends on the images" in s for s in compare(other, replace(other, label="c")).sentences)

    def test_one_image_chooses_for_itself(self):
        head = most_local_head(model_of("a", np.array([[[0.4, 0.3]]])))
        assert (head.head, list(head.values)) == (1, pytest.approx([0.3]))


def test_different_grids_are_compared_as_if_they_were_one():
    """With both scaled to the mean of their distances of uniform attention, by the same rule."""
    random = np.random.default_rng(9)
    values = random.uniform(0.3, 0.4, 200)
    fine, coarse = (
        Quantity(
            label=label, layer=0, head=None, mean=float(some.mean()), std=float(some.std()), num_images=200,
            uniform=uniform, digests=np.arange(200, dtype=np.uint64), values=some,
        )
        for label, some, uniform in (("fine", values, 0.4), ("coarse", values * 1.25 + 0.001, 0.5))
    )  # fmt: skip
    found = differ(fine, coarse)
    expected = stats.ttest_rel(values * 0.45 / 0.4, (values * 1.25 + 0.001) * 0.45 / 0.5).confidence_interval(0.95)
    assert found.estimate.high < -SMALLEST
    assert (found.scaled.low, found.scaled.high) == pytest.approx((expected.low, expected.high))
    assert found.kind == "clear but for the grids"
    assert found.lower is None
    assert differ(fine, replace(coarse, uniform=None)).clear


def test_machines_get_numbers_and_nothing_that_json_has_not():
    a, b = two_models(*alike(20))
    found = json.loads(json.dumps(compare(a, b).as_json(), allow_nan=False))
    assert found["models"] == ["a", "b"]
    assert found["first_layer"]["paired"] is True
    assert found["first_layer"]["n"] == 20
    assert found["first_layer"]["low"] < found["first_layer"]["difference"] < found["first_layer"]["high"] < 0
    one = compare(*two_models(np.array([0.1]), np.array([0.5]))).as_json()
    assert json.loads(json.dumps(one, allow_nan=False))["first_layer"]["low"] is None
