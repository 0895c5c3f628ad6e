"""Runs of one study in another: taken whole, once, and only where their config is the same."""

import dataclasses
from pathlib import Path

import pytest
from tiny_study import unmeasured

from nearsight.augment import CutMix
from nearsight.errors import InputError
from nearsight.study import OFF, Study, StudyFolder, run_study
from nearsight.study.reusing import reusable_runs, reuse_runs
from nearsight.study.worker import StudyListener
from nearsight.train import RunConfig
from nearsight.train.integrity import PROVENANCE, copy_complete

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
