"""Make plan.json for results that are older than such files, from the history of the repository.

    python tests/plans_from_history.py [STUDY …]

A question is *planned* if it stood in the sources strictly before the commit with which the study's runs first lay
under results/, and already in the code that made these runs, as every version of their provenance.json names it. If
only code with uncommitted changes lacks it, or code that nobody knows, that is *not known*. Otherwise it was asked
*afterwards*.

Questions were reworded, and their files were moved. So each is followed back in two steps:

1. The words that it had with the first results. The rows of the study's verdict.csv are compared from commit to commit:
   a row that changed between rows that stayed was reworded; one that is new there was asked of this study only then.
2. The first commit whose sources hold these words, wherever: as a string, or as strings with gaps (f-strings, format)
   that fit into each other and make up most of its letters; names in gaps may come from elsewhere.

`EARLIER` and `NEEDS` are what no string shows. What was found is printed, to be read before it is committed.
"""

import argparse
import ast
import csv
import functools
import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from golden import BRIDGE, RESULTS, ROOT, reports
from nearsight.files import ABLATED, write_json
from nearsight.papers.structure.learned_positions import bridge_questions
from nearsight.report.claims import Claim
from nearsight.report.probes import ProbeResults
from nearsight.report.studies import PROBES, as_planned, report_of
from nearsight.study import SimulationResults, StudyResults, is_simulation
from nearsight.study.plan import AFTERWARDS, NAME, NOT_KNOWN, PLANNED, SCHEMA, Entry, Plan, hash_of

EARLIER = {
    # Before they were questions of a report of their own, the table of position association answered them.
    "raise the association of learned positions": "Does CutMix, or Modern, raise association?",
    "whose positions are more associated have a more local": "Do runs with more association have a more local head?",
}
"""Words of a question → those that stood for it earlier."""
NEEDS = {
    # These questions are put together of a template, which is older, and of who is asked after.
    ("locat-cutmix-cifar100", "LocAt"): "LOCAT = (GAUG, PRR)",
}
"""Study and word → a line without which the code did not ask its questions with this word."""
SOURCE = "history of the repository"
_ENOUGH = 0.6
"""Of the letters of a question."""
_SHORTEST = 10
"""Letters of a string that is looked for."""
_GAP = "\0"

Commits = int
"""A set of them, by a bit for each."""


def git(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=check, capture_output=True, text=True).stdout


class History:
    """All commits from the first to the last, and the strings of their sources."""

    def __init__(self) -> None:
        lines = [
            line.split() for line in git("rev-list", "--topo-order", "--reverse", "--parents", "HEAD").splitlines()
        ]
        self.commits = [commit for commit, *_ in lines]
        self.place = {commit: place for place, commit in enumerate(self.commits)}
        self.before: list[Commits] = []  # of each commit, itself included
        for place, (_, *parents) in enumerate(lines):
            self.before.append(
                functools.reduce(int.__or__, (self.before[self.place[one]] for one in parents), 1 << place)
            )
        self.sources: dict[str, Commits] = {}
        for place, commit in enumerate(self.commits):
            for line in git("ls-tree", "-r", commit, "--", "src").splitlines():
                if line.endswith(".py"):
                    blob = line.split()[2]
                    self.sources[blob] = self.sources.get(blob, 0) | 1 << place
        self.texts = dict(zip(self.sources, _contents(self.sources), strict=True))
        self.strings: dict[str, Commits] = {}
        for blob, text in self.texts.items():
            for string in _strings(text):
                self.strings[string] = self.strings.get(string, 0) | self.sources[blob]

    def with_line(self, line: str) -> Commits:
        """Those in whose sources it stands."""
        return _all(commits for blob, commits in self.sources.items() if line in self.texts[blob])

    @functools.cache  # noqa: B019
    def asking(self, text: str) -> Commits:
        """Those whose sources hold most letters of a question."""
        found = _all(commits for letters, commits in self._parts(text) if letters >= _ENOUGH * len(text))
        for words, earlier in EARLIER.items():
            if words in text:
                found |= _all(commits for string, commits in self.strings.items() if earlier in string)
        return found

    def _parts(self, text: str) -> Iterator[tuple[int, Commits]]:
        """How many letters of a text are in strings that fit, and in which commits."""
        for string, commits in self.strings.items():
            fillings = _fillings(string, text)
            if fillings is not None:
                ways = [(len(string.replace(_GAP, "")), commits)]
                for filling in fillings:
                    inner = [*self._parts(filling)] if len(filling) >= _SHORTEST else []
                    ways = [(n + m, a & b) for n, a in ways for m, b in [(0, a), *inner] if a & b]
                yield from ways

    def first(self, commits: Commits) -> str | None:
        return self.commits[(commits & -commits).bit_length() - 1] if commits else None

    def stood_in(self, asked: str, code: str) -> bool | None:
        """Whether what was first asked with a commit stood in the code of another; None: nobody can know."""
        commit = git(
            "rev-parse", "--verify", "--quiet", code.removesuffix("+changes") + "^{commit}", check=False
        ).strip()
        if commit in self.place and self.is_at_or_before(asked, commit):
            return True
        return None if code.endswith("+changes") or commit not in self.place else False

    def is_at_or_before(self, first: str, second: str) -> bool:
        return bool(self.before[self.place[second]] >> self.place[first] & 1)


