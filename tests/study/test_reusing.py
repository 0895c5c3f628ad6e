"""Runs of one study in another: taken whole, once, and only where their config is the same; out of tables to the last
digit, and never half of them."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_records import as_results, text_of
from tiny_study import tiny_study, unmeasured

from nearsight import files
from nearsight.augment import CutMix
from nearsight.commands.subjects import open_run
from nearsight.errors import InputError
from nearsight.papers import find_study
from nearsight.study import OFF, Study, StudyFolder, StudyResults, is_simulation, run_study
from nearsight.study.folder import elapsed_seconds
from nearsight.study.results import COURSE
from nearsight.study.reusing import reusable_runs, reuse_runs, tabled_runs
from nearsight.study.run_tables import read_run
from nearsight.study.worker import StudyListener
from nearsight.train import RunConfig, RunFolder, load_data
from nearsight.train.integrity import PROVENANCE, copy_complete
from nearsight.train.step import Teacher

WHOLE = unmeasured(seeds=1, epochs=1)
# Two of the other's conditions, and one that it does not have: another probability.
PART = dataclasses.replace(WHOLE, factors={"cutmix": (OFF, CutMix(p=0.5), CutMix(p=0.9))}, name="part", ends=("A", "B"))


class Trained(StudyListener):
    """Remembers what was trained."""

    def __init__(self) -> None:
        self.runs: set[str] = set()

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self.runs.add(config.identity)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return run_study(WHOLE, tmp_path_factory.mktemp("whole"))


def contents(folder: StudyFolder, run: str) -> dict[str, bytes]:
    files = folder.run_folder(run).path.iterdir()
    return {path.name: path.read_bytes() for path in files if path.name != "checkpoint.safetensors"}


def in_common(study: Study, other: Study) -> set[str]:
    return {cell.run for cell in study.cells} & {cell.run for cell in other.cells}


def test_what_is_there_is_taken_and_the_rest_is_trained(whole: StudyFolder, tmp_path: Path) -> None:
    shared, trained = in_common(PART, WHOLE), Trained()
    assert 0 < len(shared) < len(PART.cells)
    folder = run_study(PART, tmp_path, listener=trained, reuse=[whole.path])
    assert trained.runs == {cell.run for cell in PART.cells} - shared
    assert all(folder.is_done(cell.run) for cell in PART.cells)
    for run in shared:
        assert contents(folder, run) == contents(whole, run)
        assert not folder.run_folder(run).checkpoint.exists()
    assert not list((tmp_path / "locks").glob("*"))


def test_what_was_begun_gives_way(whole: StudyFolder, tmp_path: Path) -> None:
    """Another checkpoint than that of the copied run would look like damage."""
    folder = StudyFolder(tmp_path)
    run = sorted(in_common(PART, WHOLE))[0]
    begun = folder.run_folder(run)
    begun.path.mkdir(parents=True)
    begun.checkpoint.write_bytes(b"begun")
    reuse_runs(reusable_runs([run], [whole.path]), folder)
    assert folder.is_done(run)


def test_what_somebody_is_at_stays_theirs(whole: StudyFolder, tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    first, second = sorted(in_common(PART, WHOLE))[:2]
    locks = folder.locks()
    assert locks.take(first)
    reuse_runs(reusable_runs([first, second], [whole.path]), folder)
    assert not folder.is_done(first)
    assert folder.is_done(second)


def test_damaged_and_missing_runs_are_not_taken(whole: StudyFolder, tmp_path: Path) -> None:
    run = sorted(in_common(PART, WHOLE))[0]
    reuse_runs(reusable_runs([run], [whole.path]), StudyFolder(tmp_path))
    copied = StudyFolder(tmp_path).run_folder(run)
    (copied.path / "result.json").write_text("{}")
    assert reusable_runs([run, "0" * 16], [tmp_path]) == {}
    assert set(reusable_runs([run], [tmp_path, whole.path])) == {run}  # the next one has it
    with pytest.raises(InputError, match="no runs to reuse"):
        run_study(PART, tmp_path / "out", reuse=[tmp_path / "nowhere"])
    assert not (tmp_path / "out").exists()


def test_what_makes_a_folder_complete_is_copied_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the last file, a copy is not taken for a whole."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in (PROVENANCE, "a.csv", "z.csv", "left.safetensors"):
        (source / name).write_text(name)
    copied = []

    def cut_off(path: Path, to: Path) -> None:
        copied.append(path.name)
        if len(copied) == 3:
            raise KeyboardInterrupt
        to.write_bytes(path.read_bytes())

    monkeypatch.setattr("nearsight.train.integrity.shutil.copyfile", cut_off)
    with pytest.raises(KeyboardInterrupt):
        copy_complete(source, target, without=("left.safetensors",))
    assert {path.name for path in target.iterdir() if not path.name.startswith(".")} == {"a.csv", "z.csv"}
    assert copied[-1] == PROVENANCE


RESULTS = Path(__file__).parents[2] / "results"
ABLATION = RESULTS / "ablation-cifar100"
COMMITTED = [path.parent for path in sorted(RESULTS.rglob("study.json")) if not is_simulation(path.parent)]
TINY = [cell.run for cell in tiny_study().cells]
OF_THE_RUN_ALONE = {"checkpoint.safetensors", "model.safetensors", "events.jsonl", "heads.npz"}


@pytest.fixture(scope="module")
def of_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the study that shares runs with PART; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    run_study(WHOLE, folder / "study")
    return as_results(folder / "study", folder / "tables")


_QUICK = ("protocol-cifar10", "emergence-cifar100", "unreported-cifar100")
"""One with few runs, one measured while it trained, and a fraction of a design; all others together are slow."""


@pytest.mark.parametrize(
    ("committed", "source"),
    # The runs of the protocol study are among those of the ablation; its tables were made from their folders.
    [
        *(pytest.param(path, path, marks=() if path.name in _QUICK else pytest.mark.slow) for path in COMMITTED),
        (RESULTS / "protocol-cifar100", ABLATION),
    ],
    ids=lambda path: path.name,
)
def test_committed_runs_give_the_committed_tables_again(committed: Path, source: Path, tmp_path: Path) -> None:
    """Byte for byte, and so digit for digit."""
    shutil.copy(committed / "study.json", tmp_path)
    folder = StudyFolder(tmp_path)
    runs = list(pd.read_csv(committed / "runs.csv", dtype=str)["run"])
    reuse_runs(reusable_runs(runs, [source]), folder)
    assert all(folder.is_done(run) for run in runs)
    written = StudyResults.read(tmp_path).write_tables(tmp_path)
    names = {path.name for path in committed.iterdir() if path.name == COURSE or path.suffix == ".csv"}
    assert {path.name for path in written} == names
    for path in written:
        assert text_of(path) == text_of(committed / path.name), path.name


def test_half_of_the_fitted_ablation_is_in_the_results_of_the_ablation() -> None:
    cells = find_study("ablation-fitted-cifar100")().cells
    found = reusable_runs([cell.run for cell in cells], [ABLATION])
    assert set(found) == {cell.run for cell in cells if cell.levels["cutmix"] == "off"}
    assert len(found) == 12


def test_a_run_out_of_tables_is_the_run_without_its_weights(
    finished: Path, tables_of_tiny: Path, tmp_path: Path
) -> None:
    folder = StudyFolder(tmp_path)
    reuse_runs(reusable_runs(TINY, [tables_of_tiny]), folder)
    for run in TINY:
        own, taken = StudyFolder(finished).run_folder(run), folder.run_folder(run)
        assert {path.name for path in taken.path.iterdir()} == {
            path.name for path in own.path.iterdir()
        } - OF_THE_RUN_ALONE
        for name in ("config.json", "history.csv", "heads.csv", "layers.csv"):
            assert (taken.path / name).read_bytes() == (own.path / name).read_bytes(), name
        told, result = taken.read_provenance(), taken.read_result()
        assert told.pop("taken_from") == "tiny"
        assert told.items() <= own.read_provenance().items()
        assert result.items() <= own.read_result().items()
        assert set(own.read_result()) - set(result) == {"test_loss", "num_measured"}  # which no table has
    assert not list((tmp_path / "locks").glob("*"))


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_digit_is_lost(data: st.DataObject, of_whole: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("digits")
    results = StudyResults.read(of_whole)

    def drawn(column: pd.Series, values: st.SearchStrategy[float]) -> list[float]:
        return data.draw(st.lists(values, min_size=len(column), max_size=len(column)))

    heads = results.heads.assign(mad=lambda frame: drawn(frame["mad"], finite))
    heads["entropy_std"] = drawn(heads["entropy_std"], finite | st.just(np.nan))
    layers = results.layers.assign(locality_score=lambda frame: drawn(frame["locality_score"], finite))
    history = results.history.assign(train_loss=lambda frame: drawn(frame["train_loss"], st.floats()))
    runs = results.runs.assign(test_acc=lambda frame: drawn(frame["test_acc"], finite))
    runs["position_association"] = drawn(runs["position_association"], finite | st.just(np.nan))
    changed = dataclasses.replace(results, heads=heads, layers=layers, history=history, runs=runs)
    for name in ("study.json", PROVENANCE):
        shutil.copy(of_whole / name, place)
    changed.write_tables(place)
    for run, tabled in tabled_runs(place, list(runs["run"])).items():
        folder = RunFolder(place / "again" / run)
        tabled.put(folder)
        again = read_run(folder)
        for name in ("heads", "layers", "history"):
            asked, found = getattr(changed, name), getattr(again, name)
            asked = asked[asked["run"] == run].drop(columns="run").reset_index(drop=True)
            pd.testing.assert_frame_equal(found, asked, check_exact=True, check_dtype=False)
        row = runs[runs["run"] == run].iloc[0][list(again.row)]
        np.testing.assert_array_equal([again.row[name] for name in row.index], row.to_numpy(dtype=float))


def test_only_what_tables_do_not_have_is_trained(of_whole: Path, tmp_path: Path) -> None:
    told = json.loads((of_whole / PROVENANCE).read_text())
    source = Path(shutil.copytree(of_whole, tmp_path / "source"))
    (source / PROVENANCE).write_text(json.dumps({**told, "commit": ["first", "second"]}))
    shared, trained = in_common(PART, WHOLE), Trained()
    folder = run_study(PART, tmp_path / "part", listener=trained, reuse=[source])
    assert trained.runs == {cell.run for cell in PART.cells} - shared
    for cell in PART.cells:
        assert folder.is_done(cell.run)
        assert folder.run_folder(cell.run).model.exists() == (cell.run not in shared)
    results = folder.write_tables()
    theirs = StudyResults.read(source).runs.set_index("run")
    for row in results.runs[results.runs["run"].isin(shared)].to_dict("records"):
        assert row["test_acc"] == theirs.loc[row["run"], "test_acc"]
    made = json.loads((folder.path / PROVENANCE).read_text())
    assert made["taken_from"] == {"unmeasured": len(shared)}
    assert made["runs"] == len(PART.cells)
    assert {"first", "second"} < set(made["commit"])
    assert all(isinstance(machine, dict) for machine in made["hardware"])
    # Nobody knows when the others trained, so time and speed are of what was trained here: 96 images, of 120 an epoch.
    assert made["images"] == 96 * len(trained.runs)
    seconds = elapsed_seconds([folder.run_folder(run) for run in trained.runs])
    assert made["elapsed_seconds"] == seconds > 0
    assert made["images_per_second"] == pytest.approx(made["images"] / seconds)


def test_where_the_runs_are_named_too_they_come_with_their_weights(
    finished: Path, tables_of_tiny: Path, tmp_path: Path
) -> None:
    reuse_runs(reusable_runs(TINY, [tables_of_tiny, finished]), StudyFolder(tmp_path))
    assert all(StudyFolder(tmp_path).run_folder(run).model.exists() for run in TINY)


def test_runs_that_are_not_in_the_tables_are_not_there(tables: Path) -> None:
    rows = (tables / "runs.csv").read_text().splitlines(keepends=True)
    (tables / "runs.csv").write_text("".join(rows[:3]))
    assert len(reusable_runs(TINY, [tables])) == 2
    assert reusable_runs(["0" * 16], [tables]) == {}


def test_columns_that_tables_do_not_have_stay_absent(tables: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(tables / "runs.csv", dtype=str).drop(columns=["max_share_self", "max_share_near"])
    frame.to_csv(tables / "runs.csv", index=False)
    reuse_runs(reusable_runs(TINY[:1], [tables]), StudyFolder(tmp_path / "study"))
    result = StudyFolder(tmp_path / "study").run_folder(TINY[0]).read_result()
    assert not {"max_share_self", "max_share_near"} & set(result)
    assert "min_mad" in result


class CutOffError(Exception):
    """A kill, as far as a test in one process goes."""


def test_killed_at_any_moment_it_is_not_done_until_it_is_whole(
    tables_of_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moments = TINY[0], 0
    found = reusable_runs([run], [tables_of_tiny])
    whole = False
    while not whole:
        folder, left = StudyFolder(tmp_path / str(moments)), moments

        def cut_off(_moment: str, path: Path, folder: StudyFolder = folder) -> None:
            nonlocal left
            if folder.path / "runs" not in path.parents:  # the locks' own files
                return
            left -= 1
            if left < 0:
                raise CutOffError

        with monkeypatch.context() as patched:
            patched.setattr(files, "disturb", cut_off)
            try:
                reuse_runs(found, folder)
                whole = True
            except CutOffError:
                written = (folder.run_folder(run).path / PROVENANCE).exists()
                assert folder.is_done(run) == written
        reuse_runs(found, folder)
        assert folder.is_done(run)
        moments += 1
    assert moments > 3 * 7  # of every file


def test_what_another_training_left_goes_first(tables_of_tiny: Path, tmp_path: Path) -> None:
    """Its weights, log and certificate would pass for those of this run."""
    folder, run = StudyFolder(tmp_path), TINY[0]
    begun = folder.run_folder(run)
    begun.path.mkdir(parents=True)
    for name in (*OF_THE_RUN_ALONE, PROVENANCE, "checksums.json", "config.json"):
        (begun.path / name).write_text("begun")
    reuse_runs(reusable_runs([run], [tables_of_tiny]), folder)
    assert folder.is_done(run)
    assert not OF_THE_RUN_ALONE & {path.name for path in begun.path.iterdir()}


def test_what_somebody_is_at_or_has_done_meanwhile_stays(
    finished: Path, tables_of_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (held, done) = StudyFolder(tmp_path), TINY[:2]
    assert folder.locks().take(held)
    found = reusable_runs([held, done], [tables_of_tiny])
    shutil.copytree(finished / "runs" / done, tmp_path / "runs" / done)
    looks = iter([False, False, True])  # of the held one; of the other, before and after its lock is taken
    monkeypatch.setattr(folder, "is_done", lambda _run: next(looks))
    reuse_runs(found, folder)
    assert not folder.run_folder(held).path.exists()
    assert folder.run_folder(done).model.exists()


def test_whoever_needs_weights_is_told_why_there_are_none(tables_of_tiny: Path, tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    reuse_runs(reusable_runs(TINY[:1], [tables_of_tiny]), folder)
    run = folder.run_folder(TINY[0])
    with pytest.raises(InputError, match="no weights: the run was taken from the tables of study 'tiny'"):
        open_run(str(run.path), checkpoint=None)
    with pytest.raises(InputError, match="no weights: the run was taken from the tables of study 'tiny'"):
        Teacher.load(str(run.path), load_data(run.read_config().data, None), "cpu")
