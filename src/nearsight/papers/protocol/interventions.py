"""Does locality matter? What heads of models that were trained in four ways are worth to them (ours; S1 §7)."""

from collections.abc import Callable
from functools import partial

from nearsight.augment import AutoAugment, CutMix
from nearsight.errors import InputError
from nearsight.report.ablated import AREA, NEEDED, RANK, RANK_WITHIN, changed
from nearsight.report.claims import OURS, Claim
from nearsight.report.rules import SIGN, Finding, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import with_interval
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, paired_difference
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 250
_CUTMIX = {"cutmix": CutMix(p=1.0)}
_MODERN = {**_CUTMIX, "autoaugment": AutoAugment(), "smoothing": 0.1}
BASELINE, CUTMIX, MODERN, LOCAT = _CONDITIONS = "Baseline", "+CutMix", "Modern", "Modern + LocAt"


@recipe("interventions-cifar100")
def interventions_cifar100(*, seeds: int = 3) -> Study:
    """Does locality matter? Heads of Baseline, +CutMix, Modern and LocAt changed one by one (S1 §7, ours)

    The runs are those of the zoo, with CutMix alone beside them: as long, with CutMix in every batch. What is asked is
    asked of their weights, by `nearsight ablate` on the folder of the study.

    Run     nearsight study run interventions-cifar100; nearsight ablate runs/interventions-cifar100
    Cost    12 cells of 250 epochs of 40,000 images (120 M); then 350 variants of each on 10,000 images; needs a GPU
    Result  what heads are worth: results/interventions
    """
    levels = (OFF, _CUTMIX, _MODERN, {**_MODERN, "gaug": True, "prr": True})
    trained = dict(zip(_CONDITIONS, levels, strict=True))
    return Study(trained_for(compact_cifar100("baseline"), _EPOCHS), factors={"trained": trained}, seeds=seeds)


_MEAN = (
    "*Mean.* A number of each run is tested over the seeds of a condition (Student's t, two-sided): the mean is below "
    "0."
)


def _between(condition: str, reference: str, results: StudyResults) -> Finding:
    """Whether a condition needs less reach than another."""
    found = paired_difference(results.runs, condition, reference, NEEDED)
    return judge_sign(found, sign=-1, words=f"{with_interval(found, digits=2, signed=True)} patches")


def _below_zero(condition: str, column: str, scale: float, digits: int, results: StudyResults) -> Finding:
    values = results.runs.loc[results.runs["condition"] == condition, column].dropna()
    if values.empty:
        raise InputError(f"no run of {condition} was asked")
    found = mean_interval(values)
    words = with_interval(found, scale=scale, digits=digits, signed=True)
    return judge_sign(found, sign=-1, words=f"{words} points" if scale > 1 else words)


def _questions() -> list[Claim]:
    def ask(id: str, text: str, family: str, rule: str, needs: tuple[str, ...], judge: Callable[..., Finding]) -> Claim:
        return Claim(id=id, text=text, source=OURS, rule=rule, needs=needs, family=family, judge=judge)

    asked = [
        ask(
            f"reach-{name}",
            f"Do layers of {condition} need less reach than those of {reference}?",
            "reach",
            SIGN,
            (condition, reference),
            partial(_between, condition, reference),
        )
        for name, condition, reference in (("cutmix", CUTMIX, BASELINE), ("locat", LOCAT, MODERN))
    ]
    for kind, column, text, scale, digits in (
        ("rank", RANK, "Are more local heads of {} worth more?", 1.0, 2),
        ("rank-within", RANK_WITHIN, "Are more local heads of {} worth more, among those of a layer?", 1.0, 2),
        ("removal", AREA, "Does removing the most local heads of {} first cost more than random orders?", 100.0, 1),
    ):
        asked += [
            ask(
                f"{kind}-{condition}",
                text.format(condition),
                kind,
                _MEAN,
                (),
                partial(_below_zero, condition, column, scale, digits),
            )
            for condition in _CONDITIONS
        ]
    return asked


report_on(changed("interventions-cifar100"), claims=_questions())
