"""Studies of augmentations that a stack cannot share, or whose draws differ in number: a cell's numbers are its own."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_study import tiny_base

from nearsight.augment import AutoAugment, CutMix, HorizontalFlip, RandAugment, RandomCrop, TimmRandAugment
from nearsight.errors import InputError
from nearsight.study import OFF, Study, run_study
from nearsight.train import train_run


def study_of(factors: dict[str, Any]) -> Study:
    return Study(tiny_base(), factors=factors, seeds=1, name="augmentations")


def weights(folder: Path, study: Study) -> list[bytes]:
    return [(folder / "runs" / cell.run / "model.safetensors").read_bytes() for cell in study.cells]


@pytest.mark.parametrize(
    "factors",
    [
        {"autoaugment": (OFF, AutoAugment(), AutoAugment(policy="imagenet"))},
        {
            "protocol.augment": {
                "crop first": (RandomCrop(), HorizontalFlip()),
                "flip first": (HorizontalFlip(), RandomCrop()),
            }
        },
    ],
)
def test_what_cannot_be_stacked_is_trained_apart(tmp_path: Path, factors: dict[str, Any]) -> None:
    study = study_of(factors)
    run_study(study, tmp_path / "study")
    assert len(pd.read_csv(tmp_path / "study" / "runs.csv")) == len(study.cells)
    found = weights(tmp_path / "study", study)
    assert len(set(found)) == len(found)
    alone = train_run(study.cells[-1].config, tmp_path / "alone")
    assert (alone.path / "model.safetensors").read_bytes() == found[-1]


@pytest.mark.parametrize("kind", [RandAugment, TimmRandAugment])
def test_a_cell_does_not_depend_on_how_many_operations_others_draw(
    tmp_path: Path, kind: type[RandAugment | TimmRandAugment]
) -> None:
    found = []
    for number, other in enumerate((kind(num_ops=3), kind(num_ops=2, magnitude=5))):
        study = study_of({kind.name: (kind(num_ops=2), other)})
        assert len({cell.config.stack_key for cell in study.cells}) == 1
        run_study(study, tmp_path / str(number))
        found.append(weights(tmp_path / str(number), study))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_whole_numbers_for_floats_are_the_same_run_again(tmp_path: Path) -> None:
    study, exact = study_of({"cutmix": (OFF, CutMix(p=1, alpha=1))}), study_of({"cutmix": (OFF, CutMix(p=1.0))})
    assert [cell.run for cell in study.cells] == [cell.run for cell in exact.cells]
    run_study(study, tmp_path / "study")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").glob("runs/*/*")}
    run_study(study, tmp_path / "study")
    run_study(exact, tmp_path / "study")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "study").glob("runs/*/*")} == before
    folder = tmp_path / "study" / "runs" / study.cells[1].run
    assert train_run(study.cells[1].config, folder).path == folder
    with pytest.raises(InputError, match=r"cutmix\.patch is 4\.0, but must be of type int"):
        CutMix(patch=4.0)  # type: ignore[arg-type]
