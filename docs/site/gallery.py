"""The gallery: the pages of all committed studies and of the shipped models. `python docs/site/gallery.py` makes it.

Each page is one file that opens without a network. They are made from the committed tables and weights, go to
build/gallery with an index of pictures, and are not committed. Nothing is trained; the shipped models are measured on
the shipped images.
"""

import html
import re
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from PIL import Image

from nearsight.cli import main as nearsight
from nearsight.models.zoo import MODELS
from nearsight.papers import catalogue, declare_all
from nearsight.report.figures.models import write_figures
from nearsight.report.page.document import PAGE
from nearsight.report.page.folders import read_folder, read_folders

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
OUT = ROOT / "build" / "gallery"
WIDTH = 640
"""Of a picture in the index, in pixels."""
PICTURES = (
    *("emergence-course", "mixing-contrasts", "figure-6-interaction", "figure-6-accuracy-and-locality"),
    *("distance-by-size", "settings-effects", "permutation-curves", "positional-seeds"),
    *("transfer", "sweep", "control", "phases", "probes", "figure-4-minimum-mad"),
)
"""The figure that says most of a study: the first of these that it has."""
PROBED = {
    "dense/dino": "What are features worth that were learned without labels? DINO on Tiny-ImageNet, ViT and LocAt (S2)",
    "dense/supervised": "Do LocAt's frozen features tell more about single patches than ViT's? (S2)",
}
"""Probes have no recipe that would say what they ask."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A card of the index."""

    name: str
    question: str
    result: str
    page: str
    picture: str


def studies() -> list[Path]:
    """The committed studies and probes that a page can be made of."""
    return sorted(path.parent for name in ("study.json", "probes.json") for path in RESULTS.rglob(name))


def add_study(folder: Path) -> Entry:
    declare_all()
    name = folder.relative_to(RESULTS).as_posix()
    stem = name.replace("/", "-")
    text = read_folder(folder).html()
    (OUT / f"{stem}.html").write_text(text, encoding="utf-8")
    figures = folder / "figures"
    picture = next(path for path in (figures / f"{each}.png" for each in PICTURES) if path.exists())
    _shrink(picture, OUT / f"{stem}.png")
    about = PROBED.get(name) or catalogue()[folder.name].splitlines()[0]
    return Entry(name=name, question=about, result=_headline(text), page=f"{stem}.html", picture=f"{stem}.png")


def add_model(name: str, measured: Path) -> Entry:
    """The page that `nearsight measure` writes of a shipped model, with the attention explorer."""
    _run("measure", name, "--out", str(measured))
    return _entry(name, MODELS[name], measured)


def compare_models(folders: list[Path], out: Path) -> Entry:
    _run("report", "--compare", *map(str, folders), "--out", str(out))
    write_figures(read_folders(folders).models, out / "figures")
    return _entry("side-by-side", "The same network, trained three ways: what does the recipe do to the heads?", out)


def _run(*arguments: str) -> None:
    with redirect_stdout(StringIO()) as printed:
        if nearsight(arguments) != 0:
            raise RuntimeError(f"nearsight {' '.join(arguments)} did not succeed: {printed.getvalue()}")


def _entry(name: str, about: str, folder: Path) -> Entry:
    """Of a folder of measured models: its page, and the heat maps of all heads as the picture."""
    text = (folder / PAGE).read_text(encoding="utf-8")
    (OUT / f"{name}.html").write_text(text, encoding="utf-8")
    _shrink(folder / "figures" / "heatmaps.png", OUT / f"{name}.png")
    return Entry(name=name, question=about, result=_headline(text), page=f"{name}.html", picture=f"{name}.png")


def write_index(models: list[Entry], found: list[Entry]) -> None:
    lines = [
        "# Gallery",
        "",
        "The pages that the commands leave: each is one file, opens without a network, and can be saved and sent. "
        "Click a head in its plane, drag over a group of them, sort the tables.",
        "",
        "## Models that come with the package",
        "",
        "`nearsight measure` writes such a page of any ViT. These have the attention explorer: click a patch, and "
        "every head shows where it attends.",
        "",
        _cards(models),
        "",
        "## Studies",
        "",
        "What was asked, and the first thing that each page says. The [findings](../findings.md) say what follows from "
        "all of them.",
        "",
        _cards(found),
    ]
    (OUT / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cards(entries: list[Entry]) -> str:
    cards = [
        f'<a href="{each.page}"><img src="{each.picture}" alt="" loading="lazy"><b>{html.escape(each.name)}</b>'
        f"<p>{html.escape(each.question)}</p><p><em>{each.result}</em></p></a>"
        for each in entries
    ]
    return "\n".join(['<div class="gallery">', *cards, "</div>"])


def _headline(text: str) -> str:
    """What the page says first, as HTML."""
    found = re.search(r'class="headline"[^>]*>(.*?)</h\d>', text, flags=re.DOTALL)
    assert found, "the page has no headline"
    return re.sub(r"<[^>]+>", "", found[1]).strip()


def _shrink(picture: Path, small: Path) -> None:
    with Image.open(picture) as opened:
        opened.thumbnail((WIDTH, WIDTH))
        opened.convert("RGB").quantize(128).save(small, optimize=True)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor() as processes:
        folders = {name: Path(temporary) / name for name in MODELS}
        models = [processes.submit(add_model, name, folder) for name, folder in folders.items()]
        found = [processes.submit(add_study, folder) for folder in studies()]
        measured = [each.result() for each in models]
        together = compare_models(list(folders.values()), Path(temporary) / "side-by-side")
        write_index([together, *measured], [each.result() for each in found])
    pages = list(OUT.glob("*.html"))
    print(f"{len(pages)} pages, {sum(path.stat().st_size for path in OUT.iterdir()) / 1e6:.0f} MB: {OUT}")


if __name__ == "__main__":
    main()
