"""The retrieval benchmark: every way finds the same, and the table says what it says."""

import pytest

from nearsight.bench import retrieve
from nearsight.bench.retrieve import bench_retrieve, table
from nearsight.commands import bench as command
from nearsight.errors import InputError


def test_ways_agree_and_ratios_are_consistent():
    pytest.importorskip("faiss")
    rows = bench_retrieve(device="cpu", memory_size=3000, num_channels=16, num_queries=20, k=5, num_turns=1)
    by_way = {row.way: row for row in rows}
    assert set(by_way) == {"nearsight", "faiss", "products"}
    assert by_way["nearsight"].agrees == 1.0
    assert by_way["faiss"].ratio == 1.0
    assert by_way["nearsight"].ratio == pytest.approx(by_way["nearsight"].seconds / by_way["faiss"].seconds)
    assert by_way["products"].share_of_products == 1.0
    for row in rows:
        assert row.teraflops == pytest.approx(2 * 3000 * 20 * 16 / row.seconds / 1e12)
    assert len(table(rows).splitlines()) == 2 + len(rows)


def test_command(capsys):
    sizes = ["--memory-size", "500", "--num-channels", "8", "--num-queries", "4", "--num-turns", "1"]
    assert command.main(["retrieve", "--device", "cpu", *sizes]) == 0
    assert capsys.readouterr().out.startswith("4 queries, 500 vectors of 8 channels, k = 30, cpu\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_turns": 0}, "num_turns is 0"),
        ({"memory_size": 0}, "memory_size is 0"),
        ({"num_channels": 0}, "num_channels is 0"),
        ({"num_queries": 0}, "num_queries is 0"),
        ({"k": 0}, "k is 0"),
        ({"k": 501}, "there are 500 vectors in the memory, but 501 neighbours"),
    ],
)
def test_nonsense_is_refused_before_anything_is_drawn(given, message, monkeypatch):
    monkeypatch.setattr(retrieve, "_directions", None)
    with pytest.raises(InputError, match=message):
        bench_retrieve(device="cpu", **{"memory_size": 500, **given})
