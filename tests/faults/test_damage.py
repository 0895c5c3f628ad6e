"""Damage on disk: a flipped bit or a lost end of any file of a run is harmless, or detected by an error that names the
place; a study does the cell again and says so."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_study import tiny_base, tiny_study

from nearsight.data import cache
from nearsight.errors import InputError
from nearsight.files import LostError, write_json
from nearsight.lens import HeadTable
from nearsight.models import load_model
from nearsight.probe.segmentation.result import SegmentFolder
from nearsight.study import StudyFolder, StudyListener, run_study
from nearsight.study.results import read_run
from nearsight.tensorfile import load_tensors
from nearsight.train import RunFolder, train_run
from nearsight.train.integrity import CHECKSUMS, changing, check_sums

FILES = (
    *("config.json", "history.csv", "heads.csv", "layers.csv", "result.json", "provenance.json", CHECKSUMS),
    *("model.safetensors", "checkpoint.safetensors", "events.jsonl"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that is as it was written; not to be changed."""
    return train_run(tiny_base(), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def copy(whole: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))


def everything(folder: RunFolder) -> dict[str, Any]:
    """All that anybody takes from a run."""
    tables, checkpoint = read_run(folder), folder.read_checkpoint(tiny_base())
    assert checkpoint is not None
    frames = {name: getattr(tables, name).to_csv() for name in ("heads", "layers", "history", "course")}
    return {
        "config": folder.read_config(),
        "row": tables.row,
        "result": folder.read_result(),
        "provenance": folder.read_provenance(),
        "history so far": checkpoint[0],
        "state": {name: tensor.tolist() for name, tensor in checkpoint[1].items()},
        "model": {name: tensor.tolist() for name, tensor in load_model(folder.model).state_dict().items()},
        **frames,
    }


def damage(content: bytes, draw: random.Random) -> bytes:
    position = draw.randrange(len(content))
    if draw.random() < 0.25:
        return content[:position]
    flipped = content[position] ^ (1 << draw.randrange(8))
    return content[:position] + bytes([flipped]) + content[position + 1 :]


def look_for_lies(folder: RunFolder, name: str, num_damages: int) -> dict[str, int]:
    """What damages to a file come to. One that changes a number without a word fails."""
    path, draw, found = folder.path / name, random.Random(name), {"harmless": 0, "detected": 0}
    content, told = path.read_bytes(), everything(folder)
    for _ in range(num_damages):
        path.write_bytes(damaged := damage(content, draw))
        error = ""
        try:
            assert everything(folder) == told, f"{name} as {damaged!r}"
        except InputError as detected:
            error = str(detected)
        assert not error or str(folder.path) in error
        found["detected" if error else "harmless"] += 1
    path.write_bytes(content)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_few_damages_to_every_file(copy: RunFolder, name: str) -> None:
    found = look_for_lies(copy, name, 2)
    assert found["harmless" if name == "events.jsonl" else "detected"] > 0


@pytest.mark.faults
@pytest.mark.parametrize("name", FILES)
def test_many_damages_to_every_file(copy: RunFolder, name: str) -> None:
    found = look_for_lies(copy, name, 150)
    # Blanks between fields, or the end of a file's last line, may differ in files that have no sum.
    assert name in (CHECKSUMS, "events.jsonl", "model.safetensors", "checkpoint.safetensors") or not found["harmless"]


@pytest.mark.parametrize("value", ["[]", "true", '"x"', "1e999", "1" * 30, "1" * 400])
@pytest.mark.parametrize("name", ["min_mad", "best_epoch"])
def test_a_result_that_is_no_number(copy: RunFolder, name: str, value: str) -> None:
    """Of an earlier version, which has no sums."""
    (copy.path / CHECKSUMS).unlink()
    result = copy.path / "result.json"
    result.write_text(re.sub(rf'"{name}": [^,]*', f'"{name}": {value}', result.read_text()))
    with pytest.raises(InputError, match=f"is damaged: its result says .* for {name}, not a valid number"):
        read_run(copy)


def test_a_folder_of_an_earlier_version_has_no_sums_and_is_read(copy: RunFolder) -> None:
    told = everything(copy)
    (copy.path / CHECKSUMS).unlink()
    assert everything(copy) == told


def test_weights_that_were_removed_to_save_space_are_no_damage(copy: RunFolder) -> None:
    copy.model.unlink()
    check_sums(copy.path)
    assert len(read_run(copy).heads) == 2


def test_what_is_not_there_has_no_sums(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=r"is not a complete run folder: result\.json is missing"):
            RunFolder(folder).read_result()


