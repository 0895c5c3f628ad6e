"""Verdicts say which answers were planned; the plans of the committed results follow from the repository's history."""

import csv
import io
import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from made_up_results import made_up

import golden
import plans_from_history
from nearsight.cli import main
from nearsight.files import ABLATED
from nearsight.papers import find_study_or_simulation
from nearsight.papers.protocol import mixing
from nearsight.report.ablated import changed
from nearsight.report.claims import Claim, not_tested
from nearsight.report.studies import PROBES, as_planned, marks_of, report_of
from nearsight.report.writing import study_verdicts
from nearsight.study.plan import AFTERWARDS, MARKS, NOT_KNOWN, PLANNED, Plan, entry_problem, hash_of, write_plan
from plans_from_history import Committed, History, _fillings, _same_rows, _strings, plan_of

WITHOUT_CLAIMS = [folder for folder in golden.reports() if (folder / "atlas.csv").exists()]
ABLATIONS = [folder for folder in golden.reports() if (folder / ABLATED).exists()]
PLANNED_ALONE = [
    path.parent for path in sorted(golden.RESULTS.glob("*/plan.json")) if len(list(path.parent.iterdir())) == 1
]
FOLDERS = {
    str(folder.relative_to(golden.RESULTS)): folder
    for folder in golden.reports()
    if folder not in ABLATIONS + WITHOUT_CLAIMS
}


def plan_with(*claims: Claim, finished: int = 0) -> Plan:
    told = as_planned(claims)
    about = {"time": "2026-01-01T00:00:00+00:00", "finished": finished, "conditions": [], "seeds": []}
    return Plan(({**about, "hash": hash_of(told), "claims": told},))


# Verdicts


def test_a_verdict_says_what_was_planned() -> None:
    claims = report_of("mixing-cifar100").claims
    results = made_up(mixing.mixing_cifar100(), lambda cell: {})
    for plan, marks in (
        (None, [NOT_KNOWN] * 12),
        (plan_with(*claims), [PLANNED] * 12),
        (plan_with(*claims[:3]), [PLANNED] * 3 + [AFTERWARDS] * 9),
    ):
        verdicts = study_verdicts(replace(results, plan=plan))
        assert verdicts is not None
        table = verdicts.table()
        assert table.numbers["asked"].tolist() == table.shown["asked"].tolist() == marks
        assert MARKS in verdicts.markdown()


def test_what_is_planned_is_all_that_decides() -> None:
    told = report_of("ablation-cifar100").plan()
    assert [each["id"] for each in told] == [claim.id for claim in report_of("ablation-cifar100").claims]
    assert all(set(each) == {"id", "text", "paper", "rule", "readings"} for each in told)
    assert any(each["readings"] for each in told)
    json.dumps(told, allow_nan=False)


def test_the_claims_of_probes_are_known_before_there_are_any() -> None:
    declared = {claim.id for claim in report_of(PROBES).claims}
    for name in ("dense/dino", "dense/supervised"):
        assert {claim.id for claim in Committed.read(FOLDERS[name]).claims} < declared


def test_no_source_says_by_hand_that_a_question_was_asked_afterwards() -> None:
    sources = [claim.source for folder in FOLDERS.values() for claim in Committed.read(folder).claims]
    assert not [source for source in sources if "asked after" in source]


def test_a_study_that_is_run_by_the_command_is_planned(tmp_path: Path) -> None:
    out = tmp_path / "association"
    assert main(["study", "run", "association", "--scale", "small", "--out", str(out)]) == 0
    plan = Plan.read(out)
    assert plan is not None
    assert [(entry["finished"], entry["claims"]) for entry in plan.entries] == [(0, report_of("association").plan())]
    assert set(pd.read_csv(out / "tables" / "verdict.csv")["asked"]) == {PLANNED}


# The committed results


