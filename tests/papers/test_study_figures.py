"""What the figures of a study show is what its runs gave: read back from the artists, not from the picture."""

import dataclasses
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nearsight.errors import InputError
from nearsight.papers.protocol.numbers import PUBLISHED
from nearsight.report.figures.looks import looks
from nearsight.report.most_local import minimum
from nearsight.report.study_figures import key_conditions, maps, plane, profiles

ALL = (profiles, plane, maps, minimum, key_conditions)


def artist(drawing, name):
    (found,) = drawing.figure.findobj(lambda candidate: candidate.get_gid() == name)
    return found


def drawn(drawing):
    return {candidate.get_gid() for candidate in drawing.figure.findobj() if candidate.get_gid()}


def heads_by_seed(results, condition, layer=None):
    """Per seed: the rows of the condition's run, of one layer or of all."""
    runs = results.runs[results.runs["condition"] == condition].sort_values("seed")
    frames = [results.heads[results.heads["run"] == run] for run in runs["run"]]
    return [frame if layer is None else frame[frame["layer"] == layer] for frame in frames]


@pytest.fixture(scope="module")
def study(make_study):
    return make_study()


@pytest.mark.parametrize("metric", ["mad", "entropy"])
def test_profiles_are_sorted_per_seed_then_averaged_and_bands_are_the_range(study, metric):
    drawing = profiles(study)
    lines = {name for name in drawn(drawing) if name.startswith(metric)}
    assert lines == {f"{metric}-{label}-{layer}" for label in ("Modern", "Baseline") for layer in (0, 1, 6, 7)}
    for label in ("Modern", "Baseline"):
        for layer in (0, 1, 6, 7):
            seeds = np.array([sorted(frame[metric]) for frame in heads_by_seed(study, label, layer)])
            line = artist(drawing, f"{metric}-{label}-{layer}")
            np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 9))
            np.testing.assert_allclose(line.get_ydata(), seeds.mean(axis=0))
            band = artist(drawing, f"band-{metric}-{label}-{layer}").get_paths()[0].vertices
            for rank in range(8):
                edges = band[band[:, 0] == rank + 1, 1]
                assert (edges.min(), edges.max()) == pytest.approx((seeds[:, rank].min(), seeds[:, rank].max()))
            dots = artist(drawing, f"seeds-{metric}-{label}-{layer}")
            np.testing.assert_array_equal(dots.get_xdata(), np.repeat(np.arange(1, 9), 3))
            np.testing.assert_allclose(np.sort(dots.get_ydata().reshape(8, 3)), np.sort(seeds.T))
    assert "mean over 3 seeds" in drawing.caption
    assert "dots: seeds; bands: their range" in artist(drawing, "footnote").get_text()


def test_profiles_of_two_seeds_have_dots_and_no_band(make_study):
    drawing = profiles(make_study(seeds=2))
    assert not any(name.startswith("band") for name in drawn(drawing))
    assert len(artist(drawing, "seeds-mad-Modern-0").get_xdata()) == 16
    words = artist(drawing, "footnote").get_text()
    assert "mean over 2 seeds at each rank; dots: seeds." in words
    assert "band" not in drawing.caption.split("In the paper")[0]
    low, high = drawing.figure.axes[0].get_ylim()
    for name in drawn(drawing):
        if name.startswith("seeds-mad"):
            assert low < artist(drawing, name).get_ydata().min()
            assert artist(drawing, name).get_ydata().max() < high


def test_profiles_tell_conditions_by_three_signs_and_layers_by_shade_and_fill(study):
    drawing = profiles(study)
    for layer in (0, 1, 6, 7):
        full, base = (artist(drawing, f"mad-{label}-{layer}") for label in ("Modern", "Baseline"))
        assert full.get_color() != base.get_color()
        assert (full.get_marker(), base.get_marker()) == ("o", "^")
        assert (full.is_dashed(), base.is_dashed()) == (False, True)
    fills = [artist(drawing, f"mad-Modern-{layer}").get_fillstyle() for layer in (0, 1, 6, 7)]
    assert fills == ["full", "none", "full", "none"]


def test_one_seed_has_bands_over_images_and_says_so(make_study):
    results = make_study(seeds=1)
    drawing = profiles(results)
    (heads,) = heads_by_seed(results, "Modern", 0)
    heads = heads.sort_values("mad")
    band = artist(drawing, "band-mad-Modern-0").get_paths()[0].vertices
    for rank, (mean, std) in enumerate(zip(heads["mad"], heads["mad_std"], strict=True), start=1):
        edges = band[band[:, 0] == rank, 1]
        assert (edges.min(), edges.max()) == pytest.approx((mean - std, mean + std))
    assert "standard deviation over images" in artist(drawing, "footnote").get_text()
    assert "standard deviation over images" in drawing.caption


