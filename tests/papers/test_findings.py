"""The findings: every number comes from the results, and no sentence outlives the verdicts that it rests on.

That the committed page is what the committed results give is for `make golden` to say.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from made_up_results import judgements, made_up, noise

from nearsight.errors import InputError
from nearsight.files import ABLATED
from nearsight.papers import find_study
from nearsight.papers.findings import FINDINGS, profiles_of_datasets
from nearsight.report.ablated import changed
from nearsight.report.findings import ANY, Findings, Section
from nearsight.report.studies import PROBES, report_of
from nearsight.study import Cell, Study, StudyResults

ROOT = Path(__file__).parents[2]


def respond(cell: Cell) -> dict[str, float]:
    local = "CutMix" in cell.condition or cell.condition == "Modern"
    mad = 0.2 if local else 0.33
    return {"min_mad": mad + noise(cell, 0.01), "early_mad": mad + 0.05, "test_acc": 0.5 + 0.1 * local}


def commit(study: Study, folder: Path, *, scale: str = "full") -> None:
    """What is kept of a study: tables and a description."""
    made_up(study, respond, scale=scale).write_tables(folder / study.name)
    (folder / study.name / "study.json").write_text(json.dumps({**study.to_json(), "scale": scale}))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for name in ("protocol-cifar10", "protocol-cifar100"):
        commit(find_study(name)(seeds=3), folder)
    return folder


SECTION = Section(
    title="Modern is more local",
    text="On CIFAR-10 {protocol-cifar10:most-local-head}; the paper has {protocol-cifar10:accuracy:paper}. {more}",
    rests_on={"protocol-cifar10": {"most-local-head": "reproduced", "accuracy": ANY}},
    numbers=lambda found: {"more": f"{len(found)} studies."},
    figure="protocol-cifar10/figures/figure-4-minimum-mad.png",
    limits="Made up.",
)
PAGE = Findings(title="Findings", about="About.", sections=(SECTION,))


def test_a_section_says_what_the_results_say(results: Path) -> None:
    text = PAGE.markdown(results, results.parent / "docs" / "findings.md")
    study = StudyResults.read(results / "protocol-cifar10")
    found = {judgement.claim.id: judgement for judgement in judgements(study)}
    paper = found["accuracy"].claim.paper
    assert f"On CIFAR-10 {found['most-local-head'].finding.ours}; the paper has {paper}. 2 studies." in text
    about = f"([protocol-cifar10](../{results.name}/protocol-cifar10/verdict.md), 3 seeds, not known)"
    assert f"- **reproduced** {about}: {found['most-local-head'].claim.text}\n" in text
    assert f"- **{found['accuracy'].words}** {about}: {found['accuracy'].claim.text}\n" in text
    assert f'<img src="../{results.name}/protocol-cifar10/figures/figure-4-minimum-mad.png"' in text


def test_results_that_no_section_tells_are_linked(results: Path) -> None:
    rest = PAGE.markdown(results, results / "findings.md").split("## All other results")[1]
    assert "[protocol-cifar100](protocol-cifar100/verdict.md): Of 8 claims of S1" in rest
    assert "protocol-cifar10/" not in rest


def test_a_sentence_is_refused_when_its_verdict_comes_out_otherwise(results: Path) -> None:
    for verdict in ("in direction", "contradicted"):
        wrong = dataclasses.replace(SECTION, rests_on={"protocol-cifar10": {"most-local-head": verdict}})
        page = dataclasses.replace(PAGE, sections=(wrong,))
        with pytest.raises(InputError, match=f"being '{verdict}', but it is 'reproduced': rewrite it"):
            page.markdown(results, results / "findings.md")


def test_a_claim_that_its_study_does_not_have_is_an_error(results: Path) -> None:
    wrong = dataclasses.replace(SECTION, rests_on={"protocol-cifar10": {"most-local-hed": ANY}})
    with pytest.raises(KeyError, match="has no claim 'most-local-hed'"):
        dataclasses.replace(PAGE, sections=(wrong,)).markdown(results, results / "findings.md")


def test_a_number_that_nobody_gives_is_an_error(results: Path) -> None:
    wrong = dataclasses.replace(SECTION, text="{protocol-cifar10:early-layers}")
    with pytest.raises(KeyError, match="early-layers"):
        dataclasses.replace(PAGE, sections=(wrong,)).markdown(results, results / "findings.md")


def test_sections_whose_studies_have_no_results_are_left_out(results: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(SECTION, title="More", rests_on={"mixing-cifar100": {}})
    text = dataclasses.replace(PAGE, sections=(other, SECTION)).markdown(results, results / "findings.md")
    assert "## 1. Modern is more local" in text
    assert "More" not in re.findall(r"^## .*$", text, re.MULTILINE)
    with pytest.raises(InputError, match="has no results that the page is about"):
        PAGE.markdown(tmp_path, tmp_path / "findings.md")


def test_small_scale_is_no_finding(tmp_path: Path) -> None:
    commit(find_study("protocol-cifar10")(seeds=3), tmp_path, scale="small")
    with pytest.raises(InputError, match="has no results that the page is about"):
        PAGE.markdown(tmp_path, tmp_path / "findings.md")


def test_a_table_has_the_papers_numbers_and_ours(results: Path) -> None:
    told = dataclasses.replace(SECTION, as_table=True, figure=None, limits="")
    asked = Section(title="Asked", text="What is open.", rests_on={})
    page = dataclasses.replace(PAGE, sections=(told, asked), with_others=False)
    text = page.markdown(results, results.parent / "docs" / "findings.md")
    found = {each.claim.id: each for each in judgements(StudyResults.read(results / "protocol-cifar10"))}
    for id in told.rests_on["protocol-cifar10"]:
        claim, ours = found[id].claim, found[id].finding.ours.split("; strict reading")[0]
        verdict = f"[**{found[id].words}**](../{results.name}/protocol-cifar10/verdict.md)"
        assert f"| {claim.text} | not known | {claim.paper} | {ours} | 3 | {verdict} |\n" in text
    assert text.endswith("## 2. Asked\n\nWhat is open.\n")
    assert "<img" not in text
    with pytest.raises(InputError, match="has no results that the page is about"):
        dataclasses.replace(page, sections=(asked,)).markdown(results, results / "findings.md")


def test_a_figure_that_no_study_has_alone_is_written_with_the_page(results: Path, tmp_path: Path) -> None:
    section = dataclasses.replace(SECTION, figure=("findings-datasets", profiles_of_datasets))
    page, file = dataclasses.replace(PAGE, sections=(section,)), tmp_path / "docs" / "findings.md"
    written = page.write(results, file)
    assert file.read_text(encoding="utf-8") == page.markdown(results, file)
    assert {path.name for path in written} == {"findings.md", "findings-datasets.png", "findings-datasets.svg"}
    assert '<img src="images/findings-datasets.png"' in file.read_text(encoding="utf-8")


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


def _asked_by(folder: Path) -> str:
    """The name under which the questions about a folder of results are declared."""
    if (folder / ABLATED).exists():
        return changed(json.loads((folder / ABLATED).read_text())["name"])
    return PROBES if (folder / "probes.json").exists() else folder.name


def test_there_are_eight_findings_with_claims_and_figures_that_exist() -> None:
    assert len(FINDINGS.sections) == 8
    for section in FINDINGS.sections:
        for folder, expected in section.rests_on.items():
            claims = report_of(_asked_by(ROOT / "results" / folder)).claims
            if not callable(claims):
                assert set(expected) <= {claim.id for claim in claims}
        if isinstance(section.figure, str):
            assert (ROOT / "results" / section.figure).exists()


def test_the_page_is_short() -> None:
    """Two screens of text: what is longer belongs behind a link."""
    told = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8").split("## All other results")[0]
    sentences = [line for line in told.splitlines() if line and not line.startswith(("<img", "- ", "*["))]
    assert len(" ".join(sentences).split()) < 1000
