"""Pages of findings: a few sentences each, which rest on verdicts and are refused where one comes out otherwise.

No number on them is typed by hand: it is computed from the committed results alone.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    figure: str | tuple[str, Callable[[Mapping[str, Any]], Drawing]] | None = None
    """Its path below the results; or name and function of one that no study has alone."""
    limits: str = ""
    """What it does not say, and what would change our mind."""
    as_table: bool = False
    """Whether what it rests on stands in a table, with the paper's numbers and ours, and not in a list."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A page of sections."""

    title: str
    about: str
    sections: Sequence[Section]
    with_others: bool = True
    """Whether all other results are listed at the end."""

    def write(self, results: Path, page: Path) -> tuple[Path, ...]:
        """Write the page and, next to it in images/, the figures that no study has alone; the files written."""
        found = _read(results)
        drawn: list[Path] = []
        for section in self._answered(found):
            if isinstance(section.figure, tuple):
                name, draw = section.figure
                drawn += draw(found).save(page.parent / "images", name)
        write_text(page, self._text(found, results, page))
        return (page, *drawn)

    def markdown(self, results: Path, page: Path) -> str:
        """The text of the page; `page` is where it will stand, for its links."""
        return self._text(_read(results), results, page)

    def _text(self, found: Mapping[str, Any], results: Path, page: Path) -> str:
        sections = self._answered(found)
        if not any(section.rests_on for section in sections):
            raise InputError(f"{results} has no results that the page is about; run one of the studies first")
        judged = {name: verdicts for name, each in found.items() if (verdicts := verdicts_on(each)) is not None}
        link = partial(_link, page=page)

        def verdict_of(name: str) -> str:
            return link(results / name / "verdict.md")

        lines = [f"# {self.title}", "", self.about, ""]
        for number, section in enumerate(sections, start=1):
            chosen = [(name, _chosen(section, name, judged[name])) for name in section.rests_on]
            lines += [f"## {number}. {section.title}", "", _filled(section, found, chosen), ""]
            lines += [*(_table if section.as_table else _list)(chosen, judged, verdict_of), ""]
            if section.figure is not None:
                figure = section.figure
                image = link(results / figure) if isinstance(figure, str) else f"images/{figure[0]}.png"
                lines += [f'<img src="{image}" width="{_WIDTH}" alt="{section.title}">', ""]
            if section.limits:
                lines += [section.limits, ""]
        if self.with_others:
            told = {name for section in sections for name in section.rests_on}
            others = {name: verdicts for name, verdicts in judged.items() if name not in told}
            lines += ["## All other results", ""]
            lines += [f"- [{name}]({verdict_of(name)}): {verdicts.summary()}" for name, verdicts in others.items()]
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


_Chosen = Sequence[tuple[str, list[Judgement]]]
"""Folder of results → judgements."""


def _list(chosen: _Chosen, judged: Mapping[str, Verdicts], verdict_of: Callable[[str], str]) -> Iterator[str]:
    for name, some in chosen:
        for each in some:
            n = each.finding.n
            about = [
                f"[{name}]({verdict_of(name)})",
                *([seeds_in_words([n])] if n else []),
                judged[name].when_asked(each.claim),
            ]
            yield f"- **{each.words}** ({', '.join(about)}): {each.claim.text}"


def _table(chosen: _Chosen, judged: Mapping[str, Verdicts], verdict_of: Callable[[str], str]) -> Iterator[str]:
    if chosen:
        yield "| claim or question | asked | the paper | ours | seeds | verdict |"
        yield "| --- | --- | --- | --- | --- | --- |"
    for name, some in chosen:
        for each in some:
            numbers = [
                judged[name].when_asked(each.claim),
                each.claim.paper or "–",
                each.finding.ours.split(_READINGS)[0],
            ]
            verdict = f"[**{each.words}**]({verdict_of(name)})"
            yield f"| {' | '.join([each.claim.text, *numbers, str(each.finding.n or '–'), verdict])} |"


def _link(target: Path, *, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()
