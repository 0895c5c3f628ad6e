"""No code from checkpoints, configs, data sets or archives is ever run; `package.module:function`, which users write
themselves, is the one way to theirs. And no file gets the memory that it asks for."""

import ast
import gzip
import io
import json
import os
import pickle
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import nearsight
from nearsight.cli import main
from nearsight.commands.subjects import open_run
from nearsight.configuration import encode
from nearsight.data import make_shapes
from nearsight.data.cifar import read_pickled_arrays
from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.models import create_model, load_model
from nearsight.models.checkpoints import load_checkpoint
from nearsight.models.factory import ModelConfig
from nearsight.report.inputs import read_heads, read_measured
from nearsight.report.page.folders import read_folder
from nearsight.study.run_tables import read_columns
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train import HEADS_COLUMNS, RunFolder

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
    ("data/cifar.py", "pickle.Unpickler"),  # which finds five names and no others
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
    unpacking = [(file, call) for file, name, call in CALLS if name.endswith(("extractall", ".extract"))]
    callers = {file for file, name, _ in CALLS if name.endswith("unpack_archive")}
    assert {file for file, _ in unpacking} | callers == {"data/fetch.py"}
    # Of zip files links are refused, and Python's own reader cuts off what would lead outside.
    assert sorted(str(keyword(call, "filter")) for _, call in unpacking) == ["None", "data"]


def test_pictures_are_opened_in_one_place() -> None:
    opening = {file for file, name, _ in CALLS if name == "Image.open"}
    assert opening == {"data/decoding.py", "report/marks.py"}  # the latter what it has drawn itself


def is_ours(name: ast.expr) -> bool:
    """Whether a module's name stands in the code, or begins as those of this package do."""
    if isinstance(name, ast.JoinedStr):
        begin = name.values[0]
        return isinstance(begin, ast.Constant) and str(begin.value).startswith("nearsight.")
    return isinstance(name, ast.Constant)


def test_the_user_names_modules_in_one_place() -> None:
    importing = [(file, call.args[0]) for file, name, call in CALLS if name.split(".")[-1] == "import_module"]
    requiring = [(file, call.args[0]) for file, name, call in CALLS if name == "require"]  # data/parquet.py imports it
    by_variable = {file for file, name in (*importing, *requiring) if not is_ours(name)}
    # lazy.py loads what our own files import, later: their text names it, and no user can.
    assert by_variable == {"data/parquet.py", "lazy.py", "models/sources.py"}


WRITES_ITSELF = {
    "cli.py": "the traceback of an unexpected error, in a new file of a random name",
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


HEADS = pd.DataFrame([dict.fromkeys(HEADS_COLUMNS, 0.5) | {"layer_name": "a", "num_images": 2, "epoch": 1}])
TINY = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8)


def read_heads_named(**numbers: int) -> Callable[[Path], object]:
    """By a report and by a study, each from a file of one row."""

    def read(folder: Path) -> None:
        HEADS.assign(**{"layer": 0, "head": 0, **numbers}).to_csv(folder / "heads.csv", index=False)
        with pytest.raises(InputError, match=r"column (layer|head) holds"):
            read_columns(folder / "heads.csv", HEADS_COLUMNS, text=("layer_name",))
        read_heads(folder / "heads.csv").pivot(index="layer", columns="head")

    return read


def read_line_without_end(folder: Path) -> None:
    with gzip.open(folder / "course.csv.gz", "wb", 1) as file:
        file.write(b"1," * 2**22)
    read_columns(folder / "course.csv.gz", HEADS_COLUMNS, text=("layer_name",))


def read_model_of(
    image_size: object = (32, 32), num_classes: object = 3, **settings: object
) -> Callable[[Path], object]:
    """A file of small weights that says it is of such a model, with a digest that is right."""

    def read(folder: Path) -> None:
        described = {"model": {**encode(TINY), **settings}, "image_size": image_size, "num_classes": num_classes}
        save_tensors(folder / "model.safetensors", TINY.build((32, 32), 3).state_dict(), described)
        load_model(folder / "model.safetensors")

    return read


def read_compressed_arrays(folder: Path) -> None:
    np.savez_compressed(folder / "heads.npz", format=np.array(1), mad=np.zeros(2**26 + 1))
    HeadTable.load(folder / "heads.npz")


