"""S1 revisited: two pages that could be sent to the authors of the protocol study."""

from pathlib import Path

from nearsight.papers.findings import own_patch_entropies, own_patch_runs, own_patch_worth
from nearsight.report.findings import Findings, Section

_ABLATION = "ablation-fitted-cifar100"
_LONG = "mixing-long-cifar100"
_COURSE = "emergence-fitted-cifar100"

S1_REVISITED = Findings(
    title="S1 revisited",
    about="What *Inducing Spatial Locality in Vision Transformers through the Training Protocol* (S1, arXiv "
    "2605.16390) claims, run again from its text: the same compact ViT, the same protocols, more seeds, settings that "
    "the paper does not report assumed and said so. CIFAR-100, CutMix in every batch. Distances are S1's Mean "
    "Attention Distance; ± is half a 95 % interval over seeds. A verdict is *reproduced* or *yes* where the claim is "
    "shown after correction for all claims of its family, *in direction* or *leaning yes* where the odds are for it; "
    "it links to the study, where its rule and all other claims stand. Questions were planned before the runs or "
    "asked afterwards. All numbers are computed from the tables under `results/`, and a sentence here is refused when "
    "a verdict it rests on comes out otherwise.",
    with_others=False,
    sections=(
        Section(
            title="What holds: CutMix makes early heads local",
            text="Every direction of the comparison of protocols is S1's, and so is the source: all runs with CutMix "
            "have a more local head than any run without. Three seeds, corrected for some twenty claims, leave the "
            "single claims *in direction*; CutMix by itself, six seeds of 200 epochs, is shown: "
            "{mixing-long-cifar100:CutMix}. Label smoothing does nothing that we could see.",
            rests_on={
                _ABLATION: {
                    "accuracy": "in direction",
                    "most-local-head": "in direction",
                    "early-layers": "in direction",
                    "in-layer-1": "in direction",
                    "cutmix-separates": "in direction",
                    "entropy-separates": "in direction",
                    "removing-cutmix": "in direction",
                    "adding-cutmix": "in direction",
                    "smoothing-alone": "in direction",
                },
                _LONG: {"CutMix": "yes"},
            },
            as_table=True,
        ),
        Section(
            title="What comes out otherwise: AutoAugment, accuracy, and the size of the effect",
            text="S1 finds no effect of AutoAugment on locality. Alone it has none in ours; beside CutMix it seems to "
            "double what CutMix does. In S1 CutMix and AutoAugment raise accuracy alike; in ours CutMix raises it "
            "more. {ablation-fitted-cifar100:colour-and-cutmix:seeds} seeds would decide the first.",
            rests_on={
                _ABLATION: {
                    "colour-alone": "in direction",
                    "colour-and-cutmix": "inconclusive",
                    "removing-colour": "inconclusive",
                    "dissociation": "inconclusive",
                }
            },
            as_table=True,
            figure=f"{_ABLATION}/figures/figure-4-minimum-mad.png",
        ),
        Section(
            title="The smallest distances are heads that attend to themselves",
            text="S1's {distances} come with entropies of {entropies}. A head that keeps one share of its attention "
            "on its own patch and spreads the rest evenly would have {predicted}; one that leaks to its neighbours "
            "{neighbours}. So these heads spend {shares} on their own patch. Of {runs} runs of all our studies "
            "{own_patch} have such a head, and {both} of these had both CutMix and AutoAugment. Without them CutMix "
            "still lowers the distance. One of our runs needs its own-patch head: it is worth {zero} of {base} "
            "points, uniform attention in its place costs {uniform}, exact identity {identity}. The model needs each "
            "patch's own value, and nothing that attention could add to it.",
            rests_on={
                _ABLATION: {"others-separated": "leaning yes", "own-patch-with-both": "leaning yes"},
                "interventions": {"removal-Baseline": "yes"},
            },
            numbers=lambda found: {**own_patch_worth(found), **own_patch_entropies(found), **own_patch_runs(found)},
            as_table=True,
            figure=f"{_ABLATION}/figures/own-patch-model.png",
        ),
        Section(
            title="What S1 did not ask",
            text="Its early stopping lets runs with CutMix train several times as long as those without. At equal "
            "length the difference is the same, and no head ever turns back. What of CutMix does it: hiding a box, "
            "mixing two images and the second label each make heads local, and none as much as CutMix.",
            rests_on={
                _COURSE: {
                    "only-with-cutmix": "leaning yes",
                    "equally-many-epochs": "leaning yes",
                    "accuracy-leads": "leaning yes",
                    "turns-global": "no",
                },
                _LONG: {
                    "a mean box": "yes",
                    "the mix without a cut": "yes",
                    "CutMix without its label": "the other way round",
                    "leaving out its label": "yes",
                    "CutOut or CutMix": "the other way round",
                    "a label without its image": "yes",
                    "the label × what is in the box": "yes",
                },
            },
            as_table=True,
            figure=f"{_LONG}/figures/mixing-contrasts.png",
        ),
        Section(
            title="What S1 does not report, and what it does to the numbers",
            text="Learning rate, weight decay, initialisation, the deviation of positions, how often CutMix is "
            "applied and its α. Of {settings} settings none brings the smallest distance down to the paper's; the "
            "nearest to its table is the one that the studies above assume.",
            rests_on={
                "unreported-cifar100": {
                    "nearest-setting": "learning rate 0.001, weight decay 0.05, initialisation trunc_normal, "
                    "positions' deviation 0.02, CutMix p=1",
                    "reached": "no",
                    "position_std": "yes",
                    "cutmix": "yes",
                    "lr": "inconclusive",
                    "weight_decay": "inconclusive",
                    "init": "inconclusive",
                }
            },
            numbers=lambda found: {"settings": str(len(found["unreported-cifar100"].runs))},
            as_table=True,
        ),
        Section(
            title="What would settle the rest",
            text="Planned, with questions, rules and power written down before the first run, and not run yet: "
            "`factorial-cifar100` (CutMix × AutoAugment × label smoothing, equal length, no early stopping) decides "
            "the interaction; `own-patch-screen-cifar100` asks which further setting turns heads to their own patch. "
            "From S1's authors, in the order of what it would decide: the attention map of the head with {smallest}, "
            "the settings of the section above, how often and with which seeds Table 2 was run, and its checkpoints: "
            "`nearsight measure` and `nearsight ablate` take any of them.",
            rests_on={},
            numbers=lambda found: {"smallest": own_patch_entropies(found)["distances"].split()[0]},
        ),
    ),
)


def write_revisited(results: Path, page: Path) -> tuple[Path, ...]:
    """Write the page; the files written."""
    return S1_REVISITED.write(results, page)
