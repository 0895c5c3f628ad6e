"""One page for a reader with ten minutes, from the committed results alone: no number in it is typed by hand."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.claims import OURS, Judgement, Verdicts
from nearsight.report.marks import Drawing
from nearsight.report.studies import report_of
from nearsight.report.tables import markdown_rows, seeds_in_words
from nearsight.report.writing import study_verdicts
from nearsight.study.results import StudyResults

Row = dict[str, str]
"""Of a table of answers: column → cell."""


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    """The question."""
    claim: str
    """What is at stake, and who says so."""
    answers: Mapping[str, tuple[str, ...]]
    """Study → the ids of its claims that are shown."""
    in_short: tuple[str, ...]
    """Those of them that decide the question, for the summary."""
    hinges_on: tuple[str, ...] = ()
    """Studies one of which must have results for the question to be answered at all; by default any of them."""
    figures: tuple[tuple[str, str], ...] = ()
    """Study and file name of its figures."""
    draw: tuple[str, Callable[[Mapping[str, StudyResults]], Drawing]] | None = None
    """Name and function of a figure of several studies, where none of them has it."""
    words: Mapping[str, Callable[[StudyResults], str]] = field(default_factory=dict)
    """Study → a sentence with numbers."""
    change_our_mind: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A page of sections, each of which says what some studies found about one question."""

    title: str
    about: str
    sections: Sequence[Section]

    def write(self, results: Path, page: Path) -> tuple[Path, ...]:
        """Write the page and, next to it in images/, the figures that no study has alone; the files written."""
        studies = self.read_studies(results)
        written: list[Path] = []
        for section in self._answered(studies):
            if section.draw is not None:
                name, draw = section.draw
                with suppress(InputError):  # the studies there are cannot give it
                    written += draw(studies).save(page.parent / "images", name)
        write_text(page, self.markdown(results, page))
        return (page, *written)

    def markdown(self, results: Path, page: Path) -> str:
        """The text of the page; `page` is where it will stand, for its links."""
        studies = self.read_studies(results)
        sections = self._answered(studies)
        judged = {name: study_verdicts(study) for name, study in studies.items()}
        answered = {section.title: _answer_rows(section, studies, judged) for section in sections}
        lines = [self.title, "", self.about, "", "## In short", "", *_in_short(sections, answered), ""]
        for number, section in enumerate(sections, start=1):
            lines += [f"## {_heading(number, section)}", "", f"**The claim.** {section.claim}", ""]
            lines += _answers(answered[section.title])
            words = (describe(studies[name]) for name, describe in section.words.items() if name in studies)
            lines += [line for sentence in words for line in (sentence, "")]
            lines += _figures(section, studies, results, page)
            lines += [f"**What would change our mind.** {section.change_our_mind}", ""]
            lines += [*_runs(section, studies, results, page), ""]
        return "\n".join(lines).rstrip() + "\n"

    def read_studies(self, results: Path) -> dict[str, StudyResults]:
        """The studies of the page that have results at full scale, by name."""
        names = dict.fromkeys(name for section in self.sections for name in section.answers)
        found = {name: StudyResults.read(results / name) for name in names if (results / name / "study.json").exists()}
        full = {name: study for name, study in found.items() if study.scale == "full" and len(study.runs)}
        if not full:
            raise InputError(f"{results} has no results of {', '.join(names)}; run one of them first")
        return full

    def _answered(self, studies: Mapping[str, StudyResults]) -> list[Section]:
        return [one for one in self.sections if any(name in studies for name in one.hinges_on or one.answers)]


def _heading(number: int, section: Section) -> str:
    return f"{number}. {section.title}"


