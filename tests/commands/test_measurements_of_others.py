"""A measurement that somebody else registers is told like our own: in the help, as a table, a figure, a sentence and a
section of the page. All of it is said in its class."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from nearsight.cli import main
from nearsight.lens import WHAT, HeadTable, Measurement, attention_maps, measure, measurement
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import MEASUREMENTS, QueryMeans
from nearsight.lens.stream import Tile
from nearsight.lens.survey import Site, Survey
from nearsight.models import create_model


class Peaks(Measurement):
    """`peak` [layers, heads]: the largest weight of a query."""

    about = "per head: the largest weight that a patch gives"
    picture = "heat"
    columns = ("peak",)
    needs_tiles = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        return f"The largest weight is {np.nanmax(table.extra['peak']):.3f} on average."

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._means = QueryMeans(list(found.layers))

    def add(self, site: Site, tile: Tile) -> None:
        looking_BWHT = tile.queries_WT2[:, None, :, 0].isfinite().expand(tile.log_weights_BWHTM.shape[:-1])
        peaks_BWHT = tile.log_weights_BWHTM.softmax(-1).amax(-1)
        sums_BH = torch.where(looking_BWHT, peaks_BWHT, 0.0).sum((1, 3))
        self._means.add(site.layer, sums_BH[..., None], looking_BWHT)

    def results(self) -> dict[str, np.ndarray]:
        return {"peak": self._means.taken()[..., 0]}


@pytest.fixture(params=["heat", "its own"])
def registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def drawn(table: HeadTable, *, label: str, layers: Sequence[int]) -> Figure:
        figure = Figure()
        figure.subplots().plot(table.extra["peak"].ravel())
        return figure

    if request.param == "its own":
        monkeypatch.setattr(Peaks, "picture", staticmethod(drawn))
    measurement("peaks")(Peaks)
    yield
    del MEASUREMENTS["peaks"], WHAT["peaks"]


@pytest.mark.usefixtures("registered")
def test_a_registered_measurement_is_told_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["measure", "--help"])
    assert "peaks: per head: the largest weight that a patch gives" in " ".join(capsys.readouterr().out.split())
    arguments = ["measure", "compact_vit", "--what", "peaks", "--num-images", "3", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "The largest weight is 0.0" in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "extra-heads.csv")
    assert rows["peak"].between(1 / 65, 1).all()
    assert (tmp_path / "figures" / "peaks.png").stat().st_size > 1000
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    section = page[page.index('id="what-peaks"') :]
    assert "The largest weight is 0.0" in section[: section.index("</section>")]
    assert "<svg" in section[: section.index("</section>")]
    assert main([*arguments[:2], "--num-images", "3", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert not list(tmp_path.rglob("*peaks*")), "what was not asked for again is gone"


@pytest.mark.usefixtures("registered")
def test_it_is_right() -> None:
    torch.manual_seed(0)
    model, images = create_model("compact_vit", depth=2, embed_dim=24, num_heads=2), torch.randn(3, 3, 32, 32)
    table = measure(model, images, what=["peaks"])
    for layer, of_layer in enumerate(attention_maps(model, images, dtype=torch.float64)):
        expected = of_layer.full()[:, :, 1:].amax(-1).mean((0, 2)).numpy()
        np.testing.assert_allclose(table.extra["peak"][layer], expected, rtol=1e-5)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(AssertionError, match="there is a measurement 'shares' already"):
        measurement("shares")(Peaks)
