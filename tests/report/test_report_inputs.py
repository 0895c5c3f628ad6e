"""What reports are made of: read, checked, and told apart."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.lens.perimage import PerImage
from nearsight.metrics import Moments
from nearsight.report import ModelHeads, mad_profiles, read_heads, read_history
from nearsight.report.inputs import HISTORY_COLUMNS, read_measured, shorten, with_images, write_measured
from nearsight.train import HEADS_COLUMNS


def test_heads_and_history_come_back_from_csv(tmp_path, heads_frame, history_frame):
    heads, history = heads_frame(), history_frame()
    heads.to_csv(tmp_path / "heads.csv", index=False)
    history.to_csv(tmp_path / "history.csv", index=False)
    pd.testing.assert_frame_equal(read_heads(tmp_path / "heads.csv"), heads)
    pd.testing.assert_frame_equal(read_history(tmp_path / "history.csv"), history)


def test_padded_heads_stay_missing(tmp_path, heads_frame):
    heads = heads_frame()
    heads.loc[3, ["mad", "mad_std", "entropy", "entropy_std"]] = np.nan
    heads.to_csv(tmp_path / "heads.csv", index=False)
    assert read_heads(tmp_path / "heads.csv")["mad"].isna().tolist() == [row == 3 for row in range(24)]


@pytest.mark.parametrize("column", HEADS_COLUMNS)
def test_a_missing_column_is_named_with_the_file(tmp_path, column, heads_frame):
    path = tmp_path / "heads.csv"
    heads_frame().drop(columns=column).to_csv(path, index=False)
    with pytest.raises(InputError, match=rf"{path}.*{column!r}"):
        read_heads(path)


@pytest.mark.parametrize("column", HISTORY_COLUMNS)
def test_a_history_without_a_column_is_refused(tmp_path, column, history_frame):
    path = tmp_path / "history.csv"
    history_frame().drop(columns=column).to_csv(path, index=False)
    with pytest.raises(InputError, match=rf"{path}.*{column!r}"):
        read_history(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged or not a CSV"),
        (b"\xff\xfe\x00\x01 not text", "damaged or not a CSV"),
        (b'a,b\n1,2\n3,"4\n', "damaged or not a CSV"),
        (",".join(HEADS_COLUMNS).encode(), "no rows"),
        (b"PK\x03\x04 a zip file", "no column"),
    ],
)
def test_damaged_files_are_one_line_that_names_the_file(tmp_path, content, reason):
    path = tmp_path / "heads.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        read_heads(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_heads(tmp_path / "none.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_heads(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("mad", 1.2, "lies in"),
        ("entropy", -0.5, "lies in"),
        ("mad_std", -0.1, "negative"),
        ("layer", 0.5, "whole numbers"),
        ("head", -1, "whole numbers"),
        ("num_images", np.nan, "whole numbers"),
        ("mad", "much", "not a number"),
        ("head", 0, "twice"),
    ],
)
def test_impossible_values_are_refused(column, value, reason, heads_frame):
    heads = heads_frame()
    heads[column] = [value, *heads[column][1:]] if column != "head" or value < 0 else value
    with pytest.raises(InputError, match=reason):
        ModelHeads(label="model", heads=heads)


def test_the_last_epoch_is_reported_unless_another_is_asked_for(heads_frame):
    early, late = heads_frame(seed=1, epoch=2), heads_frame(seed=2, epoch=7)
    model = ModelHeads(label="model", heads=pd.concat([late, early]))
    np.testing.assert_array_equal(model.matrix("mad").ravel(), late["mad"])
    np.testing.assert_array_equal(replace(model, epoch=2).matrix("mad").ravel(), early["mad"])
    with pytest.raises(InputError, match="epoch 5"):
        replace(model, epoch=5)


def test_a_matrix_has_measured_layers_only_and_nan_for_heads_without_a_row(heads_frame):
    heads = heads_frame(num_layers=3, num_heads=2)
    heads = heads[(heads["layer"] != 1) & ~((heads["layer"] == 2) & (heads["head"] == 1))].sample(
        frac=1, random_state=0
    )
    model = ModelHeads(label="model", heads=heads)
    assert model.layers() == (0, 2)
    matrix = model.matrix("mad")
    assert matrix.shape == (2, 2)
    assert np.isnan(matrix).tolist() == [[False, False], [False, True]]
    (expected,) = heads.loc[(heads["layer"] == 2) & (heads["head"] == 0), "mad"]
    assert matrix[1, 0] == expected


@pytest.mark.parametrize("told", [{"epoch": []}, {"epoch": "x"}, {"test_accuracy": []}, {"test_accuracy": "0.5"}])
def test_what_is_no_number_is_not_taken_for_one(heads_frame, told):
    with pytest.raises(InputError, match=r"of 'model' is .*, which is not a number"):
        ModelHeads(label="model", heads=heads_frame(), **told)


def test_two_models_of_one_name_are_refused(make_model):
    with pytest.raises(InputError, match="both called 'twin'"):
        mad_profiles([make_model("twin"), make_model("twin", seed=1)])
    with pytest.raises(InputError, match="at least one"):
        mad_profiles([])


def test_shortening_keeps_both_ends_and_drops_what_breaks_a_line():
    assert shorten("plain", 10) == "plain"
    long = shorten("begin " + "x" * 500 + " end", 20)
    assert len(long) <= 20
    assert long.startswith("begin")
    assert long.endswith("end")
    assert shorten("two\nlines\x00 and \u202eturned", 40) == "two lines and turned"
    assert shorten("\u202e", 40) == "unnamed"


class TestNumbersOfSingleImages:
    @pytest.fixture
    def table(self):
        """Three layers, of which one looks along time alone and has no distance; heads of one layer are fewer."""
        random = np.random.default_rng(0)
        mad, entropy = random.uniform(size=(2, 12, 3, 2))
        mad[:, 0, 1] = entropy[:, 0, 1] = np.nan
        mad[:, 1] = entropy[:, 1] = np.nan
        images = PerImage.of(random.integers(0, 2**63, 12, dtype=np.uint64), mad, entropy)
        return HeadTable(("a", "b", "c"), Moments.of(mad), Moments.of(entropy), per_image=images)

    @staticmethod
    def model_of(table, numbers=(0, 1, 2)):
        """As `nearsight measure` makes it, with the numbers that the layers have in the whole model."""
        frame = table.to_frame()
        return ModelHeads(label="m", heads=frame.assign(epoch=0, layer=[numbers[place] for place in frame["layer"]]))

    def test_they_are_those_of_each_row(self, table):
        model = with_images(self.model_of(table, numbers=(3, 4, 7)), table)
        rows = model.measured()
        assert rows["layer"].tolist() == [3, 7, 7]
        for metric in ("mad", "entropy"):
            np.testing.assert_allclose(model.image_values(metric, rows).mean(0), rows[metric], rtol=1e-6)
            values = getattr(table.per_image, metric)[:, [0, 2, 2], [0, 0, 1]]
            np.testing.assert_array_equal(model.image_values(metric, rows), values)

    def test_a_folder_keeps_them(self, table, tmp_path):
        model = self.model_of(table)
        model.heads.to_csv(tmp_path / "heads.csv", index=False)
        assert read_measured(tmp_path).heads.per_image is None
        table.save(tmp_path / "heads.npz")
        kept = read_measured(tmp_path).heads
        np.testing.assert_array_equal(kept.per_image.digests, table.per_image.digests)
        np.testing.assert_array_equal(kept.per_image.mad, table.per_image.mad[:, [0, 2]])
        replace(table, per_image=None).save(tmp_path / "heads.npz")  # as earlier versions did
        assert read_measured(tmp_path).heads.per_image is None
        (tmp_path / "heads.npz").write_bytes(b"PK")
        with pytest.raises(InputError, match=r"heads\.npz is damaged"):
            read_measured(tmp_path)

    def test_those_of_something_else_are_not_taken(self, table):
        model = self.model_of(table)
        other = replace(model, heads=model.heads.assign(mad=model.heads["mad"] + 1e-6))
        more = replace(model, heads=model.heads.assign(num_images=13))
        named = replace(model, heads=model.heads.assign(layer_name="d"))
        wide = replace(model, heads=model.heads.assign(head=[0, 1, 2]))
        assert with_images(model, table).per_image is not None
        for unlike in (other, more, named, wide):
            assert with_images(unlike, table).per_image is None
        for layers in ([0], [0, 1, 2]):
            with pytest.raises(InputError, match="single images of 'm' are of other heads"):
                replace(model, per_image=table.per_image.choose(layers))


def test_uniform_attention_comes_back_and_what_cannot_be_one_is_refused(tmp_path, make_model):
    model = replace(make_model(), uniform={0: 0.25, 1: float("nan")}, grids={2: (8, 8)})
    model.heads.to_csv(tmp_path / "heads.csv", index=False)
    path = write_measured(tmp_path, model, None)
    kept = read_measured(tmp_path).heads
    assert [kept.uniform_distance(layer) for layer in (0, 1, 3)] == [0.25, None, None]
    assert kept.uniform_distance(2) == pytest.approx(0.417848, abs=1e-6)  # of its grid
    record = json.loads(path.read_text())
    for damaged in ({"0": 1.5}, {"a": 0.2}, [0.2], {"0": "x"}):
        path.write_text(json.dumps({**record, "uniform": damaged}))
        with pytest.raises(InputError, match=r"measured.json is damaged: "):
            read_measured(tmp_path)