@pytest.mark.parametrize("name", FOLDERS)
def test_every_committed_answer_has_its_mark(name: str) -> None:
    """A rule or an id that is changed later needs `python tests/plans_from_history.py`, or a run of its own."""
    committed = Committed.read(FOLDERS[name])
    plan = Plan.read(committed.folder)
    assert plan is not None
    told = {(claim["id"], claim["rule"]) for entry in plan.entries for claim in entry["claims"]}
    assert {(claim.id, claim.rule) for claim in committed.claims} == told
    rows = pd.read_csv(committed.folder / "tables" / "verdict.csv")
    assert rows["asked"].tolist() == list(marks_of(plan, committed.claims).values())


@pytest.mark.parametrize("folder", PLANNED_ALONE, ids=lambda folder: folder.name)
def test_a_plan_without_runs_asks_what_its_study_asks_now(folder: Path) -> None:
    """Another id, rule or condition needs another entry, before the first run."""
    plan, study = Plan.read(folder), find_study_or_simulation(folder.name)()
    assert plan is not None
    entry = plan.entries[-1]
    assert entry["claims"] == report_of(folder.name).plan()
    assert entry["conditions"] == list(dict.fromkeys(cell.condition for cell in study.cells))
    assert entry["seeds"] == list(study.seed_list)


@pytest.mark.parametrize("folder", ABLATIONS, ids=lambda folder: folder.name)
def test_answers_about_changed_heads_are_marked_by_their_plan_alone(folder: Path) -> None:
    """The history does not say what was asked before: the code that asks may be newer than the weights."""
    claims = report_of(changed(json.loads((folder / ABLATED).read_text())["name"])).claims
    rows = pd.read_csv(folder / "tables" / "verdict.csv")
    assert rows["asked"].tolist() == list(marks_of(Plan.read(folder), claims).values())


def test_the_marks_are_those_of_the_history() -> None:
    """As an audit of the history found them."""

    def marks(name: str) -> dict[str, str]:
        return marks_of(Plan.read(FOLDERS[name]), Committed.read(FOLDERS[name]).claims)

    assert Counter(marks("mixing-long-cifar100").values()) == {PLANNED: 8}
    for name in ("ablation-cifar100", "ablation-fitted-cifar100"):
        late = [id for id, mark in marks(name).items() if mark == AFTERWARDS]
        assert late == [
            *("colour-and-cutmix", "smoothing-and-cutmix", "longer-with-cutmix", "longer-without-cutmix"),
            *("own-patch-heads", "others-separated", "others-more-local", "own-patch-with-both"),
        ]
    for name in ("emergence-cifar100", "emergence-fitted-cifar100"):
        assert marks(name)["equally-many-epochs"] == AFTERWARDS
    of_locat = {id: mark for id, mark in marks("locat-cutmix-cifar100").items() if "PRR" in id}
    assert set(of_locat.values()) == {AFTERWARDS}
    assert len(of_locat) == 8 + 4  # effects, and interactions


def test_findings_say_what_was_planned() -> None:
    page = (golden.ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    claim = "AutoAugment does not change what CutMix does to locality"
    (row,) = (line for line in page.splitlines() if line.endswith(claim))
    assert f"3 seeds, {AFTERWARDS})" in row


# From history


def test_rows_are_followed_where_they_were_reworded() -> None:
    older = ["is it near?", "is it far?", "is it so?"]
    assert _same_rows(older, ["is it local?", "is it far?", "is it so?", "is it new?"]) == {0: 0, 1: 1, 2: 2}
    assert _same_rows(older, ["is it new?", *older]) == {1: 0, 2: 1, 3: 2}
    # What became several asks something else.
    assert _same_rows(older, ["is it so or so?", "is it both?"]) == {}


def test_strings_with_gaps_are_filled() -> None:
    source = 'a = f"does {factor} still" " raise it?"\nb = "does {} still lower it?".format(a)\nc = "short"\n'
    assert _strings(source) == {"does \0 still raise it?", "does \0 still lower it?"}
    assert _fillings("does \0 still raise it?", "does CutMix still raise it?") == ("CutMix",)
    assert _fillings("does \0 still raise it?", "does CutMix still lower it?") is None
    assert _fillings("does it?", "does it?") == ()


class Repository:
    """A small one, whose commits are made by hand."""

    def __init__(self, root: Path) -> None:
        self.root, self.day = root, 0  # of January
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        told = {"GIT_COMMITTER_DATE": f"2026-01-{self.day:02}T00:00:00Z", "GIT_CONFIG_GLOBAL": os.devnull}
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *who, *arguments]
        return subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True, env={**os.environ, **told}
        ).stdout

    def commit(self, files: dict[str, str]) -> str:
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        self.day += 1
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", f"day {self.day}")
        return self.git("rev-parse", "HEAD").strip()


