"""Several fine-tunes over seeds, from what the command left: means, differences within seeds, the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.report.finetuned import read_finetuned, seeds_table

KNN = {("nothing", "gentle"): (0.40, 0.44), ("locat", "gentle"): (0.38, 0.43), ("locat", "abrupt"): (0.30, 0.36)}
"""(What was added, start) → a number per seed."""


def record(added: str, start: str, seed: int) -> dict[str, Any]:
    def side(value: float) -> dict[str, Any]:
        score = {"value": value, "low": value - 0.1, "high": value + 0.1, "num_images": 50}
        return {"own": score, "linear": score, "knn": score, "min_mad": value / 4, "mean_mad": value / 2, "alpha": None}

    described = {"model": "m", "added": added, "start": start, "seed": seed, "data": "d"}
    return {**described, "before": side(0.35), "after": side(KNN[added, start][seed])}


def test_differences_are_taken_within_seeds() -> None:
    table = seeds_table([record(*condition, seed) for seed in range(2) for condition in KNN])
    found = table.numbers.set_index("added")
    assert found["knn_mean"].to_dict() == pytest.approx(
        {"nothing": 0.42, "locat, gentle": 0.405, "locat, abrupt": 0.33}
    )
    assert found["knn_difference_mean"].dropna().to_dict() == pytest.approx(
        {"locat, gentle": -0.015, "locat, abrupt": -0.09}
    )
    assert found["mean_mad_difference_mean"]["locat, abrupt"] == pytest.approx(-0.045)
    assert found["knn_before_mean"].to_dict() == pytest.approx(dict.fromkeys(found.index, 0.35))
    assert found["alpha"].isna().all()


def test_what_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="nearsight finetune has left nothing"):
        read_finetuned(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "finetune.json").write_text(json.dumps({"before": 3}))
    with pytest.raises(InputError, match="is not what nearsight finetune writes"):
        read_finetuned(tmp_path / "one")
    assert main(["report", str(tmp_path)]) == 2
