"""Every table reads back with plain `pandas.read_csv` as it was written: no word becomes a missing value."""

import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import made_up
from pandas._libs.parsers import STR_NA_VALUES

from nearsight.augment import CutMix
from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.papers.protocol import mixing
from nearsight.report.probe_tables import write_probe_report
from nearsight.report.probes import ProbedModel, ProbeResults
from nearsight.report.simulations import write_simulation_report
from nearsight.report.writing import study_tables, study_verdicts
from nearsight.study import OFF, Simulation, SimulationResults, Study, StudyFolder, StudyResults, run_simulation
from nearsight.study.factors import Factor
from nearsight.study.results import read_description
from nearsight.study.run_tables import NO_WORD, READ_AS_MISSING, as_csv

RESULTS = Path(__file__).parents[2] / "results"
MIXING = RESULTS / "mixing-cifar100"


def lost_words(folder: Path) -> list[str]:
    """The columns of words that plain pandas does not read as they are, in all CSV files below a folder."""
    lost = []
    for path in sorted([*folder.rglob("*.csv"), *folder.rglob("*.csv.gz")]):
        plain, raw = pd.read_csv(path), pd.read_csv(path, dtype=str, keep_default_na=False)
        words = [name for name in raw if not all(map(is_number, raw[name].unique()))]
        different = [name for name in words if plain[name].tolist() != raw[name].tolist()]
        lost += [f"{path.relative_to(folder)}: {name}" for name in different]
    return lost


def is_number(cell: str) -> bool:
    """Or a truth; an empty cell is a number that is missing."""
    if cell in ("", "True", "False"):
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return cell.casefold().lstrip("+-") != "nan"


def test_every_committed_table_reads_back() -> None:
    assert lost_words(RESULTS) == []


def test_the_test_finds_words_that_are_lost(tmp_path: Path) -> None:
    tmp_path.joinpath("a.csv").write_text("condition,value\nNone,1\nCutMix,\n")
    tmp_path.joinpath("b.csv").write_text("blocks,value\n,1\nseed,nan\n")
    assert lost_words(tmp_path) == ["a.csv: condition", "b.csv: blocks", "b.csv: value"]


def test_the_words_that_are_missing_are_pandas_own() -> None:
    assert set(READ_AS_MISSING) == STR_NA_VALUES


def test_the_tables_of_a_study_read_back(tmp_path: Path) -> None:
    results = made_up(mixing.mixing_cifar100(), lambda cell: {"min_mad": 0.3 - 0.1 * (cell.condition == "CutMix")})
    results.write_tables(tmp_path)
    verdicts = study_verdicts(results)
    assert verdicts is not None
    for table in (*study_tables(results), verdicts.table()):
        table.write(tmp_path)
    assert {path.stem for path in tmp_path.rglob("*.csv")} >= {"runs", "conditions", "separation", "verdict"}
    assert lost_words(tmp_path) == []


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: int = 3
    pooling: str | None = None


def test_the_tables_of_a_simulation_read_back(tmp_path: Path) -> None:
    study = Simulation(
        name="sizes",
        conditions={"none": Settings(), "mean": Settings(pooling="mean")},
        simulate=lambda config, seeds, *_: {"runs": pd.DataFrame({"seed": seeds, "total": [config.size] * len(seeds)})},
        shrink=lambda config: config,
        responses={"total": "total"},
        seeds=2,
    )
    run_simulation(study, tmp_path)
    run_simulation(replace(study, seeds=3), tmp_path)  # what is there is read and written again
    write_simulation_report(SimulationResults.read(tmp_path), tmp_path)
    assert pd.read_csv(tmp_path / "runs.csv")["pooling"].tolist() == [NO_WORD] * 3 + ["mean"] * 3
    assert lost_words(tmp_path) == []


def test_the_tables_of_probes_read_back(tmp_path: Path) -> None:
    score = {"probe": "knn", "data": "shapes", "measure": "knn_20", "value": 0.5, "low": None, "high": None}
    score |= {"num_images": 40, "identity": "0123456789abcdef"}
    models = [
        ProbedModel(model="alone", num_parameters=10, image_size=32),
        ProbedModel(model="ViT, seed 0", condition="ViT", seed=0, num_parameters=9, image_size=32, trained_on="shapes"),
    ]
    results = ProbeResults.of([(model, [score]) for model in models], name="two")
    write_probe_report(results, tmp_path)
    assert lost_words(tmp_path) == []
    again = ProbeResults.read(tmp_path)
    assert again.models == models
    pd.testing.assert_frame_equal(again.rows, results.rows)
    # Tables of earlier versions have empty cells instead.
    old = tmp_path / "probes.csv"
    old.write_text(old.read_text().replace(f",{NO_WORD},", ",,"))
    assert ProbeResults.read(tmp_path).models == models


CELLS = st.one_of(st.none(), st.sampled_from(["", "a", "none", "é", "a, b"]), st.floats(allow_nan=True), st.booleans())


@given(column=st.lists(CELLS, min_size=1, max_size=6))
def test_a_column_of_words_has_no_missing_cell(column: list[object]) -> None:
    text = as_csv(pd.DataFrame({"word": column, "number": range(len(column))}))
    raw = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)["word"]
    if any(isinstance(cell, str) for cell in column):
        assert "" not in raw.tolist()
    else:
        assert NO_WORD not in raw.tolist()


@pytest.mark.parametrize("label", READ_AS_MISSING[1:])
def test_labels_that_would_be_lost_are_refused(label: str) -> None:
    with pytest.raises(InputError, match=f"{label}.*, which pandas reads as a missing value; give it another name"):
        Factor.of("mixing", {label: OFF, "CutMix": CutMix()})
    with pytest.raises(InputError, match="a condition of study 'two' is called"):
        Simulation(
            name="two",
            conditions={label: Settings()},
            simulate=lambda *_: {},
            shrink=lambda config: config,
            responses={},
        )


def test_names_of_ends_that_would_be_lost_are_refused() -> None:
    study = mixing.mixing_cifar100()
    factors = {"cutmix": (OFF, CutMix()), "smoothing": (0.0, 0.1)}
    with pytest.raises(InputError, match="a condition of study 'study' is called 'None'"):
        _ = Study(study.base, factors=factors, ends=("None", "All")).cells


def test_results_in_which_a_level_is_called_none_are_still_read(tmp_path: Path) -> None:
    """As earlier versions wrote them: they read as if they were of this one, and their study can go on."""
    old = tmp_path / "old"
    shutil.copytree(MIXING, old, ignore=shutil.ignore_patterns("figures", "tables"))
    for name in ("study.json", "runs.csv"):
        text = (old / name).read_text().replace("None of these", "None")
        (old / name).write_text(text)
    assert "None of these" not in (old / "runs.csv").read_text()
    before, now = StudyResults.read(old), StudyResults.read(MIXING)
    assert before.factors == now.factors
    assert before.planned == now.planned
    pd.testing.assert_frame_equal(before.runs, now.runs)
    assert read_description(old) == json.loads((MIXING / "study.json").read_text())
    (old / "runs.csv").unlink()
    StudyFolder(old).claim(mixing.mixing_cifar100())  # which refuses another study's folder


def test_a_damaged_label_is_still_damage(tmp_path: Path) -> None:
    described = json.loads((MIXING / "study.json").read_text())
    described["factors"]["mixing"][0] = ["None"]
    write_json(tmp_path / "study.json", described)
    assert read_description(tmp_path)["factors"]["mixing"][0] == ["None"]