def verdict(*texts: str) -> str:
    table = io.StringIO()
    csv.writer(table).writerows([["claim"], *([text] for text in texts)])
    return table.getvalue()


NEAR, NEAR_NOW = "Is the head of it nearer?", "Is the head more local?"
FAR, NEW, OTHER = "Is it farther away?", "Is it a new thing?", "Asked of others?"
"""Written before the code that made the runs, and reworded later; after it; with the results; and before all, but asked
of this study only later."""


def made_history(repository: Repository, code: str) -> dict[str, str]:
    """The commits by name; `code`: by which the runs were made."""
    folder = "results/study"
    commits = {"first": repository.commit({"src/a.py": f'A = "{NEAR}"\nO = "{OTHER}"\n'})}
    commits["second"] = repository.commit({"src/b.py": f'B = "{FAR}"\n'})
    made_by = code.replace("first", commits["first"]).replace("second", commits["second"])
    commits["results"] = repository.commit(
        {
            "src/c.py": f'C = "{NEW}"\n',
            f"{folder}/runs.csv": "run\na\nb\n",
            f"{folder}/provenance.json": json.dumps({"commit": [made_by]}),
            f"{folder}/tables/verdict.csv": verdict(NEAR, FAR, NEW),
        }
    )
    commits["later"] = repository.commit({f"{folder}/tables/verdict.csv": verdict(NEAR, FAR, NEW, OTHER)})
    repository.git("mv", "src/a.py", "src/moved.py")
    reworded = {"src/moved.py": f'A = "{NEAR_NOW}"\nO = "{OTHER}"\n'}
    repository.commit({**reworded, f"{folder}/tables/verdict.csv": verdict(NEAR_NOW, FAR, NEW, OTHER)})
    return commits


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
@pytest.mark.parametrize(
    ("code", "mark"),
    [("first", AFTERWARDS), ("second", PLANNED), ("first+changes", NOT_KNOWN), ("0123456789abcdef", NOT_KNOWN)],
)
def test_what_was_planned_is_found_in_a_history(
    code: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = made_history(Repository(tmp_path), code)
    monkeypatch.setattr(plans_from_history, "ROOT", tmp_path)
    claims = [
        Claim(id=text, text=text, source="", rule="*Sign.*", judge=lambda _: not_tested(""))
        for text in (NEAR_NOW, FAR, NEW, OTHER)
    ]
    entries = plan_of(Committed(tmp_path / "results" / "study", claims, ["a"], [0]), History())
    plan = Plan(tuple(entries))
    marks = [plan.mark(claim.id, claim.rule) for claim in claims]
    assert marks == [NOT_KNOWN if code == "0123456789abcdef" else PLANNED, mark, AFTERWARDS, AFTERWARDS]
    asked = {claim["text"]: claim["asked"]["commit"] for entry in entries for claim in entry["claims"]}
    expected = {NEAR_NOW: "first", FAR: "second", NEW: "results", OTHER: "later"}
    assert asked == {text: commits[name] for text, name in expected.items()}
    every = [claim for entry in entries for claim in entry["claims"]]
    assert {claim["results"]["commit"] for claim in every} == {commits["results"]}
    assert {claim["asked"]["date"][:10] for claim in every} == {f"2026-01-0{day}" for day in (1, 2, 3, 4)}
    assert all(not entry_problem(entry) for entry in entries)
    assert entries[-1]["finished"] == 2


def test_a_plan_of_its_own_is_no_history(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [], conditions=[], seeds=[], finished=lambda: 0)
    assert all("from" not in entry for entry in plan.entries)
