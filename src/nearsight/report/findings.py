"""The page of findings: a few sentences each, which rest on verdicts and are refused where one comes out otherwise.

No number on it is typed by hand: it is computed from the committed results alone.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nearsight.errors import InputError
from nearsight.files import ABLATED, write_text
from nearsight.report.ablated import AblatedRuns
from nearsight.report.ablated_tables import ablated_verdicts
from nearsight.report.claims import Judgement, Verdicts
from nearsight.report.marks import Drawing
from nearsight.report.probe_tables import probe_verdicts
from nearsight.report.probes import ProbeResults
from nearsight.report.simulations import simulation_verdicts
from nearsight.report.tables import seeds_in_words
from nearsight.report.writing import study_verdicts
from nearsight.study import SimulationResults, StudyResults, is_simulation

ANY = ""
"""Of a claim that is shown, whatever came out."""
_PLACE = re.compile(r"\{([^{}]+)\}")
_READINGS = "; strict reading"
"""From here on our numbers say how a rule read them."""
_WIDTH = 560
"""Of a figure on the page, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    """The finding."""
    text: str
    """In a few sentences. {folder:claim} stands for our numbers on a claim, {folder:claim:paper} for the
    paper's, {folder:claim:seeds} for how many seeds would decide it, and {name} for what `numbers` says."""
    rests_on: Mapping[str, Mapping[str, str]]
    """Folder of results → id of a claim → the verdict or answer without which the sentences do not hold, or `ANY`."""
    numbers: Callable[[Mapping[str, Any]], Mapping[str, str]] = field(default=lambda results: {})
    """Of the results by folder: further numbers, in words."""
    figure: str | tuple[str, Callable[[Mapping[str, Any]], Drawing]]
    """Its path below the results; or name and function of one that no study has alone."""
    limits: str
    """What it does not say, and what would change our mind."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A page of sections, and a list of all other results."""

    title: str
    about: str
    sections: Sequence[Section]

    def write(self, results: Path, page: Path) -> tuple[Path, ...]:
        """Write the page and, next to it in images/, the figures that no study has alone; the files written."""
        found = _read(results)
        drawn: list[Path] = []
        for section in self._answered(found):
            if not isinstance(section.figure, str):
                name, draw = section.figure
                drawn += draw(found).save(page.parent / "images", name)
        write_text(page, self._text(found, results, page))
        return (page, *drawn)

    def markdown(self, results: Path, page: Path) -> str:
        """The text of the page; `page` is where it will stand, for its links."""
        return self._text(_read(results), results, page)

    def _text(self, found: Mapping[str, Any], results: Path, page: Path) -> str:
        sections = self._answered(found)
        if not sections:
            raise InputError(f"{results} has no results that the page is about; run one of the studies first")
        judged = {name: verdicts for name, each in found.items() if (verdicts := verdicts_on(each)) is not None}
        link = partial(_link, page=page)
        lines = [f"# {self.title}", "", self.about, ""]
        for number, section in enumerate(sections, start=1):
            chosen = [(name, _chosen(section, name, judged[name])) for name in section.rests_on]
            lines += [f"## {number}. {section.title}", "", _filled(section, found, chosen), ""]
            for name, some in chosen:
                study = f"[{name}]({link(results / name / 'verdict.md')})"
                lines += [_line(study, each, judged[name].when_asked(each.claim)) for each in some]
            lines.append("")
            if isinstance(section.figure, str):
                image = link(results / section.figure)
            else:
                image = f"images/{section.figure[0]}.png"
            lines += [f'<img src="{image}" width="{_WIDTH}" alt="{section.title}">', "", section.limits, ""]
        told = {name for section in sections for name in section.rests_on}
        lines += ["## All other results", ""]
        lines += [
            f"- [{name}]({link(results / name / 'verdict.md')}): {verdicts.summary()}"
            for name, verdicts in judged.items()
            if name not in told
        ]
        return "\n".join(lines).rstrip() + "\n"

    def _answered(self, found: Mapping[str, Any]) -> list[Section]:
        return [section for section in self.sections if all(name in found for name in section.rests_on)]


def _read(results: Path) -> dict[str, Any]:
    """Every study, simulation and set of probed or changed models below a folder, by its path there: of those at full
    scale that have runs."""
    found: dict[str, Any] = {}
    for path in sorted(path for name in ("study.json", "probes.json", ABLATED) for path in results.rglob(name)):
        folder, name = path.parent, path.parent.relative_to(results).as_posix()
        if path.name == "probes.json":
            found[name] = ProbeResults.read(folder)
        elif path.name == ABLATED:
            found[name] = AblatedRuns.read(folder)
        elif is_simulation(folder):
            found[name] = SimulationResults.read(folder)
        else:
            found[name] = StudyResults.read(folder)
    return {name: each for name, each in found.items() if each.scale == "full" and _has_runs(each)}


def _has_runs(results: Any) -> bool:
    return isinstance(results, ProbeResults | AblatedRuns) or bool(len(results.runs))


def verdicts_on(results: Any) -> Verdicts | None:
    """Of a study, a simulation, or probed or changed models."""
    if isinstance(results, ProbeResults):
        return probe_verdicts(results)
    if isinstance(results, AblatedRuns):
        return ablated_verdicts(results)
    return simulation_verdicts(results) if isinstance(results, SimulationResults) else study_verdicts(results)


def _chosen(section: Section, name: str, verdicts: Verdicts) -> list[Judgement]:
    """The judgements that a section rests on. One that came out otherwise is an error: its sentences do not hold."""
    by_id = {judgement.claim.id: judgement for judgement in verdicts.judgements}
    for claim, expected in section.rests_on[name].items():
        if claim not in by_id:
            raise KeyError(f"{name} has no claim {claim!r}; it has {sorted(by_id)}")
        if expected != ANY and by_id[claim].words != expected:
            raise InputError(
                f"the finding {section.title!r} rests on {claim!r} of {name} being {expected!r}, but it is "
                f"{by_id[claim].words!r}: rewrite it"
            )
    return [by_id[claim] for claim in section.rests_on[name]]


def _filled(section: Section, found: Mapping[str, Any], chosen: Iterable[tuple[str, list[Judgement]]]) -> str:
    numbers = dict(section.numbers(found))
    for name, some in chosen:
        for each in some:
            place = f"{name}:{each.claim.id}"
            numbers |= {place: each.finding.ours.split(_READINGS)[0], f"{place}:paper": each.claim.paper}
            numbers |= {f"{place}:seeds": "more" if each.to_decide is None else str(each.to_decide)}
    return _PLACE.sub(lambda place: numbers[place[1]], section.text)


def _line(study: str, judgement: Judgement, asked: str) -> str:
    n = judgement.finding.n
    about = ", ".join([study, *([seeds_in_words([n])] if n else []), asked])
    return f"- **{judgement.words}** ({about}): {judgement.claim.text}"


def _link(target: Path, *, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()