def test_a_probe_has_sums_too(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    folder.claim({"identity": "0123"})
    write_json(tmp_path / "result.json", {"miou": 0.25})
    assert not folder.is_complete
    folder.finish({"seed": 0})
    assert folder.is_complete
    assert folder.read_result() == {"miou": 0.25}
    (tmp_path / "result.json").write_text((tmp_path / "result.json").read_text().replace("5", "6"))
    with pytest.raises(InputError, match=r"result\.json is damaged, or was changed"):
        folder.read_result()


def test_every_byte_of_the_sums_is_protected(copy: RunFolder) -> None:
    """Also the names of files, which would otherwise be taken for files that are not there."""
    path, draw = copy.path / CHECKSUMS, random.Random(0)
    content = path.read_bytes()
    for position, byte in enumerate(content[:-1]):  # the last one ends the line
        path.write_bytes(content[:position] + bytes([byte ^ (1 << draw.randrange(8))]) + content[position + 1 :])
        with pytest.raises(InputError, match=str(copy.path)):
            check_sums(copy.path)
    for name in ("digest", "files", "schema"):
        told = json.loads(content)
        told[f"{name}_"] = told.pop(name)
        path.write_text(json.dumps(told))
        with pytest.raises(InputError, match=r"checksums\.json is damaged"):
            check_sums(copy.path)


def test_sums_of_an_earlier_version_have_no_digest(copy: RunFolder) -> None:
    told = everything(copy)
    sums = json.loads((copy.path / CHECKSUMS).read_text())
    del sums["digest"]
    (copy.path / CHECKSUMS).write_text(json.dumps(sums))
    assert everything(copy) == told


def test_a_run_is_completed_by_one(copy: RunFolder) -> None:
    """Whoever comes second replaces nothing, not even the sums."""
    told = {path.name: path.read_bytes() for path in copy.path.iterdir()}
    with pytest.raises(LostError, match="was completed by another process in the meantime"):
        copy.finish({"seed": 7})
    assert {path.name: path.read_bytes() for path in copy.path.iterdir()} == told


def test_sums_of_a_later_version(copy: RunFolder) -> None:
    (copy.path / CHECKSUMS).write_text('{"schema": 2, "files": {}}')
    with pytest.raises(InputError, match=r"checksums\.json has schema 2, but this nearsight reads up to 1; update"):
        copy.read_result()


def test_a_file_that_is_changed_on_purpose_gets_a_new_sum(copy: RunFolder) -> None:
    sums = json.loads((copy.path / CHECKSUMS).read_text())
    with changing(copy.heads):
        copy.heads.write_text(copy.heads.read_text().replace("blocks", "layers"))
        check_sums(copy.path)  # killed here, there is no sum
    check_sums(copy.path)
    after = json.loads((copy.path / CHECKSUMS).read_text())
    assert {name for name in FILES if sums["files"].get(name) != after["files"].get(name)} == {"heads.csv"}
    copy.heads.write_text("something else")
    with pytest.raises(InputError, match=r"heads\.csv is damaged, or was changed: .* remove .*provenance\.json"):
        copy.read_result()


def test_the_description_of_tensors_is_protected_too(copy: RunFolder) -> None:
    content = copy.model.read_bytes()
    assert content.count(b'\\"depth\\": 1') == 1
    copy.model.write_bytes(content.replace(b'\\"depth\\": 1', b'\\"depth\\": 2'))
    with pytest.raises(InputError, match="is damaged: its contents have digest"):
        load_tensors(copy.model)


def test_tensors_of_an_earlier_version_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose digest is not of the description."""
    from nearsight import tensorfile

    digest = tensorfile._digest
    monkeypatch.setattr(tensorfile, "_digest", lambda tensors, metadata=None: digest(tensors))
    tensorfile.save_tensors(tmp_path / "old.safetensors", {"w": torch.arange(3)}, {"note": 1})
    monkeypatch.undo()
    tensors, described = load_tensors(tmp_path / "old.safetensors")
    assert (tensors["w"].tolist(), described) == ([0, 1, 2], {"note": 1})


class Aside(StudyListener):
    def __init__(self) -> None:
        self.told: list[str] = []

    def set_aside(self, path: Path, problem: str) -> None:
        self.told.append(f"{path.name}: {problem}")


def other_digit(text: str) -> str:
    """The last digit of a table is another one: still a table, and a lie."""
    position = max(text.rfind(digit) for digit in "0123456789")
    return f"{text[:position]}{(int(text[position]) + 1) % 10}{text[position + 1 :]}"


STUDY = tiny_study(seeds=1).only([{}])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of one cell; not to be changed."""
    return run_study(STUDY, tmp_path_factory.mktemp("finished") / "study").path


@pytest.mark.parametrize(
    "name",
    [
        *("heads.csv", "provenance.json"),
        *(pytest.param(name, marks=pytest.mark.faults) for name in ("layers.csv", "history.csv", "result.json")),
    ],
)
def test_a_study_does_a_cell_again_whose_numbers_were_changed(finished: Path, tmp_path: Path, name: str) -> None:
    path, listener = Path(shutil.copytree(finished, tmp_path / "study")), Aside()
    run = path / "runs" / STUDY.cells[0].run
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    (run / name).write_text(other_digit((run / name).read_text()))
    run_study(STUDY, path, listener=listener)
    (told,) = listener.told
    assert told.startswith("provenance.json: ")
    assert f"{name} is damaged, or was changed" in told
    for each in ("heads.csv", "layers.csv", "history.csv", "result.json", "model.safetensors"):
        assert (run / each).read_bytes() == before[each]
    assert [state.state for state in StudyFolder(path).states()] == ["done"]


def test_class_names_in_the_image_cache_are_protected() -> None:
    """Which the sum of the pixels does not see."""
    record = {"classes": ["cat", "dog"], "version": cache.VERSION}
    assert cache._seal_of(record) != cache._seal_of({**record, "classes": ["cat", "cow"]})
    assert cache._seal_of(record) == cache._seal_of(dict(reversed(record.items())))


def test_a_table_of_heads_whose_arrays_do_not_fit(tmp_path: Path) -> None:
    arrays = {name: np.zeros((2, 3)) for name in ("mad", "mad_squared_deviations", "entropy")}
    more = {"format": np.array(1), "num_images": np.array(3), "layer_names": np.array(["a", "b"])}
    np.savez(tmp_path / "heads.npz", **arrays, **more, entropy_squared_deviations=np.zeros((2, 4)))
    with pytest.raises(InputError, match="entropy_squared_deviations is not an array of float64"):
        HeadTable.load(tmp_path / "heads.npz")
