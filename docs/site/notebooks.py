"""Execute the notebooks of docs/notebooks and write them as pages of the site: `python docs/site/notebooks.py`.

They are committed without outputs. What they print and draw is made here, by the code as it is now, without a network;
a cell that fails ends the build. Pages go to build/notebooks as Markdown, with the pictures beside them.
"""

import base64
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
OUT = ROOT / "build" / "notebooks"
_SECONDS = 300
"""The most that a cell may take."""
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs. It runs in an empty folder, so what it writes goes away with that."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=_SECONDS, kernel_name="python3", coalesce_streams=True, resources=place
        ).execute()
    return notebook


def write_page(path: Path) -> None:
    notebook, pages = execute(path), []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            pages.append(cell.source)
            continue
        pages.append(f"```python\n{cell.source}\n```")
        outputs = [_output(each, f"{path.stem}-{number}-{index}") for index, each in enumerate(cell.outputs)]
        if shown := [text for text in outputs if text]:
            pages.append('<div class="output" markdown>\n\n' + "\n\n".join(shown) + "\n\n</div>")
    title, *rest = pages
    download = (
        f"*[The notebook]({path.name}); what stands below its cells was computed when this page was built, on a CPU.*"
    )
    (OUT / f"{path.stem}.md").write_text("\n\n".join([title, download, *rest]) + "\n", encoding="utf-8")


def _output(output: Any, stem: str) -> str:
    """Markdown of what a cell gave: the richest of its forms that a page without a kernel can show."""
    if output.output_type == "stream":
        return _text(output.text) if output.name == "stdout" else ""  # bars and warnings go elsewhere
    data = output.get("data", {})
    if "image/png" in data:
        (OUT / f"{stem}.png").write_bytes(base64.b64decode(data["image/png"]))
        return f"![]({stem}.png)"
    if "text/html" in data:
        # A blank line would end the block of HTML.
        return '<div markdown="0">' + re.sub(r"\n\s*\n", "\n", data["text/html"]) + "</div>"
    return _text(data["text/plain"]) if "text/plain" in data else ""


def _text(text: str) -> str:
    return f"```text\n{_TERMINAL.sub('', text).rstrip()}\n```" if text.strip() else ""


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    with ThreadPoolExecutor(2) as threads:  # which wait; each notebook is a process of its own
        list(threads.map(write_page, paths))
    print(f"{len(paths)} notebooks executed: {OUT}")


if __name__ == "__main__":
    main()
