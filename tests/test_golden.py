"""What `make golden` takes for the same, and what it does not: a check that cannot fail would be none."""

import shutil
from pathlib import Path

import matplotlib
import pytest

import golden

SVG = """<title>Matplotlib v{version}, https://matplotlib.org/</title>
<path d="M {x} 20 L 30.5 -4e-3"/><text>{word}</text>"""


def drawing(path: Path, *, version: str = matplotlib.__version__, x: float = 10.0, word: str = "CutMix") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(SVG.format(version=version, x=x, word=word))
    path.with_suffix(".png").write_text(f"pixels of {version}, {x} and {word}")
    return path


@pytest.mark.parametrize(
    ("changes", "same_version", "another_version"),
    [
        ({}, True, True),
        ({"x": 10.2}, False, True),
        ({"x": 11.0}, False, False),
        ({"word": "Cutmix"}, False, False),
    ],
)
def test_figures(tmp_path: Path, changes: dict[str, float], same_version: bool, another_version: bool) -> None:
    written = drawing(tmp_path / "written" / "figure.svg", **changes)
    for version, expected in ((matplotlib.__version__, same_version), ("1.2.3", another_version)):
        committed = drawing(tmp_path / "committed" / "figure.svg", version=version)
        assert golden.is_same(committed, written) is expected
    assert golden.is_same(committed.with_suffix(".png"), written.with_suffix(".png")), "it is told by its SVG"


def test_whatever_is_changed_missing_or_new_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "protocol-cifar10"
    committed = Path(shutil.copytree(golden.RESULTS / name, tmp_path / name))
    assert golden.compare(committed)[1] == []
    table, verdict = committed / "tables" / "conditions.csv", committed / "verdict.md"
    table.write_text(table.read_text().replace("0.", "1.", 1))
    verdict.unlink()
    (committed / "tables" / "of-another-day.md").write_text("")
    number, problems = golden.compare(committed)
    assert number > 10
    assert problems == [
        f"{committed / 'tables' / 'of-another-day.md'} is written no more",
        f"{verdict} is new",
        f"{table} differs",
    ]
    monkeypatch.setattr("sys.argv", ["golden.py", "no-such-study"])
    assert golden.main() == 1, "nothing was compared"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a,0.016437499999999987,1e-16\n", True),  # what another processor's sums give
        ("a,0.0164375001,1e-16\n", False),
        ("b,0.01643749999999999,1e-16\n", False),
        ("a,0.01643749999999999,\n", False),
        ("a,0.01643749999999999\n", False),
        ("a,0.01643749999999999,1e-16\na,1,1\n", False),
    ],
)
def test_tables_have_the_same_words_and_their_numbers_to_nine_digits(written: str, expected: bool) -> None:
    assert golden.has_same_cells("a,0.01643749999999999,-2e-17\n", written) is expected
