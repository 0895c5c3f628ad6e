"""The site's parts fit: its navigation, its links, its example, its notebooks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MADE = {"gallery/index.md"}
"""Pages that are in no folder before the site is built."""


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


NAV = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def test_the_navigation_has_every_page_once() -> None:
    written = {path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md")]}
    executed = {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
    of_the_root = {"CONTRIBUTING.md", "CHANGELOG.md"}
    assert all((ROOT / name).exists() for name in of_the_root)
    assert len(NOTEBOOKS) == 3
    assert sorted(NAV) == sorted(written | executed | of_the_root | MADE)


def test_the_reference_names_packages() -> None:
    for page in (DOCS / "reference").glob("*.md"):
        (name,) = re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert (ROOT / "src" / name.replace(".", "/") / "__init__.py").exists(), page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs_and_their_links_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    assert cells[0]["source"][0].startswith("# ")
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)\s#]+)\)", text):
        assert target.removeprefix("../") in MADE or (path.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="needs the extra docs")
    monkeypatch.syspath_prepend(DOCS / "site")
    import notebooks  # type: ignore[import-not-found]

    executed = notebooks.execute(path)
    for cell in executed.cells:
        forms = {form for output in cell.get("outputs", []) for form in output.get("data", {})}
        is_drawn = cell.cell_type == "code" and re.search(r"\.plot\(\)\Z|plt\.subplots", cell.source)
        assert not is_drawn or "image/png" in forms, cell.source


def test_the_example_of_the_first_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith("[[0.11 ")  # layer 0, head 0, of 8 × 8 heads
