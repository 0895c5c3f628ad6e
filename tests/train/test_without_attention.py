"""Runs of models that have no heads to measure end like others, and say so."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from nearsight.models import ModelConfig
from nearsight.study import Study, StudyResults, run_study
from nearsight.train import HEADS_COLUMNS, LAYERS_COLUMNS, DataConfig, RunConfig, baseline

MODELS = {
    "ResNet": {"name": "compact_resnet18", "channels": 4},
    "pixels": {"name": "compact_vit", "shuffled_tiles": 32, "patch_size": 8, "width": 8, "num_heads": 1, "depth": 1},
}


@pytest.mark.parametrize("measure_every", [0, 1])
def test_a_study_of_such_models(tmp_path: Path, measure_every: int) -> None:
    """One without attention, one whose tokens have no place: pixels from everywhere."""
    protocol = dataclasses.replace(baseline(), max_epochs=1, warmup_epochs=1, batch_size=32, augment=())
    base = RunConfig(
        model=ModelConfig(**MODELS["pixels"]),
        data=DataConfig(name="shapes", num_train=120, num_test=20),
        protocol=protocol,
        measure_every=measure_every,
    )
    levels = {name: {"model": ModelConfig(**fields)} for name, fields in MODELS.items()}
    folder = run_study(Study(base, factors={"network": levels}), tmp_path)
    results = folder.write_tables()
    assert list(results.runs["network"]) == list(MODELS)
    assert results.runs["min_mad"].isna().all()
    assert results.runs["test_acc"].between(0, 1).all()
    assert results.heads.empty
    assert results.layers.empty
    assert results.course.empty
    for run in results.runs["run"]:
        ended = folder.run_folder(run)
        assert tuple(pd.read_csv(ended.heads).columns) == HEADS_COLUMNS
        assert tuple(pd.read_csv(ended.layers).columns) == LAYERS_COLUMNS
        assert ended.read_result()["min_mad"] is None
        told = [json.loads(line) for line in (ended.path / "events.jsonl").read_text().splitlines()]
        (why,) = [line["reason"] for line in told if line["event"] == "heads not measured"]
        assert "attention" in why
    again = StudyResults.read(tmp_path)
    pd.testing.assert_frame_equal(again.runs, results.runs)