def read_arrays_cut_short(folder: Path) -> None:
    np.lib.format.write_array_header_1_0(
        header := io.BytesIO(), {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    )
    with zipfile.ZipFile(folder / "heads.npz", "w") as archive:
        archive.writestr("mad.npy", header.getvalue())
    HeadTable.load(folder / "heads.npz")


def read_grids(grid: object) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        HEADS.assign(layer=0, head=0).to_csv(folder / "heads.csv", index=False)
        (folder / "measured.json").write_text(json.dumps({"schema": 1, "grids": {"0": grid}}))
        read_measured(folder)

    return read


def read_brackets(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    """Which Python's own reader goes down one after the other."""

    def write_and_read(folder: Path) -> None:
        HEADS.assign(layer=0, head=0).to_csv(folder / "heads.csv", index=False)
        (folder / name).write_text("[" * 100_000)
        read(folder)

    return write_and_read


def read_pickle_of_places(folder: Path) -> None:
    (folder / "train").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")  # an object, to be remembered at place 2³¹ − 1
    read_pickled_arrays(folder / "train")


GREEDY: dict[str, tuple[Callable[[Path], object], str]] = {
    "10¹² heads": (read_heads_named(head=10**12), "'head' holds 1e[+]12, but must hold less than 4096"),
    "10⁹ layers": (read_heads_named(layer=10**9), "'layer' holds 1e[+]09, but must hold less than 4096"),
    "a compressed line": (read_line_without_end, "a line of more than 1048576 characters"),
    "depth": (read_model_of(depth=10**9), "weights that do not fit the model it names"),
    "width": (read_model_of(width=10**9, num_heads=10), "weights that do not fit the model it names"),
    "MLP": (read_model_of(mlp_width=2**62), "weights that do not fit the model it names"),
    "classes": (read_model_of(num_classes=10**12), "weights that do not fit the model it names"),
    "images": (read_model_of(image_size=(8 * 10**8, 8)), "the side of an image has 1 to 4096 pixels"),
    "images without positions": (
        read_model_of(image_size=(2**14, 2**14), positions=False),
        "the side of an image has 1 to 4096 pixels",
    ),
    "no images": (read_model_of(image_size="x"), r"model\.safetensors: image_size is 'x', but must be a list"),
    "compressed arrays": (read_compressed_arrays, "its arrays have more than 536870912 bytes"),
    "arrays that are not there": (read_arrays_cut_short, r"mad\.npy is cut short"),
    "a grid": (read_grids([10**9, 10**9]), "the side of a grid is 1000000000, but"),
    "a grid of words": (read_grids(["x", 2]), r"measured\.json is damaged: a grid\[0\] is 'x'"),
    "a grid of nothing": (read_grids(None), r"measured\.json is damaged: a grid is None"),
    "nested objects": (read_brackets("measured.json", read_folder), r"measured\.json is damaged"),
    "nested configs": (
        read_brackets("config.json", lambda folder: open_run(str(folder), checkpoint=None)),
        r"config\.json is damaged",
    ),
    "shapes": (lambda _: make_shapes(10**12), "1000000000000 shapes images take"),
    "places of a pickle": (read_pickle_of_places, "is not a CIFAR batch file: it has a place 2147483647, but 9 bytes"),
}
"""Files of a few bytes, and what is said about them."""


@pytest.mark.parametrize("what", GREEDY)
def test_files_that_ask_for_too_much_are_refused_before_they_get_it(tmp_path: Path, what: str) -> None:
    read, said = GREEDY[what]
    with pytest.raises(InputError, match=said) as refused:
        read(tmp_path)
    assert type(refused.value.__cause__) not in (MemoryError, RuntimeError), "it was asked for"  # the latter by torch


def test_a_table_of_rows_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearsight.study.run_tables.MOST_ROWS", 100)
    HEADS.assign(layer=0, head=0).loc[[0] * 99].to_csv(tmp_path / "heads.csv", index=False)
    assert len(read_columns(tmp_path / "heads.csv", HEADS_COLUMNS, text=("layer_name",))["head"]) == 99
    HEADS.assign(layer=0, head=0).loc[[0] * 100].to_csv(tmp_path / "heads.csv", index=False)
    with pytest.raises(InputError, match="it has more than 100 rows"):
        read_columns(tmp_path / "heads.csv", HEADS_COLUMNS, text=("layer_name",))


def test_a_config_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder that somebody sent cannot make its reader import a module."""
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\ndef model(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        ModelConfig(name="trap:model")
    config = {"schema": 1, "config": {"model": {"name": "trap:model"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="'trap:model' is code of your own, which is imported only where you name it"):
        RunFolder(tmp_path).read_config()
    assert not (tmp_path / "it ran").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    tiny = ["--model.depth", "1", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"]
    few = ["--data.num-train", "60", "--data.num-test", "20", "--num-measured", "10"]
    rest = ["--protocol.max-epochs", "1", "--protocol.batch-size", "20", "--device", "cpu", "--out", str(path)]
    assert main(["train", "compact-shapes", *tiny, *few, *rest]) == 0
    assert main(["measure", str(path), "--device", "cpu"]) == 0
    return path


OPENED = (
    *("config.json", "heads.csv", "history.csv", "model.safetensors"),
    *("result.json", "provenance.json", "checksums.json"),
)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize(
    "command", ["report", *(pytest.param(name, marks=pytest.mark.faults) for name in ("measure", "train"))]
)
@pytest.mark.parametrize("name", OPENED)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(trained: Path, tmp_path: Path, name: str, command: str) -> None:
    """Nobody will ever write to it. Whoever does not need the file may do without."""
    run = shutil.copytree(trained, tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    arguments = {
        "measure": ["measure", str(run), "--device", "cpu", "--num-images", "2", "--out", str(tmp_path / "out")],
        "report": ["report", str(run), "--device", "cpu", "--out", str(tmp_path / "out.html")],
        "train": ["train", "compact-shapes", "--out", str(run), "--device", "cpu"],
    }[command]

    def waited(*_: object) -> None:
        raise TimeoutError(f"{name} was waited for")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(30)
    try:
        assert main(arguments) in (0, 2)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
