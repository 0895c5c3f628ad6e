"""docs/locality.md: its examples run, its inducer of one's own passes its test, its numbers are those of the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm

import nearsight
from nearsight.locat.inducers import LOCALITIES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "locality.md").read_text(encoding="utf-8")
_FILE = re.compile(r"^`(\w+\.py)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROWS = {
    name: (start, int(count.replace(",", "")))
    for name, start, count in re.findall(r"^\| `(\w+)` \| .* \| ([^|]+) \| ([\d,]+) \|$", TEXT, re.MULTILINE)
}
"""Name → how it starts, and how many numbers it adds."""


def test_the_first_example_runs() -> None:
    example = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(example, names)
    assert names["table"].mad.shape == (12, 6)  # type: ignore[attr-defined]


def test_an_inducer_of_ones_own_runs(tmp_path: Path) -> None:
    files = dict(_FILE.findall(TEXT))
    assert set(files) == {"axial.py", "test_axial.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=prepend", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout


def test_all_inducers_are_there_with_how_they_start() -> None:
    assert set(ROWS) == set(LOCALITIES)
    for name, (start, _) in ROWS.items():
        assert start.startswith("no effect" if LOCALITIES[name].starts_plain else "at once"), name


def test_new_numbers_in_a_vit_base_are_counted() -> None:
    model = timm.create_model("vit_base_patch16_224")
    before = sum(weight.numel() for weight in model.parameters())
    for name, (_, count) in ROWS.items():
        nearsight.add_locality(model, name)
        assert sum(weight.numel() for weight in model.parameters()) - before == count, name
        nearsight.remove_locality(model)


def test_the_coverage_table_has_a_column_for_each() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    (columns, *_) = re.findall(r"^\| module \| checked on \| (.*) \| what is refused", page, re.MULTILINE)
    assert columns.split(" | ") == list(LOCALITIES)


@pytest.mark.parametrize("study", ["inducers-cifar100", "inducers-tiny-imagenet"])
def test_a_figure_of_results_is_shown_when_there_are_some(study: str) -> None:
    has_results = (ROOT / "results" / study / "runs.csv").exists()
    assert has_results == (f"](../results/{study}/figures/cost.png)" in TEXT)
    assert has_results or "have\nnot been run" in TEXT
