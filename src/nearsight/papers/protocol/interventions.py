"""Does locality matter? What heads of models that were trained in four ways are worth to them (ours; S1 §7)."""

from nearsight.augment import AutoAugment, CutMix
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 250
_CUTMIX = {"cutmix": CutMix(p=1.0)}
_MODERN = {**_CUTMIX, "autoaugment": AutoAugment(), "smoothing": 0.1}


@recipe("interventions-cifar100")
def interventions_cifar100(*, seeds: int = 3) -> Study:
    """Does locality matter? Heads of Baseline, +CutMix, Modern and LocAt changed one by one (S1 §7, ours)

    The runs are those of the zoo, with CutMix alone beside them: as long, with CutMix in every batch. What is asked is
    asked of their weights, by `nearsight ablate`.

    Run     nearsight study run interventions-cifar100
    Cost    12 cells of 250 epochs of 40,000 images (120 M); needs a GPU
    Result  not run yet as a study; what its runs' heads are worth: results/interventions
    """
    trained = {
        "Baseline": OFF,
        "+CutMix": _CUTMIX,
        "Modern": _MODERN,
        "Modern + LocAt": {**_MODERN, "gaug": True, "prr": True},
    }
    return Study(trained_for(compact_cifar100("baseline"), _EPOCHS), factors={"trained": trained}, seeds=seeds)
