"""The README's examples run as they stand there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
PAGES = [*README.parent.glob("*.md"), *(README.parent / "docs").glob("*.md")]
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) >= 2
    names: dict[str, object] = {}
    for example in EXAMPLES:
        offline = example.replace('"vit_base_patch16_224", pretrained=True', '"vit_small_patch16_224"')
        exec(offline, names)
    assert "8 layers × 8 heads, 200 images; most local [0, 4]: MAD 0.002" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, section = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not section or section in sections(path), target


def sections(page: Path) -> set[str]:
    """The names of a page's headings in an address."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_both_commands_are_shown_and_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in TEXT
        assert f"\n{command}: " in makefile
