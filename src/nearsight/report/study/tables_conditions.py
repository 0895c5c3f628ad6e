"""What each condition gave, with the paper's numbers beside (S1, Tables 1 and 2)."""

from dataclasses import asdict

import pandas as pd

from nearsight.report.study.conditions import ordered_conditions, roles
from nearsight.report.study.notes import missing_notes, seeds_in_words
from nearsight.report.study.paper import PUBLISHED, PublishedCondition
from nearsight.report.study.shares import SHARES, known_shares, share_notes
from nearsight.report.study.table import MISSING, Table, percent, rounded, span, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval, paired_difference

RESPONSES = ("test_acc", "min_mad", "max_mad", "min_entropy", "max_entropy")
INTERVALS = "± is half the 95 % interval of the mean over seeds (Student's t); with one seed there is none."


def conditions_table(results: StudyResults) -> Table:
    """A row per condition, those of the paper that have no run yet included."""
    published = PUBLISHED.get(results.name)
    papers = dict(published.conditions) if published else {}
    labels, responses = ordered_conditions(results), (*RESPONSES, *known_shares(results))
    rows, shown = [], []
    for label in [*labels, *(label for label in papers if label not in labels)]:
        runs = results.runs[results.runs["condition"] == label]
        ours = {response: mean_interval(runs[response]) for response in responses}
        rows.append(_numbers(results, label, runs, ours, papers.get(label)))
        shown.append(_shown(label, runs, ours, papers.get(label), with_paper=bool(papers)))
    notes = [
        INTERVALS,
        "MAD: smallest and largest mean attention distance over all heads of a run, then the mean over seeds; entropy "
        "likewise. Epochs: the mean number trained.",
        *share_notes(results),
    ]
    if published is not None:
        notes.append(f"The paper's numbers ({published.source}) are of one seed.")
    title = f"{results.name}: the conditions" + (f", beside {published.source}" if published else "")
    return Table(
        name="conditions",
        title=title,
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(*notes, *missing_notes(results)),
    )


def _numbers(
    results: StudyResults,
    label: str,
    runs: pd.DataFrame,
    ours: dict[str, MeanInterval],
    paper: PublishedCondition | None,
) -> dict[str, object]:
    levels = {name: runs[name].iloc[0] if len(runs) else None for name in results.factors}
    row: dict[str, object] = {"condition": label, **levels, "scale": results.scale, "seeds": len(runs)}
    row |= {"mean_epochs": runs["epochs"].mean(), "mean_best_epoch": runs["best_epoch"].mean()}
    for response, interval in ours.items():
        row |= {f"{response}_{part}": value for part, value in asdict(interval).items() if part != "n"}
    if paper is not None:
        row |= {f"paper_{response}": value for response, value in asdict(paper).items()}
    return row


def _shown(
    label: str,
    runs: pd.DataFrame,
    ours: dict[str, MeanInterval],
    paper: PublishedCondition | None,
    *,
    with_paper: bool,
) -> dict[str, str]:
    row = {
        "condition": label,
        "seeds": str(len(runs)),
        "epochs": rounded(runs["epochs"].mean(), 0) if len(runs) else MISSING,
        "test accuracy, %": with_interval(ours["test_acc"], scale=100, digits=2),
        "paper's accuracy": percent(paper.test_acc if paper else None),
        "MAD, min to max": span(with_interval(ours["min_mad"]), with_interval(ours["max_mad"])),
        "paper's MAD": _published_span(paper, "mad"),
        **{
            f"{title}, %": with_interval(ours[column], scale=100, digits=2)
            for column, title in SHARES.items()
            if column in ours
        },
        "entropy, min to max": span(with_interval(ours["min_entropy"]), with_interval(ours["max_entropy"])),
        "paper's entropy": _published_span(paper, "entropy"),
    }
    return {name: cell for name, cell in row.items() if with_paper or not name.startswith("paper")}


def _published_span(paper: PublishedCondition | None, metric: str) -> str:
    return span(*(rounded(getattr(paper, f"{end}_{metric}", None)) for end in ("min", "max")))


def gain_table(results: StudyResults) -> Table | None:
    """Test accuracy without and with everything on, and the gain (S1, Table 1); None where one has no run."""
    found = roles(results)
    if found.base is None or found.full is None or found.base == found.full:
        return None
    published = PUBLISHED.get(results.name)
    papers = published.conditions if published else {}
    ours = {
        label: mean_interval(results.runs.loc[results.runs["condition"] == label, "test_acc"])
        for label in (found.base, found.full)
    }
    ours["gain"] = paired_difference(results.runs, found.full, found.base, "test_acc")
    paper = {label: papers[label].test_acc for label in (found.base, found.full) if label in papers}
    if len(paper) == 2:
        paper["gain"] = paper[found.full] - paper[found.base]
    dataset = published.dataset if published and results.scale == "full" else str(results.settings.get("data.name", ""))
    row: dict[str, object] = {"study": results.name, "dataset": dataset, "scale": results.scale}
    shown = {"data set": dataset or MISSING}
    for label, interval in ours.items():
        signed = label == "gain"
        row |= {f"{label}_{part}": value for part, value in asdict(interval).items()}
        shown[f"{label}, {'points' if signed else '%'}"] = with_interval(interval, scale=100, digits=2, signed=signed)
        if label in paper:
            row[f"paper_{label}"] = paper[label]
            shown[f"paper's {label}"] = rounded(100 * paper[label], 2, signed=signed)
    notes = [INTERVALS, _whose_gain(ours["gain"], ours[found.base], ours[found.full])]
    if paper:
        notes.append("The paper's numbers (S1 Table 1) are of one seed.")
    return Table(
        name="gain",
        title=f"{results.name}: test accuracy, {found.base} and {found.full}",
        numbers=pd.DataFrame([row]),
        shown=pd.DataFrame([shown]),
        notes=tuple(notes),
    )


def _whose_gain(gain: MeanInterval, *means: MeanInterval) -> str:
    """Where the two lack each other's seeds, the gain is not the difference of the means beside it."""
    if all(mean.n == gain.n for mean in means):
        return "The gain is taken within seeds."
    if gain.n == 0:
        return "The gain is taken within seeds, and they have none in common."
    seeds = seeds_in_words([gain.n])
    return f"The gain is taken within seeds, over the {seeds} that both have; the means are over all that each has."
