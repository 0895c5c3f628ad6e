"""`nearsight data` and `nearsight bench` as a person types them."""

import json
from pathlib import Path

import pytest

from nearsight.bench.augment import AugmentRow
from nearsight.cli import main
from nearsight.data import DATASETS
from nearsight.data.segmentation import SEGMENTATION_SETS


def test_list_says_what_is_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path) in shown
    assert "built in" in shown
    assert main(["data", "list", "--data-dir", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["datasets"]
    states = {row["name"]: row["state"] for row in rows}
    assert states["shapes"] == "built in"
    assert states["cifar100"] == "absent"
    assert set(states) <= set(DATASETS) | set(SEGMENTATION_SETS)


def test_check_the_built_in_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "shapes"]) == 0
    assert "ok     training images: 10,000" in capsys.readouterr().out
    assert main(["data", "check", "shapes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "lst"], "did you mean 'list'?"),
        (["data", "check", "cifar1000"], "did you mean 'cifar100'?"),
        (["data", "fetch", "shapes"], "shapes needs no files"),
        (["bench", "augmnt"], "did you mean 'augment'?"),
        (["bench", "augment", "--device", "cuda:99"], "is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_answered_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_data_set_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", "cifar100", "--data-dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert main(["train", "compact-cifar100", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "cifar100" in capsys.readouterr().err


def test_bench_prints_the_rows_it_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = AugmentRow(
        what="nearsight eager",
        device="cpu",
        num_cells=1,
        batch_size=8,
        images_per_second=1234.0,
        ratio=3.21,
        extra_bytes=5_000_000,
    )
    monkeypatch.setattr("nearsight.bench.augment.bench_augment", lambda **kwargs: [row])
    assert main(["bench", "augment", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "1,234" in shown
    assert "3.2" in shown
    assert main(["bench", "augment", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["ratio"] == 3.21
