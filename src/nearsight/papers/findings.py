"""The page of findings: the eight that matter, from S1, S2 and our own questions beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.papers.protocol.numbers import BASELINE, MODERN, PUBLISHED, WITHOUT_SMOOTHING
from nearsight.papers.protocol.own_patch_model import PAPER, own_patch_pairs
from nearsight.report.ablated import AblatedRuns
from nearsight.report.ablated_tables import loss_in_words
from nearsight.report.conditions import num_seeds, scale_notes
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import DISTANCE_LABEL, house_style, light_grid
from nearsight.report.findings import Findings, Section
from nearsight.report.marks import Drawing, add_footnote, dots_and_bars
from nearsight.report.own_patch import HEADS, with_own_patch
from nearsight.report.study_figures import add_layer_legend, draw_layer, extreme_layers, profile
from nearsight.report.tables import records, rounded, seeds_in_words, share
from nearsight.study.results import StudyResults

_DATASETS: Mapping[str, tuple[str, ...]] = {
    name: (f"protocol-{name}", f"ablation-{name}") for name in ("cifar10", "cifar100", "tiny-imagenet")
}
"""Data set → the studies that have both protocols on it; the first that was run is shown."""
_LABELS = (MODERN, BASELINE)


def profiles_of_datasets(studies: Mapping[str, StudyResults]) -> Drawing:
    """The distances of each layer's heads, from the lowest to the highest, on every data set that has results."""
    shown: dict[str, StudyResults] = {}
    for names in _DATASETS.values():
        for name in names:
            if name in studies and {*_LABELS} <= set(studies[name].runs["condition"]):
                shown.setdefault(PUBLISHED[name].dataset, studies[name])
    if not shown:
        raise InputError("no data set has a run of both protocols yet")
    one_seed = max(num_seeds(results, label) for results in shown.values() for label in _LABELS) == 1
    styles = looks(_LABELS)
    with house_style():
        figure = Figure(figsize=(1.2 + 2.4 * max(len(shown), 2), 3.6), layout=ConstrainedLayoutEngine(wspace=0.05))
        panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (dataset, results) in zip(panels, shown.items(), strict=True):
            layers = extreme_layers(results)
            for label, style in styles.items():
                numbers = profile(results, label, "mad", over_images=one_seed)
                for layer in layers:
                    draw_layer(panel, numbers[numbers["layer"] == layer], style, layers, f"{dataset}-{label}-{layer}")
            light_grid(panel)
            panel.set_title(dataset)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            panel.set_xlabel("heads of a layer, by distance")
        panels[0].set_ylim(bottom=-0.01)  # markers near 0 are whole
        panels[0].set_ylabel(DISTANCE_LABEL)
        add_layer_legend(figure, styles, layers)
    counts = [num_seeds(results, label) for results in shown.values() for label in _LABELS]
    words = f"Lines: mean over {seeds_in_words(counts)}{dots_and_bars(counts, 'bands: their range')}."
    if one_seed:
        words = "Lines: 1 seed; bands: ± one standard deviation over images."
    add_footnote(figure, [words, *dict.fromkeys(note for results in shown.values() for note in scale_notes(results))])
    return Drawing(
        figure=figure,
        caption=f"Mean attention distance of the heads of the first and last layers of {' and '.join(_LABELS)} on "
        f"{', '.join(shown)}, sorted within their layer (S1, Figure 1). {words}",
    )


def own_patch_runs(found: Mapping[str, Any]) -> dict[str, str]:
    """How many of all runs have an own-patch head, and how many of these have both CutMix and AutoAugment."""
    runs: dict[str, tuple[str, bool]] = {}
    for results in found.values():
        if isinstance(results, StudyResults):
            try:
                table = with_own_patch(results)
            except InputError:  # its runs have no one grid of patches
                continue
            has = (table[HEADS] > 0).tolist()
            for run, condition, has_one in zip(table["run"], table["condition"], has, strict=True):
                runs.setdefault(run, (condition, has_one))
    having = [condition for condition, has_one in runs.values() if has_one]
    both = sum(condition in (MODERN, WITHOUT_SMOOTHING) for condition in having)
    return {"own_patch": str(len(having)), "runs": str(len(runs)), "both": str(both)}


def own_patch_entropies(found: Mapping[str, Any]) -> dict[str, str]:
    """What the two leaks predict for the paper's heads."""
    pairs = [pair for pair in own_patch_pairs(found["ablation-fitted-cifar100"]) if pair.whose == PAPER]
    pairs = sorted(pairs, key=lambda pair: pair.distance)
    shares = sorted(pair.everywhere.share for pair in pairs)
    neighbours = sorted(pair.to_neighbours.entropy for pair in pairs)
    return {
        "distances": " ".join(rounded(pair.distance) for pair in pairs),
        "entropies": " ".join(rounded(pair.entropy) for pair in pairs),
        "predicted": " ".join(rounded(pair.everywhere.entropy) for pair in pairs),
        "neighbours": f"{rounded(neighbours[0])} to {rounded(neighbours[-1])}",
        "shares": f"{share(shares[0]).removesuffix(' %')} to {share(shares[-1])}",
    }