def _anchor(heading: str) -> str:
    """What Markdown viewers call a heading in links: its words without punctuation."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _in_short(sections: Iterable[Section], answered: Mapping[str, list[Row]]) -> list[str]:
    """What decides each question, in a table: the question stands once, with the first of its answers."""
    rows = []
    for number, section in enumerate(sections, start=1):
        question = f"[{section.title}](#{_anchor(_heading(number, section))})"
        for row in answered[section.title]:
            if row["id"] in section.in_short:
                rows.append({"question": question, **{name: row[name] for name in _OF_SUMMARY}})
                question = ""
    return markdown_rows(rows)


_OF_SUMMARY = ("claim or question", "asked", "study", "ours", "verdict")


def _answers(rows: list[Row]) -> list[str]:
    # A column that says the same in every row, or nothing, is not worth its place.
    idle = {"id", "study"} if len({row["study"] for row in rows}) == 1 else {"id"}
    idle |= set() if any(row["paper"] for row in rows) else {"paper"}
    return [*markdown_rows([{name: cell for name, cell in row.items() if name not in idle} for row in rows]), ""]


def _answer_rows(
    section: Section, studies: Mapping[str, StudyResults], judged: Mapping[str, Verdicts | None]
) -> list[Row]:
    rows = []
    for name, ids in section.answers.items():
        if name in studies:
            verdicts = judged[name]
            of_paper = report_of(name).paper is not None
            rows += [
                {
                    "id": judgement.claim.id,
                    "study": name,
                    "claim or question": judgement.claim.text,
                    "asked": verdicts.when_asked(judgement.claim) if verdicts else "",
                    "paper": judgement.claim.paper if of_paper and judgement.claim.source != OURS else "",
                    "ours": judgement.finding.ours + _fewer_seeds(judgement, studies[name]),
                    "verdict": f"**{judgement.finding.verdict}**",
                }
                for judgement in _chosen(name, verdicts.judgements if verdicts else [], ids)
            ]
    return rows


def _fewer_seeds(judgement: Judgement, study: StudyResults) -> str:
    """How many seeds it rests on, where others of the study rest on more and it does not say so itself."""
    n, words = judgement.finding.n, seeds_in_words([judgement.finding.n])
    is_worth_saying = 0 < n < study.runs["seed"].nunique() and not judgement.finding.ours.endswith(words)
    return f" ({words})" if is_worth_saying else ""


def _chosen(study: str, judgements: Sequence[Judgement], ids: tuple[str, ...]) -> list[Judgement]:
    """Those of these ids, or all, in the study's order. An id that it does not have is an error in the code."""
    known = [judgement.claim.id for judgement in judgements]
    if unknown := set(ids) - set(known):
        raise KeyError(f"study {study!r} has no claims {sorted(unknown)}; it has {known}")
    return [judgement for judgement in judgements if not ids or judgement.claim.id in ids]


def _figures(section: Section, studies: Mapping[str, StudyResults], results: Path, page: Path) -> list[str]:
    if section.draw is not None:
        name, draw = section.draw
        try:
            caption = draw(studies).caption
        except InputError:
            return []
        return [f"![{section.title}](images/{name}.png)", "", f"*{caption}*", ""]
    present = [(study, name) for study, name in section.figures if study in studies]
    images = [results / study / "figures" / name for study, name in present]
    return [line for image in images for line in (f"![{section.title}]({_link(image, page)})", "")]


def _runs(section: Section, studies: Mapping[str, StudyResults], results: Path, page: Path) -> list[str]:
    """What the section rests on: runs, seeds, images, and minutes where they are known."""
    words = []
    for name in section.answers:
        if name not in studies:
            continue
        runs = studies[name].runs
        seeds = seeds_in_words(runs.groupby("condition")["seed"].nunique())
        link = f"[{name}]({_link(results / name / 'verdict.md', page)})"
        words.append(f"{link}: {len(runs)} runs, {seeds} per condition{_cost(results / name / 'provenance.json')}")
    return [f"*{'; '.join(words)}.*"]


def _cost(path: Path) -> str:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        machines = ", ".join(dict.fromkeys(each.get("gpu", each["device"]) for each in record["hardware"]))
        # Results of earlier versions say the seconds of their epochs, of a stack's once.
        seconds = record["elapsed_seconds"] if "elapsed_seconds" in record else record["device_seconds"]
        # Which runs came from the tables of other studies, whose time is reported there.
        taken = "".join(f", {number} of them from {study}" for study, number in record.get("taken_from", {}).items())
        cost = f", {record['images'] / 1e6:.0f} M images in {seconds / 60:.0f} minutes on {machines}"
        return taken + (cost if record["images"] else "")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _link(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()
