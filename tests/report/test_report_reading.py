"""Words must follow from numbers, and from nothing else."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.errors import InputError
from nearsight.report.differences import SMALLEST, first_layer_mean, most_local_head
from nearsight.report.figures.models import locality_spreads
from nearsight.report.inputs import ModelHeads
from nearsight.report.page.tables import overview
from nearsight.report.reading import ONE_RUN, compare, describe, layer_table


def tiny_model(label, mads, stds, num_images=50):
    """Layers as rows of numbers."""
    rows = [
        {"layer": layer, "head": head, "mad": mad, "mad_std": std}
        for layer, (row, row_stds) in enumerate(zip(mads, stds, strict=True))
        for head, (mad, std) in enumerate(zip(row, row_stds, strict=True))
    ]
    frame = pd.DataFrame(rows).assign(epoch=0, layer_name="", entropy=0.5, entropy_std=0.1, num_images=num_images)
    return ModelHeads(label=label, heads=frame)


LOCAL = tiny_model("near", [[0.10, 0.20], [0.40, 0.50]], [[0.01, 0.03], [0.01, 0.01]])
GLOBAL = tiny_model("far", [[0.40, 0.50], [0.35, 0.45]], [[0.02, 0.02], [0.02, 0.02]])


def test_the_numbers_are_those_of_the_definition():
    head, layer = most_local_head(GLOBAL), first_layer_mean(LOCAL)
    assert (head.layer, head.head) == (1, 0)
    assert (head.mean, head.std) == (0.35, 0.02)
    assert head.low == pytest.approx(0.35 - 1.96 * 0.02)
    assert head.high == pytest.approx(0.35 + 1.96 * 0.02)
    assert layer.mean == pytest.approx(0.15)
    assert layer.std == pytest.approx(0.02)  # the mean of 0.01 and 0.03


def test_a_clear_difference_is_said_with_its_numbers_and_places():
    reading = compare(LOCAL, GLOBAL)
    assert reading.clear
    assert reading.more_local == "near"
    assert reading.headline == "“near” attends more locally than “far”."
    text = " ".join(reading.sentences)
    for part in (
        "0.100 (spread over images 0.080 to 0.120)",
        "0.350 (spread over images 0.311 to 0.389)",
        "(layer 0, head 0)",  # rows of heads.csv, which counts from 0
        "(layer 1, head 0)",
        "0.450",
        "lower by 0.250 (95 % interval 0.244 to 0.256, ",
    ):
        assert part in text
    assert reading.sentences[-1] == ONE_RUN


def test_swapping_the_models_swaps_the_verdict():
    forth, back = compare(LOCAL, GLOBAL), compare(GLOBAL, LOCAL)
    assert forth.more_local == back.more_local == "near"
    assert forth.headline == back.headline
    renamed = compare(replace(LOCAL, label="far"), replace(GLOBAL, label="near"))
    assert renamed.more_local == "far"


def with_entropy(model, entropy, std):
    return replace(model, heads=model.heads.assign(entropy=entropy, entropy_std=std))


def test_selectivity_is_told_apart_from_locality():
    """Equal distances, different entropies: one model looks more selectively, neither more locally."""
    sharp, blurred = with_entropy(LOCAL, 0.3, 0.02), replace(with_entropy(LOCAL, 0.8, 0.05), label="blurred")
    for a, b in ((sharp, blurred), (blurred, sharp)):
        reading = compare(a, b)
        assert not reading.clear
        assert reading.focus.lower is not None
        assert reading.focus.lower.label == "near"
        (words,) = [sentence for sentence in reading.sentences if "entropy" in sentence]
        assert "0.300 (spread over images 0.261 to 0.339)" in words
        assert "In “near” it is lower by 0.500 (95 % interval 0.485 to 0.515, " in words
        assert words.endswith(": “near” attends more selectively.")
        assert reading.headline.endswith("; “near” attends more selectively in its first layer.")
    same = compare(sharp, replace(with_entropy(LOCAL, 0.31, 0.02), label="other"))
    assert same.focus.lower is None


def test_equal_models_have_no_clear_difference():
    reading = compare(LOCAL, LOCAL)
    assert not reading.clear
    assert reading.more_local is None
    assert reading.headline == "In locality “near” and “near” differ by less than 0.02 of the diagonal."
    assert sum("Neither is lower (95 % interval −" in sentence for sentence in reading.sentences) == 3


def test_each_number_has_its_own_verdict():
    one_local_head = tiny_model("odd", [[0.40, 0.50], [0.05, 0.45]], [[0.02, 0.02], [0.001, 0.02]])
    reading = compare(one_local_head, GLOBAL)
    assert reading.most_local_head.clear
    assert not reading.first_layer.clear
    assert reading.more_local == "odd"
    assert reading.headline == "“odd” has a more local head than “far”; their first layers differ by less than 0.02."
    local_layer = tiny_model("even", [[0.33, 0.33], [0.45, 0.45]], [[0.02, 0.02], [0.02, 0.02]])
    assert compare(GLOBAL, local_layer).headline == (
        "“even” has a more local first layer than “far”; their most local heads do not clearly differ."
    )


def test_contradicting_numbers_are_both_told_and_neither_is_the_more_local():
    local_head = tiny_model("head", [[0.40, 0.50], [0.01, 0.45]], [[0.01, 0.01], [0.001, 0.02]])
    local_layer = tiny_model("layer", [[0.20, 0.20], [0.45, 0.45]], [[0.01, 0.01], [0.02, 0.02]])
    reading = compare(local_head, local_layer)
    assert reading.most_local_head.lower.label == "head"
    assert reading.first_layer.lower.label == "layer"
    assert not reading.clear
    assert reading.more_local is None
    assert reading.headline == "“head” has the more local head, “layer” the more local first layer."
    assert compare(local_layer, local_head).headline == reading.headline


def test_models_of_one_name_are_not_mixed_up():
    reading = compare(LOCAL, replace(GLOBAL, label="near"))
    assert reading.clear
    assert reading.most_local_head.lower is reading.most_local_head.a
    assert reading.first_layer.lower is reading.first_layer.a


def test_one_image_has_no_interval_and_gives_no_verdict():
    one = tiny_model("one", [[0.01]], [[0.0]], num_images=1)
    reading = compare(one, GLOBAL)
    assert not reading.clear
    assert "0.010 (one image)" in reading.sentences[1]
    assert "at least two images" in reading.sentences[1]


def test_padded_heads_do_not_count():
    padded = tiny_model("padded", [[0.2, np.nan], [0.3, 0.4]], [[0.01, np.nan], [0.01, 0.01]])
    assert most_local_head(padded).mean == 0.2
    assert first_layer_mean(padded).mean == 0.2
    assert first_layer_mean(padded).has_spread
    with pytest.raises(InputError, match="“void” has no measured head"):
        compare(tiny_model("void", [[np.nan]], [[np.nan]]), GLOBAL)


def test_a_head_of_unknown_spread_leaves_its_layer_without_one():
    unknown = tiny_model("unknown", [[0.1, 0.2]], [[0.01, np.nan]])
    assert most_local_head(unknown).has_spread
    assert not first_layer_mean(unknown).has_spread
    assert compare(unknown, GLOBAL).first_layer.kind == "no interval"
    assert "0.150 (spread not known)" in compare(unknown, GLOBAL).sentences[2]


def test_spreads_stay_where_distances_can_be():
    wide = tiny_model("wide", [[0.02, 0.99]], [[0.2, 0.2]])
    assert most_local_head(wide).low == 0.0
    assert replace(most_local_head(wide), mean=0.99).high == 1.0


def test_long_and_unprintable_names_do_not_break_a_sentence():
    reading = compare(replace(LOCAL, label="x\n" * 400), GLOBAL)
    assert reading.more_local == "x\n" * 400
    assert all("\n" not in sentence and len(sentence) < 500 for sentence in reading.sentences)


models = st.builds(
    lambda label, rows, num_images: tiny_model(
        label, [[mad for mad, _ in row] for row in rows], [[std for _, std in row] for row in rows], num_images
    ),
    st.just("?"),
    st.lists(
        st.lists(
            st.tuples(st.floats(0, 1, allow_nan=False), st.floats(0, 0.3, allow_nan=False)), min_size=1, max_size=3
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 3),
)


@settings(max_examples=100, deadline=None)
@given(models, models)
def test_the_verdict_is_antisymmetric_and_never_beyond_the_interval(first, second):
    a, b = replace(first, label="a"), replace(second, label="b")
    forth, back = compare(a, b), compare(b, a)
    assert (forth.clear, forth.more_local) == (back.clear, back.more_local)
    other = {"a": "b", "b": "a", None: None}
    assert compare(replace(a, label="b"), replace(b, label="a")).more_local == other[forth.more_local]
    assert forth.clear == (forth.more_local is not None)
    if forth.clear:
        winners = {found.lower.label for found in (forth.most_local_head, forth.first_layer) if found.clear}
        assert winners == {forth.more_local}
    for found in (forth.most_local_head, forth.first_layer):
        if found.clear:
            higher = found.b if found.lower is found.a else found.a
            assert higher.mean - found.lower.mean > SMALLEST
            assert min(abs(found.estimate.low), abs(found.estimate.high)) > SMALLEST
    assert not compare(a, a).clear
    assert forth.sentences[-1] == ONE_RUN


def test_the_layer_table_holds_minima_and_means(make_model):
    short = replace(make_model("short", num_layers=2), label="short")
    table = layer_table([LOCAL, short, make_model("long", num_layers=3)])
    assert table.index.tolist() == [0, 1, 2]
    assert table.index.name == "layer"
    assert table["near"].to_string().split()[:2] == ["min_mad", "mean_mad"]  # nothing before the first heading
    assert table[("near", "min_mad")].tolist()[:2] == [0.10, 0.40]
    assert table[("near", "mean_mad")].tolist()[:2] == pytest.approx([0.15, 0.45])
    assert table[("near", "mean_entropy")].tolist()[:2] == [0.5, 0.5]
    assert table["near"].loc[2].isna().all()
    assert table["long"].loc[2].notna().all()
    heads = short.heads
    assert table[("short", "min_entropy")].loc[1] == heads.loc[heads["layer"] == 1, "entropy"].min()


def test_a_single_model_is_described_by_its_numbers():
    first, second, *_ = describe(LOCAL)
    assert "0.100 (spread over images 0.080 to 0.120)" in first
    assert "layer 0, head 0, measured on 50 images" in second
    assert "0.150 (spread over images 0.111 to 0.189)" in second
    assert "1 image." in describe(tiny_model("one", [[0.1]], [[0.0]], num_images=1))[1]


def test_a_head_that_looks_at_its_own_patch_is_not_passed_off_as_local():
    mads = [[0.004, 0.20], [0.12, 0.03]]
    near = replace(tiny_model("near", mads, [[0.001] * 2] * 2), grids={0: (8, 8), 1: (8, 8)})
    (told,) = (words for words in describe(near) if "own patch rather" in words)
    assert told.startswith("Layer 0, head 0 of “near” attends to its own patch")
    assert "the next patch at 0.101, at least 96 % of its attention on patches stays there" in told
    assert "It is the most local of 2 such heads. The most local of the others is layer 1, head 0, at 0.120." in told
    # On a finer grid neither is below half a patch; without a grid nobody knows.
    fine = {0: (200, 200), 1: (2, 2)}
    (told,) = (words for words in describe(replace(near, grids=fine)) if "own patch rather" in words)
    assert told.startswith("Layer 1, head 1 of")
    # Nor does a patch that is alone choose to look at itself.
    for grids in (None, {}, {0: (200, 200), 1: (40, 40)}, {0: (1, 1), 1: (1, 1)}):
        assert not any("own patch rather" in words for words in describe(replace(near, grids=grids)))
    both = compare(near, replace(GLOBAL, grids=near.grids))
    assert sum("own patch rather" in words for words in both.sentences) == 1
    alone = replace(tiny_model("one", [[0.001]], [[0.0]]), grids={0: (8, 8)})
    assert not any("of the others" in words for words in describe(alone))


class TestWhatTheNumbersOfOneModelMean:
    def test_its_most_local_head_is_placed_between_its_own_patch_and_uniform_attention(self):
        (words,) = (words for words in describe(replace(LOCAL, grids={0: (8, 8), 1: (8, 8)})) if "uniform" in words)
        assert words == (
            "In its layer (8 × 8 patches) a head that attends to its own patch alone has a distance of 0, one that "
            "attends to the next patch 0.101, and uniform attention 0.418 with an entropy of 1, which is about what "
            "random weights give: this head has 24 % of the distance of uniform attention."
        )
        assert not any("uniform" in words for words in describe(LOCAL))  # whose grid nobody knows

    def test_uniform_attention_is_that_of_the_layer_where_it_was_found(self):
        """Such as in windows, where the grid of the image says something else."""
        found = replace(LOCAL, grids={0: (8, 8), 1: (8, 8)}, uniform={0: 0.2, 1: 0.3})
        assert any("uniform attention 0.200 with" in words and "50 % of" in words for words in describe(found))
        assert compare(found, GLOBAL).most_local_head.a.uniform == 0.2
        unclear = replace(found, uniform={0: float("nan"), 1: 0.3})
        assert unclear.uniform_distance(0) is None
        assert not any("uniform" in words for words in describe(unclear))

    @pytest.mark.parametrize(
        ("mad", "entropy", "is_said"),
        [(0.40, 0.99, True), (0.38, 0.99, False), (0.46, 0.99, False), (0.42, 0.96, False)],
    )
    def test_weights_that_may_be_random_are_asked_about_first(self, mad, entropy, is_said):
        model = tiny_model("ViT", [[0.418, 0.42], [mad, 0.41]], [[0.01] * 2] * 2)
        model.heads["entropy"] = [1.0, 1.0, entropy, 1.0]
        model = replace(model, grids={0: (8, 8), 1: (8, 8)})
        question = "“ViT” is indistinguishable from uniform attention: are these weights random?"
        assert (describe(model)[0] == question) == is_said
        assert describe(model)[1].startswith("Did you mean --pretrained (in Python: pretrained=True)?") == is_said
        assert (question in compare(LOCAL, model).sentences) == is_said
        assert question not in describe(replace(model, grids={0: (8, 8)}))  # of one layer it is not known


def test_a_reading_prints_as_its_sentences_and_shows_as_text_that_cannot_be_markup():
    reading = compare(replace(LOCAL, label="<b>"), GLOBAL)
    assert str(reading) == "\n".join(reading.sentences)
    html = reading._repr_html_()
    assert "<strong>“&lt;b&gt;” attends more locally than “far”.</strong></p><p" in html
    assert html.count("<p ") == len(reading.sentences)
    assert "<b>" not in html


def without_first(model, num_layers):
    """As --layers measures it."""
    return replace(model, heads=model.heads.assign(layer=model.heads["layer"] + num_layers))


class TestLayersThatWereLeftOut:
    def test_what_is_not_the_first_layer_is_not_called_so(self):
        odd = tiny_model("odd", [[0.40, 0.50], [0.05, 0.45]], [[0.02, 0.02], [0.001, 0.02]])
        even = tiny_model("even", [[0.30, 0.30], [0.45, 0.45]], [[0.02, 0.02], [0.02, 0.02]])
        for a in (LOCAL, GLOBAL, odd, even):
            for b in (LOCAL, GLOBAL, odd, even):
                whole = compare(replace(a, label="a", grids=FINE), replace(b, label="b", grids=COARSE))
                parts = compare(
                    replace(without_first(a, 7), label="a", grids={7: (8, 8), 8: (8, 8)}),
                    replace(without_first(b, 1), label="b", grids={1: (4, 4), 2: (4, 4)}),
                )
                assert (parts.clear, parts.more_local) == (whole.clear, whole.more_local)
                headline, _, distance, entropy, grids, *_ = parts.sentences
                assert "first layer" not in " ".join(parts.sentences)
                for name in ("“a” (from layer 7 on)", "“b” (from layer 1 on)"):
                    assert name in headline
                for sentence in (distance, entropy, grids):
                    assert "the first measured layer" in sentence
                    assert "“a” (layer 7)" in sentence
                    assert "“b” (layer 1)" in sentence

    def test_one_model_that_was_measured_in_part_beside_a_whole_one(self):
        reading = compare(LOCAL, without_first(GLOBAL, 3))
        assert reading.headline == "“near” attends more locally than “far” (from layer 3 on)."
        assert "for “near” and 0.450 (spread over images 0.411 to 0.489) for “far” (layer 3)." in reading.sentences[2]

    def test_one_model_alone(self):
        first, second, *_ = describe(without_first(LOCAL, 4))
        assert first.startswith("The most local head of “near” (from layer 4 on) has")
        assert second.startswith(
            "It is layer 4, head 0, measured on 50 images. Averaged over the heads of layer 4, the"
        )

    def test_the_page_says_which(self):
        whole, part = overview([LOCAL, GLOBAL]), overview([LOCAL, without_first(GLOBAL, 3)])
        assert ">first layer, mean<" in whole
        assert ">first measured layer, mean<" in part
        assert "layer 3</td>" in part
        for models, title in (([LOCAL], "first layer, "), ([without_first(LOCAL, 1)], "first measured layer, ")):
            assert locality_spreads(models).axes[1].get_title("left") == f"{title}mean of its heads"


def test_rows_that_share_an_index_are_still_told_apart(heads_frame):
    frames = [heads_frame(seed=1, epoch=1), heads_frame(seed=2, epoch=2)]
    model = ModelHeads(label="model", heads=pd.concat(frames))
    assert most_local_head(model).mean == frames[1]["mad"].min()


FINE = {0: (8, 8), 1: (8, 8)}  # uniform attention: 0.418
COARSE = {0: (4, 4), 1: (4, 4)}  # uniform attention: 0.473


class TestDifferentGrids:
    """On a coarse grid even a head that ignores the image has a larger distance than on a fine one."""

    def test_what_the_grids_explain_is_no_difference(self):
        fine = tiny_model("fine", [[0.417, 0.418]], [[0.001, 0.001]])
        coarse = tiny_model("coarse", [[0.472, 0.473]], [[0.001, 0.001]])
        assert compare(fine, coarse).clear  # as far as is known
        reading = compare(replace(fine, grids=FINE), replace(coarse, grids=COARSE))
        assert not reading.clear
        assert reading.headline == "No clear difference in locality between “fine” and “coarse”."
        assert "but by 0.000 (−0.001 to 0.000) with both scaled to the same distance" in reading.sentences[1]
        assert "has a distance of 0.418 in “fine” and 0.473 in “coarse”" in reading.sentences[4]

    def test_what_they_do_not_explain_is_one(self):
        reading = compare(replace(LOCAL, grids=FINE), replace(GLOBAL, grids=COARSE))
        assert reading.more_local == "near"
        assert reading.headline == compare(LOCAL, GLOBAL).headline

    def test_a_difference_that_turns_round_is_none(self):
        """Lower in diagonals, but higher relative to uniform attention."""
        a = tiny_model("a", [[0.38, 0.38]], [[0.001, 0.001]])
        b = tiny_model("b", [[0.41, 0.41]], [[0.001, 0.001]])
        reading = compare(replace(a, grids=FINE), replace(b, grids=COARSE))
        assert not reading.first_layer.clear
        assert "lower by 0.030" in reading.sentences[2]
        assert "but by −0.019 (−0.020 to −0.019) with both scaled" in reading.sentences[2]

    def test_equal_grids_change_nothing(self):
        reading = compare(replace(LOCAL, grids=FINE), replace(GLOBAL, grids=FINE))
        assert reading.sentences == compare(LOCAL, GLOBAL).sentences