def own_patch_worth(found: Mapping[str, Any]) -> dict[str, str]:
    """What own-patch heads are worth, in the runs whose heads were changed."""
    results: AblatedRuns = found["interventions"]
    heads = results.tables["head"]
    own = heads[heads["mad"] < results.own_patch_bound]
    if own["run"].nunique() != 1:
        raise InputError(f"the finding is about one run with own-patch heads, and there are {own['run'].nunique()}")
    rows = {row["plan"]: row for row in records(own)}
    return {
        "runs": str(heads["run"].nunique()),
        "mad": rounded(rows["zero"]["mad"]),
        "base": rounded(100 * rows["zero"]["base"], 1),
        **{plan: loss_in_words(row) for plan, row in rows.items()},
    }


FINDINGS = Findings(
    title="Findings",
    about="What the protocol study (S1, arXiv 2605.16390) and LocAt (S2, arXiv 2603.04892) claim, and what they leave "
    "open, put to the test with seeds. Every number is computed from the tables under `results/`, every verdict by a "
    "rule that stands beside it in the study's `verdict.md`, and a sentence here is refused when a verdict it rests "
    "on comes out otherwise. MAD is the mean attention distance of a head, as a fraction of the grid's diagonal; ± is "
    "half a 95 % interval over seeds; *in direction* and *leaning yes* are not yet shown. What was tried besides is "
    "in the [log](log.md).",
    sections=(
        Section(
            title="CutMix makes heads local",
            text="With CutMix in every batch, 200 epochs and six seeds, the distance of the most local head changes "
            "by {mixing-long-cifar100:CutMix}. Under S1's own schedule three seeds agree "
            "({ablation-fitted-cifar100:cutmix-separates}), with a smaller gap than the paper's "
            "({ablation-fitted-cifar100:cutmix-separates:paper}). Corrected for all of S1's claims about the parts of "
            "Modern that is not yet shown; {ablation-fitted-cifar100:cutmix-separates:seeds} seeds would. With CutMix "
            "in half of the batches it is a third of that.",
            rests_on={
                "mixing-long-cifar100": {"CutMix": "yes"},
                "ablation-fitted-cifar100": {"cutmix-separates": "in direction"},
                "ablation-cifar100": {"cutmix-separates": "in direction"},
            },
            figure="ablation-fitted-cifar100/figures/figure-4-minimum-mad.png",
            limits="S1 does not say how often it mixes. What would change our mind: seeds in which runs with CutMix "
            "and without overlap as much as chance lets them.",
        ),
        Section(
            title="Local heads come with CutMix at equal length of training, too",
            text="Early stopping lets runs with CutMix train several times as long as those without. Where all train "
            "for 300 epochs, local heads are in {emergence-fitted-cifar100:only-with-cutmix}; the most local head "
            "goes from {emergence-fitted-cifar100:equally-many-epochs}. Two seeds lean that way, "
            "{emergence-fitted-cifar100:only-with-cutmix:seeds} would decide. Within conditions, longer runs are not "
            "shown to have a nearer head: {ablation-fitted-cifar100:longer-with-cutmix}.",
            rests_on={
                "emergence-fitted-cifar100": {
                    "only-with-cutmix": "leaning yes",
                    "equally-many-epochs": "leaning yes",
                    "first-local-head": "epoch 36 to 102, L0",
                    "turns-global": "no",
                },
                "ablation-fitted-cifar100": {"longer-with-cutmix": "leaning yes"},
            },
            figure="emergence-fitted-cifar100/figures/emergence-course.png",
            limits="Whether accuracy comes before locality is open. What would change our mind: runs without CutMix "
            "that become local after more epochs, or under another schedule.",
        ),
        Section(
            title="AutoAugment seems to double what CutMix does: the largest disagreement with S1",
            text="S1 finds no effect of AutoAugment on locality, alone or beside CutMix. In ours it is "
            "{ablation-fitted-cifar100:colour-and-cutmix}. And of {runs} runs of all studies {own_patch} have a head "
            "that attends to its own patch alone, and {both} of these have both CutMix and AutoAugment. Three seeds "
            "suggest it; {ablation-fitted-cifar100:colour-and-cutmix:seeds} would decide.",
            rests_on={
                "ablation-fitted-cifar100": {
                    "colour-and-cutmix": "inconclusive",
                    "own-patch-with-both": "leaning yes",
                    "colour-alone": "in direction",
                }
            },
            numbers=own_patch_runs,
            figure="ablation-fitted-cifar100/figures/own-patch.png",
            limits="What would change our mind: further seeds in which CutMix does as much without AutoAugment as "
            "with it.",
        ),
        Section(
            title="The paper's smallest distances are heads that attend to themselves",
            text="A head that keeps one share of its attention on its own patch and spreads the rest evenly has an "
            "entropy that follows from its distance. For S1's {distances} that is {predicted}; S1 has {entropies}. A "
            "leak to the four neighbours would give {neighbours}. So these heads spend {shares} on themselves: they "
            "mix little, and say nothing about the others. Without them CutMix still lowers the distance: "
            "{ablation-fitted-cifar100:others-separated}.",
            rests_on={
                "ablation-fitted-cifar100": {"others-separated": "leaning yes", "others-more-local": "leaning yes"}
            },
            numbers=own_patch_entropies,
            figure="ablation-fitted-cifar100/figures/own-patch-model.png",
            limits="That S1's smallest distance and smallest entropy are of one head is an assumption; in our runs "
            "they are. What would change our mind: its attention maps.",
        ),
        Section(
            title="Hiding, mixing and the second label each make heads local, and none as much as CutMix",
            text="200 epochs, six seeds. Hiding the box alone: {mixing-long-cifar100:a mean box}; mixing without a "
            "cut: {mixing-long-cifar100:the mix without a cut}; CutMix with the image's own label: "
            "{mixing-long-cifar100:CutMix without its label}; CutMix itself: {mixing-long-cifar100:CutMix}. The "
            "second label does more where its image is seen ({mixing-long-cifar100:the label × what is in the box}); "
            "where it is not, {mixing-long-cifar100:a label without its image}.",
            rests_on={
                "mixing-long-cifar100": {
                    "a mean box": "yes",
                    "the mix without a cut": "yes",
                    "CutMix without its label": "the other way round",
                    "leaving out its label": "yes",
                    "CutOut or CutMix": "the other way round",
                    "a label without its image": "yes",
                    "the label × what is in the box": "yes",
                    "CutMix": "yes",
                }
            },
            figure="mixing-long-cifar100/figures/mixing-contrasts.png",
            limits="One data set and one size of model; intervals come from one fit to all runs. What would change "
            "our mind: the same contrasts with other answers elsewhere.",
        ),
        Section(
            title="On CIFAR-10 and Tiny-ImageNet the direction is the same, and not yet shown",
            text="From Baseline to Modern the most local head goes from {protocol-cifar10:most-local-head} on "
            "CIFAR-10 and from {protocol-tiny-imagenet:most-local-head} on Tiny-ImageNet, two seeds each; three would "
            "decide both. Which part of Modern does it there has been run with one seed, which decides nothing.",
            rests_on={
                "protocol-cifar10": {"accuracy": "in direction", "most-local-head": "in direction"},
                "protocol-tiny-imagenet": {"accuracy": "reproduced", "most-local-head": "in direction"},
            },
            figure=("findings-datasets", profiles_of_datasets),
            limits="What would change our mind: a data set on which Modern leaves attention as global as it was.",
        ),
        Section(
            title="LocAt makes heads local by itself, and CutMix adds to its accuracy",
            text="Where CutMix already is, LocAt brings the most local head nearer ({locat-cutmix-cifar100:GAug+PRR "
            "beside cutmix-min_mad}); where LocAt already is, CutMix still raises accuracy "
            "({locat-cutmix-cifar100:cutmix beside GAug+PRR-test_acc} points), and is not shown to bring heads "
            "nearer. Frozen, LocAt's patches segment and retrieve better than ViT's.",
            rests_on={
                "locat-cutmix-cifar100": {
                    "GAug+PRR beside cutmix-min_mad": "yes",
                    "cutmix beside GAug+PRR-test_acc": "yes",
                    "cutmix beside GAug+PRR-min_mad": "inconclusive",
                },
                "dense/supervised": {"locat": "reproduced", "retrieval": "reproduced"},
            },
            figure="locat-cutmix-cifar100/figures/figure-6-interaction.png",
            limits="A compact ViT, 2.5 M parameters. What would change our mind: other sizes and data.",
        ),
        Section(
            title="A model needs its local heads most, and of an own-patch head nothing but each patch's own value",
            text="Removing the most local heads first, beside random orders, changes the area under the accuracy by "
            "{interventions:removal-Baseline} in Baseline, {interventions:removal-+CutMix} with CutMix. The own-patch "
            "head of one of {runs} runs (MAD {mad}) is worth {zero} of {base} points; uniform attention in its place "
            "costs {uniform}, exact identity {identity} (95 % over images). With CutMix layers do not need less reach "
            "({interventions:reach-cutmix}).",
            rests_on={
                "interventions": {
                    "removal-Baseline": "yes",
                    "removal-+CutMix": "yes",
                    "rank-Baseline": "yes",
                    "reach-cutmix": "inconclusive",
                }
            },
            numbers=own_patch_worth,
            figure="interventions/figures/removal.png",
            limits="One run; a model trained without the head might miss nothing. What would change our mind: "
            "own-patch heads that can be removed for little.",
        ),
    ),
)


def write_findings(results: Path, page: Path) -> tuple[Path, ...]:
    """Write the page and, next to it in images/, the figures that no study has alone; the files written."""
    return FINDINGS.write(results, page)
