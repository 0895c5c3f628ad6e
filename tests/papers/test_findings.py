"""The findings: every number comes from the results, and the page that is committed is the one they give."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from made_up_results import judgements, made_up, noise

from nearsight.errors import InputError
from nearsight.papers import find_study
from nearsight.papers.protocol import mixing, unreported
from nearsight.papers.protocol.findings import FINDINGS, profiles_of_datasets, write_findings
from nearsight.report.studies import report_of
from nearsight.study import Cell, Study

ROOT = Path(__file__).parents[2]


def respond(cell: Cell) -> dict[str, float]:
    local = "CutMix" in cell.condition or cell.condition == "Modern"
    mad = 0.2 if local else 0.33
    return {"min_mad": mad + noise(cell, 0.01), "early_mad": mad + 0.05, "test_acc": 0.5 + 0.1 * local}


def commit(study: Study, folder: Path, *, scale: str = "full") -> None:
    """What is kept of a study: tables, a description and where it ran."""
    made_up(study, respond, scale=scale).write_tables(folder / study.name)
    (folder / study.name / "study.json").write_text(json.dumps({**study.to_json(), "scale": scale}))
    told = {"images": 78.4e6, "elapsed_seconds": 600.0, "hardware": [{"device": "cuda", "gpu": "A GPU"}]}
    (folder / study.name / "provenance.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for study in (mixing.mixing_cifar100(), unreported.unreported_cifar100(), find_study("protocol-cifar10")(seeds=2)):
        commit(study, folder)
    return folder


def test_the_page_has_what_the_results_say(results: Path) -> None:
    text = FINDINGS.markdown(results, results.parent / "docs" / "findings.md")
    studies = FINDINGS.read_studies(results)
    assert set(studies) == {"mixing-cifar100", "unreported-cifar100", "protocol-cifar10"}
    for name in ("mixing-cifar100", "unreported-cifar100"):
        for judgement in judgements(studies[name]):
            answer = f"{judgement.finding.ours} | **{judgement.finding.verdict}** |"
            assert f"| {judgement.claim.text} | not known | {answer}" in text
    assert "The Modern protocol raises test accuracy | not known | 78.46 to 84.84 %: +6.38 points |" in text
    assert "26 runs, 2 seeds per condition, 78 M images in 10 minutes on A GPU" in text
    assert f"(../{results.name}/mixing-cifar100/figures/mixing-contrasts.png)" in text
    assert "What changes the smallest distance" in text


def test_the_page_says_which_runs_are_of_other_studies(tmp_path: Path) -> None:
    commit(mixing.mixing_cifar100(), tmp_path)
    path = tmp_path / "mixing-cifar100" / "provenance.json"
    told = {**json.loads(path.read_text()), "taken_from": {"ablation-cifar100": 6}}
    path.write_text(json.dumps(told))
    some = "26 runs, 2 seeds per condition, 6 of them from ablation-cifar100, 78 M images in 10 minutes on A GPU.*"
    assert some in FINDINGS.markdown(tmp_path, tmp_path / "findings.md")
    path.write_text(json.dumps({**told, "taken_from": {"ablation-cifar100": 26}, "images": 0, "elapsed_seconds": 0.0}))
    assert "26 of them from ablation-cifar100.*" in FINDINGS.markdown(tmp_path, tmp_path / "findings.md")


def test_a_summary_leads_to_each_question(results: Path) -> None:
    text = FINDINGS.markdown(results, results / "findings.md")
    summary = text.split("## In short")[1].split("\n## ")[0]
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")][1:]
    links = re.findall(r"\| \[(.*?)\]\(#(.*?)\) \|", summary)
    assert links == [(heading[3:], slug(heading)) for heading in headings]
    studies = FINDINGS.read_studies(results)
    for judgement in judgements(studies["mixing-cifar100"]):
        decides = judgement.claim.text.startswith(
            ("Is it the cut", "Is it the other", "Is it the label:", "Is it the mix")
        )
        answer = f"{judgement.finding.ours} | **{judgement.finding.verdict}** |"
        row = f"{judgement.claim.text} | not known | mixing-cifar100 | {answer}"
        assert (row in summary) == decides


def slug(heading: str) -> str:
    """As GitHub makes it: lower case, words and hyphens kept, spaces become hyphens."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_").replace(" ", "-")