def _all(sets: Iterable[Commits]) -> Commits:
    return functools.reduce(int.__or__, sets, 0)


def _contents(blobs: Iterable[str]) -> Iterator[str]:
    command = ["git", "cat-file", "--batch"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for blob in blobs:
            process.stdin.write(f"{blob}\n".encode())
            process.stdin.flush()
            size = int(process.stdout.readline().split()[2])
            yield process.stdout.read(size + 1).decode()
        process.stdin.close()


def _strings(source: str) -> set[str]:
    """The strings of a file, with gaps where something is put in."""
    found, parts = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            constants = [part for part in node.values if isinstance(part, ast.Constant)]
            parts |= {id(part) for part in constants}
            found.add("".join(str(part.value) if part in constants else _GAP for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.add(re.sub(r"\{[^{}]*\}", _GAP, node.value))
    return {string for string in found if len(string.replace(_GAP, "")) >= _SHORTEST and " " in string}


def _fillings(string: str, text: str) -> tuple[str, ...] | None:
    """What is to be put into a string's gaps to make the text; None if nothing does."""
    parts = string.split(_GAP)
    if not all(part in text for part in parts):
        return None
    match = re.fullmatch("(.+?)".join(map(re.escape, parts)), text, re.DOTALL)
    return None if match is None else match.groups()


@dataclass(frozen=True)
class Row:
    """A question as it stood with the first results that answered it."""

    text: str
    commit: str
    is_first: bool
    """Whether these were the first results of the study."""


def first_rows(texts: list[str], verdict: Path) -> list[Row]:
    """Each question of today, followed back through the versions of its verdict.csv."""
    commits = git("log", "--topo-order", "--format=%H", "--", str(verdict.relative_to(ROOT))).split()
    rows: list[Row | None] = [None] * len(texts)
    places = {number: number for number in range(len(texts))}
    """Row of today → that of the version that was read last."""
    newer = texts
    for number, commit in enumerate(commits):
        table = io.StringIO(git("show", f"{commit}:{verdict.relative_to(ROOT)}"))
        older = [row["claim"] for row in csv.DictReader(table)]
        same = _same_rows(older, newer)
        places = {row: same[place] for row, place in places.items() if place in same}
        for row, place in places.items():
            rows[row] = Row(older[place], commit, is_first=number == len(commits) - 1)
        newer = older
    return [row or Row(text, "", is_first=False) for row, text in zip(rows, texts, strict=True)]


def _same_rows(older: list[str], newer: list[str]) -> dict[int, int]:
    """Row of the newer version → that of the older one, reworded or not."""
    same = {}
    for kind, begin, end, new_begin, new_end in SequenceMatcher(None, older, newer, autojunk=False).get_opcodes():
        # One that became several is none of them: each asks something else.
        if kind in ("equal", "replace") and end - begin == new_end - new_begin:
            same |= dict(zip(range(new_begin, new_end), range(begin, end), strict=True))
    return same


@dataclass(frozen=True)
class Committed:
    """A folder of results, and what is asked of it."""

    folder: Path
    claims: list[Claim]
    conditions: list[str]
    seeds: list[int]
    table: str = "runs.csv"

    @classmethod
    def read(cls, folder: Path) -> "Committed":
        if folder == BRIDGE:
            study = StudyResults.read(RESULTS / json.loads((BRIDGE / "provenance.json").read_text())["study"])
            return cls(folder, list(bridge_questions(study)), list(study.planned), list(study.seeds))
        if (folder / "probes.json").exists():
            probes = ProbeResults.read(folder)
            models = probes.as_study()
            seeds = [int(seed) for seed in dict.fromkeys(models.runs["seed"])]
            claims = list(report_of(PROBES).claims_of(probes))
            return cls(folder, claims, list(models.planned), seeds, "probes.csv")
        if is_simulation(folder):
            simulation = SimulationResults.read(folder)
            seeds = list(dict.fromkeys(cell.seed for cell in simulation.cells))
            return cls(folder, list(report_of(simulation.name).claims), list(simulation.configs), seeds)
        results = StudyResults.read(folder)
        return cls(folder, list(report_of(results.name).claims), list(results.planned), list(results.seeds))

    def first_table(self) -> tuple[str, int]:
        """The commit with which its runs were first there, and how many."""
        path = (self.folder / self.table).relative_to(ROOT)
        commit = git("log", "--topo-order", "--reverse", "--diff-filter=A", "--format=%H", "--", str(path)).split()[0]
        return commit, len(git("show", f"{commit}:{path}").splitlines()) - 1

    def code(self) -> list[str]:
        """The commits of the code that made its runs, of all versions of them."""
        path, found = (self.folder / "provenance.json").relative_to(ROOT), dict[str, None]()
        for commit in git("log", "--format=%H", "--", str(path)).split():
            stated = json.loads(git("show", f"{commit}:{path}")).get("commit") or []
            found |= dict.fromkeys([stated] if isinstance(stated, str) else stated)
        return list(found)


def plan_of(committed: Committed, history: History) -> list[Entry]:
    """What was planned of some results, what was asked afterwards, and what is not known."""
    results, num_runs = committed.first_table()
    code = committed.code()
    claims: dict[str, list[dict[str, Any]]] = {PLANNED: [], NOT_KNOWN: [], AFTERWARDS: []}
    rows = first_rows([claim.text for claim in committed.claims], committed.folder / "tables" / "verdict.csv")
    for claim, row in zip(as_planned(committed.claims), rows, strict=True):
        asking = history.asking(row.text)
        for (study, word), line in NEEDS.items():
            if study == committed.folder.name and word in row.text:
                asking &= history.with_line(line)
        asked = history.first(asking)
        mark = AFTERWARDS
        if asked and asked != results and history.is_at_or_before(asked, results):
            stood = {history.stood_in(asked, one) for one in code} or {None}
            mark = AFTERWARDS if False in stood else NOT_KNOWN if None in stood else PLANNED
            if not row.is_first:  # it was asked of others, and of this study only with later results
                asked, mark = row.commit or None, AFTERWARDS
        claims[mark].append({**claim, "asked": _described(asked), "results": _described(results)})
    finished = {PLANNED: 0, NOT_KNOWN: None, AFTERWARDS: num_runs}
    found = {mark: some for mark, some in claims.items() if some or (mark == PLANNED and not claims[NOT_KNOWN])}
    return [_entry(committed, some, finished[mark], results, code) for mark, some in found.items()]


def _described(commit: str | None) -> dict[str, str] | None:
    return {"commit": commit, "date": _date(commit)} if commit else None


def _date(commit: str) -> str:
    return git("show", "--no-patch", "--format=%cI", commit).strip()


def _entry(
    committed: Committed, claims: list[dict[str, Any]], finished: int | None, results: str, code: list[str]
) -> Entry:
    dates = [claim["asked"]["date"] for claim in claims if claim["asked"]]
    return {
        "from": SOURCE,
        "time": max([*dates, _date(results)]) if finished else min([max(dates, default="9"), _date(results)]),
        "finished": finished,
        "conditions": committed.conditions,
        "seeds": committed.seeds,
        "code": code,
        "hash": hash_of(claims),
        "claims": claims,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of studies; all by default")
    names = parser.parse_args().names
    history = History()
    for folder in reports():
        if (folder / ABLATED).exists():  # the code that asks may be newer than what was asked
            continue
        if names and folder.name not in names:
            continue
        held = Plan.read(folder)
        if held and any(entry.get("from") != SOURCE for entry in held.entries):
            print(f"{folder.relative_to(RESULTS)}: has a plan of its own")
            continue
        committed = Committed.read(folder)
        plan = Plan(tuple(plan_of(committed, history)))
        marks = Counter(plan.mark(claim.id, claim.rule) for claim in committed.claims)
        print(f"{folder.relative_to(RESULTS)}: {', '.join(f'{count} {mark}' for mark, count in marks.items())}")
        for entry in plan.entries:
            for claim in entry["claims"]:
                asked = claim["asked"]["commit"][:7] if claim["asked"] else "not committed"
                print(f"  {plan.mark(claim['id'], claim['rule']):<10} {asked} {claim['id']}: {claim['text']}")
        write_json(folder / NAME, {"schema": SCHEMA, "plans": list(plan.entries)})


if __name__ == "__main__":
    main()
