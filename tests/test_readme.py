"""The README's examples run as they stand there."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) >= 2
    names: dict[str, object] = {}
    for example in EXAMPLES:
        offline = example.replace("pretrained=True", "pretrained=False").replace("vit_base", "vit_tiny")
        exec(offline, names)
    assert "blocks.11.attn" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", TEXT) if not target.startswith("http")]
    assert targets
    for target in targets:
        assert (README.parent / target).exists(), target


def test_both_commands_are_shown_and_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in TEXT
        assert f"\n{command}: " in makefile


def test_the_cost_of_measuring_is_what_was_measured() -> None:
    rows = json.loads((README.parent / "results/bench-measure/h200.json").read_text())["rows"]
    for row in rows:
        slower, maps = row["ratio"], row["maps_ms"] / row["forward_ms"]
        extra, extra_of_maps = row["extra_bytes"] / 1e6, row["maps_extra_bytes"] / 1e6
        line = f"| {row['num_tokens']:,} | {slower:.2f} × | {maps:.2f} × | {extra:.1f} of {extra_of_maps:,.0f} MB |"
        assert line in TEXT