def test_studies_without_results_are_left_out(results: Path) -> None:
    text = FINDINGS.markdown(results, results / "findings.md")
    assert text.count("\n## ") == 3 + 1  # and the summary
    assert "emergence" not in text
    assert "not run" not in text
    assert "size-cifar100" not in text
    for number in (1, 2, 3):
        assert f"## {number}. " in text
    assert text.count("**What would change our mind.**") == 3


def test_one_data_set_is_no_answer_about_others(tmp_path: Path) -> None:
    commit(find_study("protocol-cifar100")(seeds=2), tmp_path)
    commit(mixing.mixing_cifar100(), tmp_path)
    assert "On other data sets?" not in FINDINGS.markdown(tmp_path, tmp_path / "findings.md")
    commit(find_study("protocol-cifar10")(seeds=2), tmp_path)
    assert "On other data sets?" in FINDINGS.markdown(tmp_path, tmp_path / "findings.md")


def test_small_scale_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no results of ablation-cifar100"):
        FINDINGS.markdown(tmp_path, tmp_path / "findings.md")
    commit(find_study("protocol-cifar10")(seeds=1), tmp_path, scale="small")
    with pytest.raises(InputError, match="run one of them first"):
        FINDINGS.read_studies(tmp_path)


def test_page_and_figure_are_written_together(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "findings.md"
    written = write_findings(results, page)
    assert page.read_text(encoding="utf-8") == FINDINGS.markdown(results, page)
    assert {path.name for path in written} == {"findings.md", "findings-datasets.png", "findings-datasets.svg"}
    assert "![On other data sets?](images/findings-datasets.png)" in page.read_text(encoding="utf-8")


def test_a_panel_per_data_set() -> None:
    names = ("protocol-cifar100", "ablation-cifar10", "protocol-cifar10", "mixing-cifar100")
    studies = {name: made_up(find_study(name)(seeds=2), respond) for name in names}
    drawing = profiles_of_datasets(studies)
    assert [axes.get_title(loc="left") for axes in drawing.figure.axes] == ["CIFAR-10", "CIFAR-100"]
    assert "CIFAR-10, CIFAR-100" in drawing.caption
    # The ablation stands in where a data set has no other study, and not where it has.
    alone = profiles_of_datasets({"ablation-cifar10": studies["ablation-cifar10"]})
    assert len(alone.figure.axes) == 1
    with pytest.raises(InputError, match="no data set has a run of both protocols"):
        profiles_of_datasets({"mixing-cifar100": studies["mixing-cifar100"]})


def test_sections_ask_for_claims_and_figures_that_exist() -> None:
    """What a section shows is found by its id, so that no changed word makes a claim vanish from the page."""
    for section in FINDINGS.sections:
        ids = {name: {claim.id for claim in report_of(name).claims} for name in section.answers}
        assert all(set(chosen) <= ids[name] for name, chosen in section.answers.items())
        assert set(section.in_short) <= {id for name, chosen in section.answers.items() for id in chosen or ids[name]}
        for study, name in section.figures:
            parts = report_of(study)
            stem, kind = name.rsplit(".", 1)
            assert stem in (parts.figures if kind == "png" else parts.animations) or stem.startswith("figure-4")


@pytest.mark.skipif(not (ROOT / "docs" / "findings.md").exists(), reason="no results were committed yet")
def test_the_committed_page_is_what_the_committed_results_give() -> None:
    page = ROOT / "docs" / "findings.md"
    assert page.read_text(encoding="utf-8") == FINDINGS.markdown(ROOT / "results", page)


def test_a_claim_that_its_study_does_not_have_is_an_error(results: Path) -> None:
    wrong = dataclasses.replace(FINDINGS.sections[0], answers={"mixing-cifar100": ("the cutt",)})
    page = dataclasses.replace(FINDINGS, sections=(wrong,))
    with pytest.raises(KeyError, match=r"'mixing-cifar100' has no claims \['the cutt'\]"):
        page.markdown(results, results / "findings.md")
