"""The README's examples run as they stand there."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
TOLD = re.sub(r"\s+", " ", TEXT)  # lines may break anywhere
PAGES = [*README.parent.glob("*.md"), *(README.parent / "docs").glob("*.md")]
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) >= 2
    names: dict[str, object] = {}
    for example in EXAMPLES:
        offline = example.replace("pretrained=True", "pretrained=False").replace("vit_base", "vit_small")
        exec(offline, names)
    assert "blocks.11.attn" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, section = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not section or section in sections(path), target


def sections(page: Path) -> set[str]:
    """The names of a page's headings in an address."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_both_commands_are_shown_and_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in TEXT
        assert f"\n{command}: " in makefile


def test_the_cost_of_measuring_is_what_was_measured() -> None:
    rows = json.loads((README.parent / "results/bench-measure/h200.json").read_text())["rows"]
    for row in rows:
        slower, maps = row["ratio"], row["maps_ms"] / row["forward_ms"]
        extra, extra_of_maps = row["extra_bytes"] / 1e6, row["maps_extra_bytes"] / 1e6
        line = f"| {row['num_tokens']:,} | {slower:.2f} × | {maps:.2f} × | {extra:.1f} of {extra_of_maps:,.0f} MB |"
        assert line in TEXT


def test_the_speed_of_training_is_what_was_measured() -> None:
    ordinary, *ours = json.loads((README.parent / "results/bench-train/h200.json").read_text())["rows"]
    assert f"16 DataLoader workers | {round(ordinary['images_per_second'], -2):,.0f} | 1 × |" in TEXT
    shown = {1: "one model", 8: "8 models", 24: "24 models"}
    for row in ours:
        line = f"| {shown.get(row['num_cells'])} | {round(row['images_per_second'], -2):,.0f} | {row['ratio']:.0f} × |"
        assert line in TEXT or row["num_cells"] not in shown


def test_the_cost_of_locat_is_what_was_measured() -> None:
    rows = (README.parent / "results/bench-gaug/h200.txt").read_text().splitlines()
    ratios = {(words[0], words[1], words[3]): float(words[6]) for words in map(str.split, rows[2:])}
    assert f"takes {ratios['vit_base_patch16_224', '197', 'nearsight']:.2f} times the plain one" in TOLD
    assert f"1,025 tokens {ratios['attention', '1025', 'nearsight']:.2f} times" in TOLD
    assert f"takes {ratios['attention', '1025', 'dense']:.0f} times" in TOLD


def test_the_protocol_study_is_what_its_results_say() -> None:
    """The numbers of the table are those of the results, and the effect in the words below it."""
    results = README.parent / "results" / "ablation-fitted-cifar100" / "tables"
    others = pd.read_csv(results / "own-patch.csv").set_index("condition")
    conditions = pd.read_csv(results / "conditions.csv")
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) ± ([\d.]+) \| ([\d.]+) \| ([\d.]+) ± ([\d.]+) \| ([\d.]+) \| ([\d.]+) ± ([\d.]+) \|$",
        TEXT,
        re.MULTILINE,
    )
    assert len(rows) == len(conditions) == 8
    told = {tuple(map(float, row[1:])) for row in rows}
    for condition in conditions.itertuples():
        half, near_half = (
            (getattr(condition, f"{name}_high") - getattr(condition, f"{name}_low")) / 2
            for name in ("test_acc", "min_mad")
        )
        accuracies = (100 * condition.test_acc_mean, 100 * half, 100 * condition.paper_test_acc)
        distances = (condition.min_mad_mean, near_half, condition.paper_min_mad)
        beyond = others.loc[condition.condition]
        distances += (beyond["min_mad_of_others"], (beyond["high"] - beyond["low"]) / 2)
        expected = (*(round(x, 1) for x in accuracies), *(round(x, 3) for x in distances))
        assert expected in told, condition.condition
    effects = pd.read_csv(results / "effects.csv")
    (cutmix,) = effects[(effects["term"] == "cutmix") & (effects["response"] == "min_mad")].itertuples()
    assert f"by {-cutmix.effect:.3f} ± {(cutmix.high - cutmix.low) / 2:.3f} (p = 0.0005, exact)" in TEXT
    separation = pd.read_csv(results / "separation.csv")
    of_cutmix = separation[(separation["factor"] == "cutmix") & (separation["response"] == "min_mad")]
    (parted,) = of_cutmix[of_cutmix["blocks"] == "seed autoaugment smoothing"].itertuples()
    assert parted.exact
    assert f"{parted.p:.4f}" == "0.0005"
    assert f"below {parted.highest_with:.3f}, all without at or above {parted.lowest_without:.3f}" in TOLD
    assert f"in {others['runs_with_own_patch'].sum()} of {parted.num_with} runs" in TOLD
    verdicts = pd.read_csv(results / "verdict.csv").set_index("claim")
    (still,) = verdicts[verdicts.index.str.contains("is Modern's most local head still")].itertuples()
    assert f"by {-still.value:.3f} ± {(still.high - still.low) / 2:.3f}" in TOLD
    runs = pd.read_csv(results.parent / "runs.csv")
    assert f"spend {100 * runs.loc[runs['min_mad'] < 0.05, 'max_share_self'].min():.0f} % of their attention" in TOLD


def test_what_is_told_of_other_studies_is_what_their_results_say() -> None:
    def judged(study: str, claim: str) -> pd.Series:
        verdicts = pd.read_csv(README.parent / "results" / study / "tables" / "verdict.csv")
        (row,) = (row for _, row in verdicts.iterrows() if row["claim"].startswith(claim))
        return row

    margin = judged("ablation-tiny-imagenet", "CutMix separates the conditions")
    assert f"CutMix separates the runs by {margin['value']:.3f}" in TOLD
    assert judged("ablation-cifar10", "CutMix separates the conditions")["value"] < 0
    fitted = "emergence-fitted-cifar100"
    assert judged(fitted, "Do local heads appear")["ours"] == "4 of 4 runs with CutMix, 0 of 4 without"
    epochs = judged(fitted, "When does the first local head")["verdict"].removeprefix("epoch ").split(",")[0]
    assert f"the first at epoch {epochs}, and none turns back" in TOLD
    assert judged(fitted, "Does a local head ever")["verdict"] == "no"
    nearer = judged(fitted, "After equally many epochs")
    assert f"by {-nearer['value']:.3f} ± {(nearer['high'] - nearer['low']) / 2:.3f}" in TOLD
