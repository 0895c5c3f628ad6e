"""What users get wrong: one clear line on standard error, exit code 2, nothing half-written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearsight.cli import main
from nearsight.report.page.folders import read_folder

TINY = [
    *("--model.depth", "1", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
    *("--data.num-train", "100", "--data.num-test", "20", "--protocol.max-epochs", "1", "--protocol.batch-size", "40"),
    *("--num-measured", "10", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "compact-shapes", "--out", str(path), *TINY]) == 0
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line that a command says when it refuses."""
    capsys.readouterr()
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nearsight: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tran"], "'tran' is not a known command; did you mean 'train'?"),
        (["train", "compact-cifar1000"], "'compact-cifar1000' is not a known recipe; did you mean 'compact-cifar100'?"),
        (["train", "--seed", "3"], "the recipe comes first"),
        (["train", "compact-shapes", "--protocol", "modrn"], "did you mean 'modern'?"),
        (["train", "compact-shapes", "--seed", "three"], "--seed"),
        (["train", "compact-shapes", "--sed", "3"], "did you mean --seed?"),
        (["measure", "compact_vit", "--num-images", "abc"], "--num-images is 'abc', but a whole number is needed; see"),
        (["measure", "compact_vit", "--out", ""], "an argument is empty"),
        (["measure", "compact_vit", "--images", "phot\udcff"], "'phot\\udcff' is not valid UTF-8"),
        (
            ["train", "compact-shapes", "--protocol.cutmix.p", "1.5"],
            "cutmix.p is 1.5, but a probability lies in [0, 1]",
        ),
        (
            ["train", "compact-shapes", "--protocol", "baseline", "--protocol.cutmix.alpha", "0.3"],
            "cutmix.alpha is 0.3, but cutmix is never applied; say how often with --protocol.cutmix.p",
        ),
        (
            ["train", "compact-shapes", "--protocol.timm-randaugment.num-ops", "3"],
            "timm_randaugment is never applied; say how often with --protocol.timm-randaugment.p",
        ),
        (["train", "compact-shapes", "--protocol.max-epochs", "-3"], "max_epochs is -3, but must be at least 1"),
        (["train", "compact-shapes", "--precision", "fp8"], "fp8"),
        (["train", "compact-shapes", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["train", "compact-shapes", "--device", "abacus"], "'abacus' is not a device"),
        (["train", "compact-shapes", "--device", "meta"], "not one nearsight computes on"),
        (["measure", "vit_smal_patch16_224"], "did you mean 'vit_small_patch16_224'?"),
        (["measure", "no/such/run"], "no/such/run is not a folder"),
        (["measure", "compact_vit", "--address", "local"], "--address is for --engine ray, not for local"),
        (["bench", "measure", "--model", "vit_smal_patch16_224"], "did you mean 'vit_small_patch16_224'?"),
        (
            ["bench", "measure", "--model", "test_vit.r16_in1k"],
            "not its tag 'r16_in1k'; did you mean test_vit.r160_in1k?",
        ),
        (["bench", "gaug", "--model", "locat_compact_vit.mine"], "not its tag 'mine'; known tags: modern_cifar100"),
        (["bench", "gaug", "--model", "compact_vit_positional.mine"], "not its tag 'mine'; known tags: none"),
        (["measure", "compact_vit", "--num-images", "-1"], "--num-images is -1"),
        (["measure"], "model"),
        (["demo", "--epochs", "0"], "max_epochs is 0"),
        (["demo", "--num-train", "10"], "--num-train is 10"),
        (["study", "run", "ablation-cifar100", "--address", "local"], "--address is for --engine ray, not for local"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_answered_in_one_line(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in complaint(arguments, capsys)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--model.patch-size", "5"], "patch size 5 does not divide an image side of 32 pixels"),
        (["--model.num-heads", "3"], "3 heads do not divide a width of 16"),
        (["--data.name", "cifar"], "did you mean 'cifar1"),
        (["--model.name", "compact_vt"], "did you mean 'compact_vit'?"),
        (["--model.name", "resnet18"], "depth is 1, but resnet18 has no such setting; what timm calls its arguments"),
        (
            ["--protocol.tileshuffle.p", "1", "--protocol.tileshuffle.tile", "33"],
            "tileshuffle.tile is 33, but images of 32×32 pixels have no such tile; choose at most 32",
        ),
        (
            ["--protocol.resizedcrop.p", "1", "--protocol.resizedcrop.size", "20"],
            "resizedcrop.size is 20, but the model takes images of 32×32 pixels",
        ),
        (["--protocol.lr", "inf"], "protocol.lr is inf, but must be finite"),
        (["--seed", "99999999999999999999"], "seed is 99999999999999999999, but must lie within"),
    ],
)
def test_what_does_not_fit_the_data(
    settings: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert words in complaint(["train", "compact-shapes", "--out", str(out), *TINY, *settings], capsys)
    assert not out.exists()


def test_an_output_path_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "taken"
    path.write_text("precious")
    for arguments in (
        ["train", "compact-shapes", "--out", str(path), *TINY],
        ["demo", "--out", str(path)],
        ["measure", "compact_vit", "--out", str(path), "--num-images", "2"],
    ):
        assert f"{path} is a file, but a folder to write to is needed" in complaint(arguments, capsys)
    assert "which is a file" in complaint(["demo", "--out", str(path / "below")], capsys)
    assert path.read_text() == "precious"


def test_a_run_with_a_damaged_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, arguments in (
        ("model.safetensors", ["measure", str(run), "--device", "cpu"]),
        ("checkpoint.safetensors", ["train", "compact-shapes", "--out", str(run), *TINY]),
    ):
        for last in ("provenance.json", "checksums.json"):
            (run / last).unlink(missing_ok=True)  # unfinished, so that training goes on
        path = run / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 0xFF
        path.write_bytes(content)
        before = contents(run)
        told = complaint(arguments, capsys)
        assert f"{name} is damaged" in told
        assert "; remove it, and provenance.json beside it if there is one" in told
        assert contents(run) == before


def test_a_finished_run_that_has_lost_a_file_says_what_to_remove(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    way_out = f"remove {run / 'provenance.json'}, and the command that made it makes the end of the run again"
    for name in ("model.safetensors", "heads.csv", "history.csv"):
        kept = (run / name).read_bytes()
        (run / name).unlink()
        told = complaint(["train", "compact-shapes", "--out", str(run), *TINY], capsys)
        assert f"{run / name} is missing: it was there when the run was finished; {way_out}" in told
        if name == "model.safetensors":  # a page can do without the weights
            assert read_folder(run).models[0].grids is None
        else:
            assert told == complaint(["report", str(run)], capsys)
        (run / name).write_bytes(kept)


def test_a_run_of_a_newer_nearsight(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**stored, "schema": 99}))
    before = contents(run)
    for arguments in (["measure", str(run)], ["train", "compact-shapes", "--out", str(run), *TINY]):
        assert "has schema 99, but this nearsight reads up to" in complaint(arguments, capsys)
    assert contents(run) == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}'])
