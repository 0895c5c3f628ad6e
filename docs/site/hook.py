"""What `mkdocs build` does besides rendering docs/: it takes along what is linked, and loads nothing from the network.

The pages of docs/ are read in the repository, too, so they link to files outside of docs/: verdicts and figures under
results/, CONTRIBUTING.md. Each of these goes into the site under its own path, and so does what it links to; Markdown
becomes a page. The gallery and the executed notebooks were made before, by `gallery.py` and `notebooks.py`.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
MADE = {"gallery": "docs/site/gallery.py", "notebooks": "docs/site/notebooks.py"}
"""Folder under build/ and in the site → what makes it."""
LINK = re.compile(r"(\]\(|\b(?:src|href)=\")([^)\s\"]+)")
"""A link or a picture, of Markdown or HTML: what comes before its address, and the address."""
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LOADED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
"""What a browser fetches when it opens a page; a link that a reader may click is not."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for folder, script in MADE.items():
        made = sorted(path for path in (ROOT / "build" / folder).rglob("*") if path.is_file())
        if not made:
            raise PluginError(f"build/{folder} is empty; run python {script} first, or make docs")
        for path in made:
            name = f"{folder}/{path.relative_to(ROOT / 'build' / folder).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    to_read = [Path(file.abs_src_path or "") for file in files.documentation_pages()]
    of_root = [entry for entry in _pages_of(config.nav or []) if "/" not in entry and (ROOT / entry).exists()]
    to_read += [_take(ROOT / entry, files, config) for entry in of_root]
    while to_read:
        page = to_read.pop()
        for target in _outside(page):
            if files.get_file_from_path(_name_of(target)) is None:
                taken = _take(target, files, config)
                if taken.suffix == ".md":
                    to_read.append(taken)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the site, where docs/ is not a folder."""
    source = Path(page.file.abs_src_path or "")

    def in_site(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        here = posixpath.dirname(page.file.src_uri)
        anchor = match[2].partition("#")[2]
        return match[1] + posixpath.relpath(_name_of(target), here or ".") + (f"#{anchor}" if anchor else "")

    # Code stays what it is.
    code = [match.span() for match in FENCED.finditer(markdown)]
    return LINK.sub(
        lambda match: match[0] if any(start <= match.start() < end for start, end in code) else in_site(match), markdown
    )


def on_post_build(*, config: MkDocsConfig) -> None:
    """Nothing is loaded from elsewhere, or the site is not built."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if loaded := LOADED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path} would load {loaded[1]} from the network; keep a copy in docs/assets")


def _pages_of(nav: list[object] | dict[str, object] | object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict | list):
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages_of(entry)


def _outside(page: Path) -> Iterator[Path]:
    """The files that a page links to and that the site does not have by itself."""
    for match in LINK.finditer(FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = _target(page, match[2])
        if target is not None and ROOT / "docs" not in target.parents:
            yield target


def _target(page: Path, address: str) -> Path | None:
    """The file of the repository that a relative link of a page names; None of any other link."""
    if re.match(r"[a-z]+:|#|//", address):
        return None
    target = (page.parent / address.partition("#")[0]).resolve()
    return target if target.is_file() and ROOT in target.parents else None


def _name_of(target: Path) -> str:
    """Its path in the site: that in the repository, or below docs/ or build/; of a notebook the page that shows it."""
    name = target.relative_to(ROOT)
    if name.suffix == ".ipynb":
        name = name.with_suffix(".md")
    return Path(*name.parts[1:]).as_posix() if name.parts[0] in ("docs", "build") else name.as_posix()


def _take(target: Path, files: Files, config: MkDocsConfig) -> Path:
    files.append(File.generated(config, _name_of(target), abs_src_path=str(target)))
    return target
