"""When heads become local: all of them, measured while they train."""

import dataclasses

from nearsight.augment import CutMix
from nearsight.recipes.registry import recipe
from nearsight.recipes.unreported import ablation_fitted_cifar100
from nearsight.study import Study
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 100
# About as long as early stopping lets Modern train under the settings that fit the paper best.
_MANY_EPOCHS = 300
_EPOCHS_BETWEEN = 3


@recipe("emergence-cifar100")
def emergence_cifar100(*, seeds: int = 2) -> Study:
    """When does the first local head appear, where, and does accuracy lead or follow? (S1 §7, future work iv)

    Every head is measured on 512 test images at the start and after every epoch.

    Run     nearsight study run emergence-cifar100
    Cost    6 cells of 100 epochs of 40,000 images (24 M), and 0.3 M measured; needs a GPU
    Result  see results/emergence-cifar100
    """
    base = dataclasses.replace(trained_for(compact_cifar100("baseline"), _EPOCHS), measure_every=1)
    protocols = {
        "Baseline": base.protocol,
        "+CutMix": base.protocol.with_(CutMix(p=0.5)),
        "Modern": trained_for(compact_cifar100("modern"), _EPOCHS).protocol,
    }
    return Study(base, factors={"protocol": protocols}, seeds=seeds)


@recipe("emergence-fitted-cifar100")
def emergence_fitted_cifar100(*, seeds: int = 2) -> Study:
    """Is it CutMix, or that runs with it train longer? 300 epochs for all, CutMix in every batch (S1 §7, limitations)

    Early stopping lets runs with CutMix train several times as long as those without, so that ablations cannot tell the
    two apart; here all train equally long, with and without the rest of Modern, under the settings of
    ablation-fitted-cifar100. Every head is measured on 512 test images at the start and after every third epoch.

    Run     nearsight study run emergence-fitted-cifar100
    Cost    8 cells of 300 epochs of 40,000 images (96 M), and 0.4 M measured; needs a GPU
    Result  it is CutMix: local heads in all runs with it and in none without, see results/emergence-fitted-cifar100
    """
    fitted = {cell.condition: cell.config for cell in ablation_fitted_cifar100(seeds=1).cells}
    runs = {label: trained_for(fitted[label], _MANY_EPOCHS) for label in ("Baseline", "−CutMix", "+CutMix", "Modern")}
    base = dataclasses.replace(runs["Baseline"], measure_every=_EPOCHS_BETWEEN)
    return Study(base, factors={"protocol": {label: run.protocol for label, run in runs.items()}}, seeds=seeds)