def test_a_single_seed_beside_several_has_no_band_of_another_kind(make_study):
    results = make_study(seeds=3, without=[("Modern", 1), ("Modern", 2)])
    names = drawn(profiles(results))
    assert {"band-mad-Baseline-0", "seeds-mad-Baseline-0"} <= names
    assert not {"band-mad-Modern-0", "seeds-mad-Modern-0"} & names
    words = artist(profiles(results), "footnote").get_text()
    assert "mean over 1 to 3 seeds at each rank; dots: seeds; bands: their range (of 3 seeds or more)." in words


def test_the_plane_has_every_head_of_every_seed_coloured_by_layer(study):
    drawing = plane(study)
    for index, label in enumerate(("Modern", "Baseline")):
        points = artist(drawing, f"model{index}")
        expected = pd.concat(heads_by_seed(study, label))[["mad", "entropy", "layer"]].to_numpy()
        shown = np.c_[np.asarray(points.get_offsets()), points.get_array()]
        assert len(shown) == 3 * 64
        np.testing.assert_allclose(shown[np.lexsort(shown.T)], expected[np.lexsort(expected.T)])
    assert "3 seeds" in drawing.caption


def test_heatmaps_of_several_seeds_are_means_by_rank_of_distance(study):
    drawing = maps(study)
    for index, label in enumerate(("Baseline", "Modern")):
        for metric in ("mad", "entropy"):
            expected = np.zeros((8, 8))
            for layer in range(8):
                for frame in heads_by_seed(study, label, layer):
                    expected[layer] += frame.sort_values("mad", kind="stable")[metric].to_numpy() / 3
            np.testing.assert_allclose(artist(drawing, f"{metric}-model{index}").get_array(), expected)
    labels = {axes.get_xlabel() for axes in drawing.figure.axes} - {""}
    assert labels == {"head, by distance"}
    assert "sorted by their distance" in artist(drawing, "footnote").get_text()


def test_heatmaps_of_one_seed_keep_the_heads_in_their_order(make_study):
    results = make_study(seeds=1)
    drawing = maps(results)
    (heads,) = heads_by_seed(results, "Modern")
    expected = heads.pivot_table(index="layer", columns="head", values="mad").to_numpy()
    np.testing.assert_allclose(artist(drawing, "mad-model1").get_array(), expected)
    assert {axes.get_xlabel() for axes in drawing.figure.axes} - {""} == {"head (from 0)"}


def test_the_minimum_by_condition_is_sorted_marked_and_beside_the_papers(study):
    drawing = minimum(study)
    axes = artist(drawing, "mean-Modern").axes
    order = [text.get_text() for text in axes.get_yticklabels()]
    means = study.runs.groupby("condition")["min_mad"].mean()
    assert order == list(means.sort_values().index)
    for row, label in enumerate(order):
        values = study.runs.loc[study.runs["condition"] == label, "min_mad"]
        mark, paper = artist(drawing, f"mean-{label}"), artist(drawing, f"paper-{label}")
        marker = "o" if study.runs.set_index("condition").loc[label, "cutmix"].iloc[0] == "on" else "^"
        style = replace(looks(order)[label], marker=marker)
        assert mark.get_xdata()[0] == pytest.approx(values.mean())
        assert (mark.get_marker(), mark.get_color()) == (style.marker, style.colour)
        assert paper.get_xdata()[0] == PUBLISHED["ablation-cifar100"].conditions[label].min_mad
        assert (paper.get_marker(), paper.get_markerfacecolor()) == (style.marker, "none")
        low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=stats.sem(values))
        assert list(artist(drawing, f"interval-{label}").get_xdata()) == pytest.approx([max(low, 0.0), high])
        assert list(artist(drawing, f"seeds-{label}").get_xdata()) == list(values)
        for each in (mark, paper):  # in its own row
            assert round(each.get_ydata()[0]) == row
    assert drawing.figure.legends[0].get_texts()[0].get_text() == "with CutMix"


def test_the_gap_is_drawn_where_there_is_one(study, make_study):
    cutmix = study.runs["cutmix"] == "on"
    low, high = study.runs.loc[cutmix, "min_mad"].max(), study.runs.loc[~cutmix, "min_mad"].min()
    span = artist(minimum(study), "gap")
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((low, high))
    assert f"gap {high - low:.3f}" in [text.get_text() for text in span.axes.texts]
    overlapping = make_study(changed={"+CutMix": {"min_mad": 0.3}})
    assert "gap" not in drawn(minimum(overlapping))


