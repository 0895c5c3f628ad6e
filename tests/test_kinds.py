"""Folders of one kind are not written over by what makes another."""

from pathlib import Path

import pytest

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.files import MEASURED, PROBES, RUN, STUDY, check_kind

COMMANDS = {
    RUN: ["train", "compact-shapes", "--data.num-train", "100", "--protocol.max-epochs", "1"],
    STUDY: ["study", "run", "protocol-cifar100", "--scale", "small"],
    PROBES: ["probe", "all", "vit_tiny_patch16_224", "--probes", "knn", "--image-size", "32"],
    MEASURED: ["measure", "vit_tiny_patch16_224", "--num-images", "2"],
    "result.json": ["probe", "knn", "vit_tiny_patch16_224", "--image-size", "32"],
    "report.html": ["demo", "--num-train", "100", "--epochs", "1"],
}


@pytest.mark.parametrize(
    ("own", "held"), [(own, held) for own in COMMANDS for held in (RUN, STUDY, PROBES, MEASURED) if own != held]
)
def test_every_command_keeps_away_from_other_kinds(
    own: str, held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / held).write_text("{}")
    (tmp_path / "provenance.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*COMMANDS[own], "--device", "cpu", "--out", str(tmp_path)]) == 2
    words = {RUN: "a run", STUDY: "a study", PROBES: "probe all", MEASURED: "a measured model"}[held]
    assert words in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_kind_of_a_folder_is_what_it_is_as_a_whole(tmp_path: Path) -> None:
    check_kind(tmp_path, None)
    (tmp_path / MEASURED).touch()
    check_kind(tmp_path, MEASURED)
    (tmp_path / RUN).touch()
    check_kind(tmp_path, RUN)  # a run has its heads' table, too
    for other in (MEASURED, STUDY, PROBES, None):
        with pytest.raises(InputError, match="holds a run, whose files would be lost"):
            check_kind(tmp_path, other)
