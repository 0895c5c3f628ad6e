"""No code from checkpoints, configs, data sets or archives is ever run; `package.module:function`, which users write
themselves, is the one way to theirs."""

import ast
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import nearsight
from nearsight.data.pickled import read_pickled_arrays
from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.models import create_model
from nearsight.models.checkpoints import load_checkpoint
from nearsight.models.factory import ModelConfig
from nearsight.tensorfile import load_tensors
from nearsight.train import RunFolder

ROOT = Path(nearsight.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}

RUNS_CODE = {
    *("eval", "exec", "compile", "__import__", "input", "breakpoint"),
    *("os.system", "os.popen", "os.execv", "os.spawnv", "runpy.run_path", "runpy.run_module"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("cloudpickle.load", "cloudpickle.loads", "joblib.load", "pandas.read_pickle", "pd.read_pickle"),
    *(
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "torch.jit.load",
        "torch.hub.load",
        "torch.package.PackageImporter",
    ),
}
ALLOWED = {
    ("data/pickled.py", "pickle.Unpickler"),  # which finds five names and no others
}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, dotted name, call) of every call in the package."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> object:
    """The constant that is passed by this name; None where there is none."""
    values = [each.value for each in call.keywords if each.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


CALLS = list(calls())


def test_nothing_that_runs_what_it_reads() -> None:
    bases = [
        (file, ast.unparse(base))
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    ]
    found = {(file, name) for file, name, _ in CALLS if name in RUNS_CODE} | {
        each for each in bases if each[1] in RUNS_CODE
    }
    assert found == ALLOWED


def test_weights_are_loaded_as_weights_alone() -> None:
    loads = [(file, call) for file, name, call in CALLS if name == "torch.load"]
    assert loads, "this looks for nothing"
    assert [file for file, call in loads if keyword(call, "weights_only") is not True] == []
    assert [file for file, _, call in CALLS if keyword(call, "trust_remote_code")] == []


def test_no_option_that_lets_files_run_code() -> None:
    assert [file for file, _, call in CALLS if keyword(call, "allow_pickle")] == []
    assert [file for file, _, call in CALLS if keyword(call, "shell") not in (None, False)] == []
    assert {file for file, name, _ in CALLS if name.endswith("np.load")} == {"lens/table.py", "probe/cache.py"}


def test_archives_are_unpacked_in_one_place_with_a_filter() -> None:
    unpacking = [
        (file, call) for file, name, call in CALLS if name.endswith(("extractall", ".extract", "unpack_archive"))
    ]
    assert {file for file, _ in unpacking} == {"data/archives.py", "data/fetch.py"}  # which calls the former
    in_archives = [call for file, call in unpacking if file == "data/archives.py"]
    # Of zip files links are refused, and Python's own reader cuts off what would lead outside.
    assert sorted(str(keyword(call, "filter")) for call in in_archives) == ["None", "data"]


def test_pictures_are_opened_in_one_place() -> None:
    opening = {file for file, name, _ in CALLS if name == "Image.open"}
    assert opening == {"data/opening.py", "report/study/animation.py"}  # the latter what it has drawn itself


def is_ours(name: ast.expr) -> bool:
    """Whether a module's name stands in the code, or begins as those of this package do."""
    if isinstance(name, ast.JoinedStr):
        begin = name.values[0]
        return isinstance(begin, ast.Constant) and str(begin.value).startswith("nearsight.")
    return isinstance(name, ast.Constant)


def test_the_user_names_modules_in_one_place() -> None:
    importing = [(file, call.args[0]) for file, name, call in CALLS if name.split(".")[-1] == "import_module"]
    requiring = [(file, call.args[0]) for file, name, call in CALLS if name == "require"]  # data/extras.py imports it
    by_variable = {file for file, name in (*importing, *requiring) if not is_ours(name)}
    assert by_variable == {"data/extras.py", "models/sources/factories.py"}


WRITES_ITSELF = {
    "files.py": "the one place where files are replaced",
    "probe/cache.py": "an array that grows chunk by chunk, with a sum for each, and its lock",
    "study/lock.py": "a lock, which must fail where it exists",
}
"""Files that write to disk other than by `replacing`, and why."""


def writes(name: str, call: ast.Call) -> bool:
    """Whether a call writes to a place that is not a temporary file of `replacing`, nor memory."""
    receiver, _, method = name.rpartition(".")
    if method in ("write_text", "write_bytes"):
        return receiver not in ("temporary", "")
    if method in ("to_csv", "savefig", "to_parquet", "to_json", "save_file", "savez"):
        given = [ast.unparse(argument) for argument in call.args]
        return bool(given) and not {"temporary", "buffer", "file"} & set(given)
    if method in ("open", "fdopen"):
        of_path = receiver not in ("", "os", "tarfile", "zipfile")  # the others are given the path first
        modes = [each.value for each in call.args[0 if of_path else 1 :][:1] if isinstance(each, ast.Constant)]
        return any(set(str(mode)) & set("wax+") for mode in modes) and receiver != "temporary"
    return False


def test_whatever_lands_in_a_folder_replaces_what_was_there_whole() -> None:
    # Benchmarks make and throw away what they need.
    found = {file for file, name, call in CALLS if writes(name, call) and not file.startswith("bench/")}
    assert found == set(WRITES_ITSELF)


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.trace,)


def bomb_as_batch(path: Path, bomb: Bomb) -> None:
    path.write_bytes(pickle.dumps({b"data": bomb, b"labels": []}, protocol=2))
    read_pickled_arrays(path)


def bomb_as_checkpoint(path: Path, bomb: Bomb) -> None:
    torch.save({"state_dict": {"w": torch.ones(1)}, "args": bomb}, path)
    load_checkpoint(create_model("compact_vit", depth=1), path)


def bomb_as_old_checkpoint(path: Path, bomb: Bomb) -> None:
    path.write_bytes(pickle.dumps(bomb))
    load_checkpoint(create_model("compact_vit", depth=1), path)


def bomb_as_tensors(path: Path, bomb: Bomb) -> None:
    path.write_bytes(pickle.dumps(bomb))
    load_tensors(path)


def bomb_as_heads(path: Path, bomb: Bomb) -> None:
    np.savez(buffer := io.BytesIO(), format=np.array([bomb], dtype=object))
    path.write_bytes(buffer.getvalue())
    HeadTable.load(path)


@pytest.mark.parametrize(
    "load", [bomb_as_batch, bomb_as_checkpoint, bomb_as_old_checkpoint, bomb_as_tensors, bomb_as_heads]
)
def test_files_that_would_run_code_are_refused(tmp_path: Path, load: Callable[[Path, Bomb], None]) -> None:
    trace = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Bomb(trace)))
    assert trace.exists(), "it works where it is let"
    trace.unlink()
    with pytest.raises(InputError):
        load(tmp_path / "file", Bomb(trace))
    assert not trace.exists()


def test_a_config_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder that somebody sent cannot make its reader import a module."""
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\ndef model(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        ModelConfig(name="trap:model")
    config = {"schema": 1, "config": {"model": {"name": "trap:model"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="'trap:model' is not a known model"):
        RunFolder(tmp_path).read_config()
    assert not (tmp_path / "it ran").exists()