def test_two_seeds_are_dots_without_an_interval(make_study):
    results = make_study(seeds=2)
    drawing = minimum(results)
    assert not any(name.startswith("interval") for name in drawn(drawing))
    right = artist(drawing, "mean-Modern").axes.get_xlim()[1]
    for label, runs in results.runs.groupby("condition"):
        assert list(artist(drawing, f"seeds-{label}").get_xdata()) == list(runs["min_mad"])
        assert runs["min_mad"].max() < right
    assert "mean over 2 seeds; dots: seeds." in artist(drawing, "footnote").get_text()


def test_one_seed_has_no_interval_and_says_so(make_study):
    drawing = minimum(make_study(seeds=1))
    assert not any(name.startswith(("interval", "seeds")) for name in drawn(drawing))
    assert "no interval" in artist(drawing, "footnote").get_text()


def test_the_four_conditions_have_every_head_and_their_own_marks(study):
    drawing = key_conditions(study)
    looks = set()
    for label in ("Modern", "+CutMix", "−CutMix", "Baseline"):
        points = artist(drawing, f"heads-{label}")
        expected = pd.concat(heads_by_seed(study, label))[["mad", "entropy"]].to_numpy()
        shown = np.asarray(points.get_offsets())
        np.testing.assert_allclose(shown[np.lexsort(shown.T)], expected[np.lexsort(expected.T)])
        looks.add((points.get_paths()[0].vertices.shape, points.get_paths()[0].vertices.tobytes()))
    assert len(looks) == 4
    legend = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert legend == ["Modern", "+CutMix", "−CutMix", "Baseline"]


def test_studies_of_one_factor_have_no_figure_5(make_study):
    with pytest.raises(InputError, match="two factors"):
        key_conditions(make_study("protocol-cifar100"))


@pytest.mark.parametrize("draw", ALL)
def test_small_scale_is_said_in_every_figure(make_study, draw):
    small = draw(make_study(seeds=2, scale="small"))
    assert "Small scale" in artist(small, "footnote").get_text()
    full = draw(make_study(seeds=2))
    assert "Small scale" not in artist(full, "footnote").get_text()


@pytest.mark.parametrize("draw", ALL)
def test_everything_lies_within_the_figure_and_above_its_footnote(make_study, draw):
    for results in (make_study(), make_study(seeds=2, shape=(12, 3), without=[("Modern", 1)], scale="small")):
        drawing = draw(results)
        figure = drawing.figure
        figure.draw_without_rendering()
        whole, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(whole.x0, whole.y0) > -0.01
        assert whole.x1 < width + 0.01
        assert whole.y1 < height + 0.01
        footnote = artist(drawing, "footnote").get_window_extent()
        assert all(axes.get_tightbbox().y0 >= footnote.y1 for axes in figure.axes)
        assert all(legend.get_window_extent().y0 >= footnote.y1 for legend in figure.legends)


@pytest.mark.parametrize("draw", ALL)
def test_a_study_of_our_own_is_drawn_without_the_paper(make_study, draw):
    ours = dataclasses.replace(make_study(seeds=2), name="our-own")
    drawing = draw(ours)
    assert "paper" not in drawing.caption
    assert not any(name.startswith("paper") for name in drawn(drawing))


def test_a_study_without_its_ends_says_what_it_needs(make_study):
    results = make_study(seeds=1, without=[("Modern", 0), ("Baseline", 0)])
    for draw in (profiles, plane, maps):
        with pytest.raises(InputError, match="neither has a run"):
            draw(results)
    drawing = key_conditions(results)
    assert {name for name in drawn(drawing) if name.startswith("heads")} == {"heads-+CutMix", "heads-−CutMix"}
    assert "not shown" in drawing.caption


@pytest.mark.parametrize("draw", ALL)
def test_heads_that_are_all_alike_are_drawn_whole(make_study, draw):
    """An untrained model has uniform attention: one point, which must not lie on the edge."""
    results = make_study(seeds=2, shape=(4, 3))
    alike = dataclasses.replace(
        results,
        name="our-own",
        heads=results.heads.assign(mad=0.47, entropy=1.0),
        runs=results.runs.assign(min_mad=0.47),
    )
    drawing = draw(alike)
    for axes in drawing.figure.axes:
        for line in axes.lines:
            x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
            assert axes.get_xlim()[0] < x.min()
            assert x.max() < axes.get_xlim()[1]
            assert min(axes.get_ylim()) < y.min()
            assert y.max() < max(axes.get_ylim())
        for points in axes.collections:
            if len(points.get_offsets()) and draw in (plane, key_conditions):
                assert points.get_offsets()[:, 0].max() < 0.99 * axes.get_xlim()[1]
