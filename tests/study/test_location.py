"""Results elsewhere than in a folder: published as a whole, fetched as they were, never half trusted."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from study_records import Recorder, table
from tiny_study import tiny_study

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.study import StudyFolder, StudyResults, run_study
from nearsight.study.location import DamagedError, PublishedStudy, StudyPublisher, scratch_folder
from nearsight.study.running import fetch_study

RUNS = [cell.run for cell in tiny_study().cells]
STAY_HERE = {"checkpoint.safetensors", "heads.npz"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["memory", "file"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StudyPublisher]:
    if request.param == "file":
        yield StudyPublisher(f"file://{tmp_path}/there", first_wait=0.0)
        return
    yield StudyPublisher("memory://there/study", first_wait=0.0)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def files_of(location: StudyPublisher) -> tuple[Any, str]:
    files, root = fsspec.core.url_to_fs(location.url)
    return files, str(root)


def publish_all(finished: Path, location: StudyPublisher) -> None:
    for run in RUNS:
        location.publish(StudyFolder(finished).run_folder(run))
    location.publish_tables(finished)


def test_a_published_study_is_the_study(finished: Path, location: StudyPublisher) -> None:
    publish_all(finished, location)
    assert location.published() == set(RUNS)
    fetched = fetch_study(location)
    assert fetched == scratch_folder(location.url)
    StudyFolder(fetched).write_runs()
    pd.testing.assert_frame_equal(table(fetched), table(finished), check_exact=True)
    files, root = files_of(location)
    for run in RUNS:
        there = {path.rsplit("/")[-1] for path in files.find(f"{root}/runs/{run}")}
        here = {path.name for path in (finished / "runs" / run).iterdir()}
        assert there == here - STAY_HERE | {"manifest.json"}
        assert {path.name for path in (fetched / "runs" / run).iterdir()} == there - {
            "manifest.json",
            "model.safetensors",
        }


@pytest.mark.parametrize("location", ["memory"], indirect=True)
def test_only_what_is_not_published_is_done(finished: Path, location: StudyPublisher) -> None:
    """Neither a half upload nor a damaged file is trusted; what is done again is published again."""
    publish_all(finished, location)
    files, root = files_of(location)
    half, damaged, torn = RUNS[1], RUNS[4], RUNS[6]
    files.rm_file(f"{root}/runs/{half}/manifest.json")
    content = bytearray(files.cat_file(f"{root}/runs/{damaged}/heads.csv"))
    content[len(content) // 2] ^= 1
    files.pipe_file(f"{root}/runs/{damaged}/heads.csv", bytes(content))
    files.pipe_file(f"{root}/runs/{torn}/manifest.json", files.cat_file(f"{root}/runs/{torn}/manifest.json")[:100])
    listener, path = Recorder(), scratch_folder(location.url)
    run_study(tiny_study(), path, listener=listener, location=location)
    assert sorted(listener.done) == sorted((half, damaged, torn))
    shutil.rmtree(path)
    StudyFolder(fetch_study(location)).write_runs()
    pd.testing.assert_frame_equal(table(path), table(finished), check_exact=True)


class Failing(MemoryFileSystem):
    """Loses its connection at the transfers with these numbers."""

    protocol = "failing"
    cachable = False
    failing_at: frozenset[int] = frozenset()
    num_transfers = 0

    def _count(self) -> None:
        Failing.num_transfers += 1
        if Failing.num_transfers in Failing.failing_at:
            raise ConnectionResetError("the network went away")

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        self._count()
        super().put_file(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        self._count()
        super().pipe_file(*args, **kwargs)


@pytest.fixture
def failing() -> Iterator[StudyPublisher]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.num_transfers, Failing.failing_at = 0, frozenset()
    yield StudyPublisher("failing://there", first_wait=0.0)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_network_that_comes_back_is_waited_for(finished: Path, failing: StudyPublisher) -> None:
    Failing.failing_at = frozenset((1, 2, 3, 6, 9))
    folder = StudyFolder(finished).run_folder(RUNS[0])
    failing.publish(folder)
    assert failing.published() == {RUNS[0]}


def test_one_that_stays_away_leaves_nothing_that_is_trusted(finished: Path, failing: StudyPublisher) -> None:
    folder = StudyFolder(finished).run_folder(RUNS[0])
    num_files = sum(path.name not in STAY_HERE for path in folder.path.iterdir()) + 1
    for number in range(1, num_files + 1):
        Failing.num_transfers, Failing.failing_at = 0, frozenset(range(number, number + 100))
        with pytest.raises(InputError, match=r"failing://there cannot be used: .*the same command goes on"):
            failing.publish(folder)
        assert failing.published() == set()
    Failing.failing_at = frozenset()
    failing.publish(folder)
    assert failing.published() == {RUNS[0]}


def test_a_run_that_cannot_be_published_is_named_and_stays_here(finished: Path, failing: StudyPublisher) -> None:
    path = scratch_folder(failing.url)
    shutil.copytree(finished, path)
    shutil.rmtree(path / "runs" / RUNS[5])
    for run in RUNS[:5] + RUNS[6:]:
        failing.publish(StudyFolder(path).run_folder(run))
    Failing.failing_at = frozenset(range(Failing.num_transfers + 1, Failing.num_transfers + 9))
    listener = Recorder()
    with pytest.raises(InputError, match="the network went away"):
        run_study(tiny_study(), path, listener=listener, location=failing)
    assert listener.done == [RUNS[5]]
    assert failing.published() == set(RUNS) - {RUNS[5]}
    again = Recorder()
    run_study(tiny_study(), path, listener=again, location=failing)
    assert again.done == []
    assert failing.published() == set(RUNS)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/b"])
def test_a_manifest_cannot_name_a_file_elsewhere(
    finished: Path, location: StudyPublisher, tmp_path: Path, name: str
) -> None:
    publish_all(finished, location)
    files, root = files_of(location)
    place = f"{root}/runs/{RUNS[0]}/manifest.json"
    manifest = json.loads(files.cat_file(place))
    manifest["files"][name] = manifest["files"]["result.json"]
    files.pipe_file(place, json.dumps(manifest).encode())
    folder = StudyFolder(tmp_path / "here").run_folder(RUNS[0])
    with pytest.raises(DamagedError, match="does not name the files of a run"):
        location.fetch(folder)
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("url", "words"), [("nowhere://x", "cannot be opened: Protocol not known"), ("memory://nothing", "no study.json")]
)
def test_places_that_are_none(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fetch_study(PublishedStudy(url))


def test_runs_out_of_tables_are_published_at_once_and_fetched_as_any(
    tables_of_tiny: Path, location: StudyPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no weights, and none are missed."""
    here, elsewhere = Recorder(), Recorder()
    run_study(tiny_study(), scratch_folder(location.url), location=location, reuse=[tables_of_tiny], listener=here)
    assert location.published() == set(RUNS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    folder = run_study(tiny_study(), scratch_folder(location.url), location=location, listener=elsewhere)
    assert all(folder.is_done(run) for run in RUNS)
    assert here.epochs == elsewhere.epochs == []


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["../../../private/secret", "/{private}/secret", "..", "", "0123456789ABCDEF", "x" * 16]
)
def test_a_foreign_study_cannot_name_a_run_elsewhere(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A study at a URL whose second cell is a path to a private run: `study show` would publish that run there."""
    private, there = tmp_path / "private", tmp_path / "there"
    shutil.copytree(finished / "runs" / RUNS[0], private / "secret")
    StudyPublisher(f"file://{there}").publish_tables(finished)
    described = json.loads((there / "study.json").read_text())
    described["cells"][1]["run"] = name.format(private=private)
    (there / "study.json").write_text(json.dumps(described))
    before = everything_in(there), everything_in(private)
    assert main(["study", "show", f"file://{there}"]) == 2
    assert "study.json is damaged: cell 1: " in capsys.readouterr().err
    assert (everything_in(there), everything_in(private)) == before


def test_whoever_shows_a_study_writes_nothing_there(finished: Path, tmp_path: Path) -> None:
    """Not even runs that are done here and are missing there: only `study run` publishes."""
    there = tmp_path / "there"
    publisher = StudyPublisher(f"file://{there}")
    publish_all(finished, publisher)
    fetch_study(PublishedStudy(publisher.url))
    shutil.rmtree(there / "runs" / RUNS[3])
    before = everything_in(there)
    shown = fetch_study(PublishedStudy(publisher.url))
    assert StudyFolder(shown).is_done(RUNS[3])
    assert everything_in(there) == before
    assert not any(hasattr(PublishedStudy, name) for name in ("publish", "publish_tables", "_put"))


def test_the_tables_of_a_foreign_study_cannot_name_a_run_elsewhere(tables_of_tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(tables_of_tiny, folder)
    text = (folder / "runs.csv").read_text()
    (folder / "runs.csv").write_text(text.replace(RUNS[2], "../../private/secret"))
    with pytest.raises(InputError, match=r"runs\.csv is damaged: '\.\./\.\./private/secret' is not the name of a run"):
        StudyResults.read(folder)


@pytest.mark.parametrize(
    "sums",
    [
        {"bytes": -1, "sha256": "0" * 64},
        {"bytes": True, "sha256": "0" * 64},
        {"bytes": 10, "sha256": "0" * 63},
        {"bytes": 10, "sha256": 7},
        {"bytes": 10},
        [],
    ],
    ids=str,
)
def test_a_manifest_with_sums_that_are_none(
    finished: Path, location: StudyPublisher, tmp_path: Path, sums: Any
) -> None:
    location.publish(StudyFolder(finished).run_folder(RUNS[0]))
    files, root = files_of(location)
    place = f"{root}/runs/{RUNS[0]}/manifest.json"
    manifest = json.loads(files.cat_file(place))
    manifest["files"]["result.json"] = sums
    files.pipe_file(place, json.dumps(manifest).encode())
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        location.fetch(StudyFolder(tmp_path / "here").run_folder(RUNS[0]))


def test_no_more_is_fetched_than_there_may_be(
    finished: Path, location: StudyPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be larger than its manifest says, or have no end."""
    location.publish(StudyFolder(finished).run_folder(RUNS[0]))
    files, root = files_of(location)
    files.pipe_file(f"{root}/runs/{RUNS[0]}/heads.csv", b"0" * 2**22)
    folder = StudyFolder(tmp_path / "here").run_folder(RUNS[0])
    with pytest.raises(DamagedError, match=r"heads\.csv is damaged: it has more than the \d+ bytes"):
        location.fetch(folder)
    assert not folder.heads.exists()
    monkeypatch.setattr("nearsight.study.location.MOST_BYTES", 100)
    location.publish_tables(finished)
    with pytest.raises(DamagedError, match=r"study\.json is damaged: it has more than the 100 bytes"):
        fetch_study(location)


@pytest.mark.parametrize("protocol", sorted(fsspec.available_protocols()))
def test_every_kind_of_address_is_shown_or_refused_in_a_line(
    protocol: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", "show", f"{protocol}://127.0.0.1/nothing/here"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nearsight: ")
    assert said.count("\n") == 1
