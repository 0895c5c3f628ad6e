"""Write every report again from the raw tables, and compare it with what is committed: `make golden`.

Whoever changes how results are told, and no number, shows it by this. It writes into a temporary folder the tables,
figures and verdicts of everything under results/, and the pages of docs/ about them, and compares file by file: bytes;
of tables the numbers to nine digits, since a processor's linear algebra rounds the last ones; or, where a figure was
drawn by another version of matplotlib, the numbers and words of its SVG. Files that nobody writes any more
count, too. The exit code is 1 if anything differs.
"""

import argparse
import csv
import io
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import matplotlib

from nearsight.files import ABLATED
from nearsight.papers import declare_all
from nearsight.papers.findings import write_findings
from nearsight.papers.protocol.revisited import write_revisited
from nearsight.papers.structure.learned_positions import write_bridge
from nearsight.report.ablated import AblatedRuns
from nearsight.report.ablated_tables import write_ablated_report
from nearsight.report.atlas_page import AtlasReport
from nearsight.report.probe_tables import write_probe_report
from nearsight.report.probes import ProbeResults
from nearsight.report.simulations import write_simulation_report
from nearsight.report.writing import write_study_report
from nearsight.study import SimulationResults, StudyResults, is_simulation

declare_all()
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
BRIDGE = RESULTS / "spatial-structure" / "bridge"
_VERSION = re.compile(r"Matplotlib v([\w.]+)")
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
_DIGITS = 1e-9
"""By which a number of a table may differ, relatively: instructions differ between processors, and with them the order
of sums."""
_ZERO = 1e-12
"""And absolutely: the difference of two numbers that are equal may come out as anything this small."""
_POINTS = 0.5
"""By which a mark may move from one version of matplotlib to the next."""


def reports() -> list[Path]:
    """The folders under results/ that hold a report of a study, of probes, of changed heads, of an atlas, or the bridge
    between two studies."""
    names = ("study.json", "probes.json", ABLATED, "atlas.csv")
    return [BRIDGE, *sorted(path.parent for name in names for path in RESULTS.rglob(name))]


def write(committed: Path, folder: Path) -> tuple[Path, ...]:
    """The report of a committed folder, written anew elsewhere; the files written."""
    if committed == BRIDGE:
        folder.mkdir()
        shutil.copy(BRIDGE / "plan.json", folder)
        return write_bridge(RESULTS / json.loads((BRIDGE / "provenance.json").read_text())["study"], folder)
    if (committed / "probes.json").exists():
        return write_probe_report(ProbeResults.read(committed), folder)
    if (committed / "atlas.csv").exists():
        folder.mkdir()
        return tuple(AtlasReport.read(committed).write(folder))
    if (committed / ABLATED).exists():
        return write_ablated_report(AblatedRuns.read(committed), folder)
    if is_simulation(committed):
        return write_simulation_report(SimulationResults.read(committed), folder)
    results = StudyResults.read(committed)
    return (*results.write_tables(folder), *write_study_report(results, folder))


def compare(committed: Path) -> tuple[int, list[str]]:
    """How many files of a committed report were compared, and which differ."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / committed.name
        written = {path.relative_to(folder) for path in write(committed, folder)}
        held = {path.relative_to(committed) for path in of_report(committed)}
        problems = [f"{committed / name} is written no more" for name in sorted(held - written)]
        problems += [f"{committed / name} is new" for name in sorted(written - held) if not (committed / name).exists()]
        for name in sorted(name for name in written if (committed / name).exists()):
            if not is_same(committed / name, folder / name):
                problems.append(f"{committed / name} differs")
        return len(held | written), problems


def of_report(committed: Path) -> Iterator[Path]:
    for name in ("tables", "figures"):
        yield from (path for path in (committed / name).rglob("*") if path.is_file())
    for name in ("verdict.md", "atlas*.*", "models.*", "report.html"):
        yield from committed.glob(name)


PAGES = {"findings.md": write_findings, "s1-revisited.md": write_revisited}


def compare_page(name: str) -> tuple[int, list[str]]:
    """A page of docs/, whose links say where it stands relative to the results, and the figures it alone has."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "results").symlink_to(RESULTS)
        written = PAGES[name](Path(temporary) / "results", Path(temporary) / "docs" / name)
        pairs = [(ROOT / path.relative_to(temporary), path) for path in written]
        problems = [f"{ours} differs" for ours, theirs in pairs if not ours.exists() or not is_same(ours, theirs)]
        return len(written), problems


def is_same(committed: Path, written: Path) -> bool:
    ours, theirs = committed.read_bytes(), written.read_bytes()
    if ours == theirs:
        return True
    if committed.suffix == ".csv":
        return has_same_cells(ours.decode(), theirs.decode())
    if committed.suffix == ".html":  # with the figures in it
        return is_of_another_matplotlib(committed.parent / "figures" / "atlas-depth.svg")
    drawing = committed.with_suffix(".svg")
    if not is_of_another_matplotlib(drawing):
        return False
    # Pixels are those of the SVG beside them, which is compared by itself.
    return committed.suffix == ".png" or has_same_marks(ours.decode(), theirs.decode())


def is_of_another_matplotlib(drawing: Path) -> bool:
    drawn_by = _VERSION.search(drawing.read_text()) if drawing.exists() else None
    return drawn_by is not None and drawn_by[1] != matplotlib.__version__


def has_same_cells(ours: str, theirs: str) -> bool:
    """Whether two tables have the same words, and the same numbers but for the last digits."""
    ours_rows, theirs_rows = (list(csv.reader(io.StringIO(text))) for text in (ours, theirs))
    if [len(row) for row in ours_rows] != [len(row) for row in theirs_rows]:
        return False
    return all(map(_is_same_cell, chain.from_iterable(ours_rows), chain.from_iterable(theirs_rows)))


def _is_same_cell(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=_DIGITS, abs_tol=_ZERO)
    except ValueError:  # words
        return False


def has_same_marks(ours: str, theirs: str) -> bool:
    """Whether two drawings have the same elements with the same numbers, but for a fraction of a point."""
    ours, theirs = _VERSION.sub("", ours), _VERSION.sub("", theirs)
    if _NUMBER.sub("#", ours) != _NUMBER.sub("#", theirs):
        return False
    pairs = zip(_NUMBER.findall(ours), _NUMBER.findall(theirs), strict=True)
    return all(abs(float(a) - float(b)) <= _POINTS for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of studies; all by default")
    names = parser.parse_args().names
    chosen = [path for path in reports() if not names or path.name in names]
    began, num_files, problems = time.monotonic(), 0, []
    with ProcessPoolExecutor() as processes:
        pending = [processes.submit(compare, path) for path in chosen]
        if not names:
            pending += [processes.submit(compare_page, name) for name in PAGES]
        for future in pending:
            compared, found = future.result()
            num_files += compared
            problems += found
    for problem in problems:
        print(problem)
    same = num_files - len(problems)
    print(f"{same} of {num_files} files of {len(chosen)} reports are as committed ({time.monotonic() - began:.0f} s)")
    return 1 if problems or not num_files else 0


if __name__ == "__main__":
    sys.exit(main())
