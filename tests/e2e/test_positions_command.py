"""`nearsight measure --what positions`: learned positions as a table and a figure."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from nearsight.cli import main
from nearsight.lens import position_gram
from nearsight.models import create_model

FEW = ("--num-images", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one. What any measurement draws is left out, since it takes longer than all else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nearsight.commands.measured.write_figures", lambda *_, **__: ())
    monkeypatch.setattr("nearsight.commands.measured.write_page", lambda path, **_: path.write_text("page"))
    return tmp_path


def test_positions_of_two_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["compact_vit_positional", "compact_vit"]
    assert main(["measure", *models, *FEW, "--seed", "3", "--out", "out", "--what", "positions"]) == 0
    printed = capsys.readouterr().out
    for name in models:
        torch.manual_seed(3)
        written = pd.read_csv(f"out/positions-{name}.csv")
        pd.testing.assert_frame_equal(written, position_gram(create_model(name)).to_frame())
        assert list(written) == ["patch", "row", "col", "norm", "neighbour_association", "chance"]
        assert f"Also: out/positions-{name}.csv" in printed
        assert f"Also: out/figures/positions-{name}.png" in printed
        assert (folder / "out" / "figures" / f"positions-{name}.svg").stat().st_size > 1000


def test_a_model_without_positions_is_told_so_and_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from nearsight.models import create_model\n\ndef model():\n"
    code += "    return create_model('compact_vit', depth=1, pos_embed='none')\n"
    (folder / "model_without_positions.py").write_text(code)
    monkeypatch.syspath_prepend(folder)

    def measured(*_: object) -> None:
        raise AssertionError("it is known before anything is measured")

    monkeypatch.setattr("nearsight.commands.measuring.measure_shown", measured)
    models = ["compact_vit", "model_without_positions:model"]
    assert main(["measure", *models, *FEW, "--out", "out", "--what", "positions"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("nearsight: CompactViT has no learned absolute positions")
    assert not (folder / "out").exists()