def test_a_run_with_a_damaged_config(run: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.json").write_text(content)
    assert "config.json" in complaint(["measure", str(run)], capsys)
    told = complaint(["train", "compact-shapes", "--out", str(run), *TINY], capsys)
    assert f"{run / 'config.json'} is" in told
    assert (f"; move {run} away, or train" in told) == ("schema" not in content)  # what may be another's stays


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json is missing" in complaint(["measure", str(tmp_path)], capsys)


def test_settings_of_another_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = complaint(["train", "compact-shapes", "--out", str(run), *TINY, "--seed", "5"], capsys)
    assert "holds another run" in words


def test_unreadable_images_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(folder / "good.png")
    (folder / "broken.jpg").write_bytes(b"not an image")
    out = tmp_path / "out"
    words = complaint(["measure", "compact_vit", "--images", str(folder), "--out", str(out)], capsys)
    assert "broken.jpg" in words
    assert not (out / "heads.csv").exists()
    assert "is not there" in complaint(["measure", "compact_vit", "--images", str(tmp_path / "none")], capsys)


def test_training_that_diverges_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "compact-shapes", "--out", str(tmp_path / "run"), *TINY, "--protocol.lr", "1e30"]
    capsys.readouterr()
    assert main([*arguments, "--protocol.max-epochs", "9", "--protocol.warmup-epochs", "0"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the loss of" in last
    assert "Try a lower --protocol.lr" in last


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("nearsight.commands.data.main", fail)


def test_an_error_that_nobody_expected_is_a_line_and_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken(monkeypatch, KeyError("layers\nand heads"))
    said = complaint(["data", "list"], capsys, code=1)
    assert "an unexpected error: KeyError: 'layers\\nand heads'; what was finished is kept" in said
    (written,) = tmp_path.iterdir()
    assert said.endswith(f"the whole error is in {written}\n")
    assert written.stat().st_mode & 0o777 == 0o600
    told = written.read_text()
    assert "data list" in told.splitlines()[0]
    assert "Traceback" in told
    assert "raise error" in told
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert complaint(["data", "list"], capsys, code=1).endswith("; --debug shows the whole error\n")
    for arguments in (["--debug", "data", "list"], ["data", "list", "--debug"]):
        with pytest.raises(KeyError):
            main(arguments)


def test_errors_of_memory_and_of_files_that_nobody_looked_for_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert "there is not enough memory for this (Default" in complaint(["data", "list"], capsys, code=1)
    broken(monkeypatch, MemoryError())
    assert "there is not enough memory for this (MemoryError); ask for less" in complaint(["data", "list"], capsys, 1)
    broken(monkeypatch, OSError(36, "File name too long", "xxx"))
    assert complaint(["data", "list"], capsys) == "nearsight: xxx cannot be used: File name too long\n"
    broken(monkeypatch, RuntimeError("of another kind"))
    assert "unexpected error: RuntimeError: of another kind" in complaint(["data", "list"], capsys, code=1)
