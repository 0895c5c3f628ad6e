"""When heads become local: all of them, measured after every epoch."""

import dataclasses

from nearsight.augment import CutMix
from nearsight.recipes.compact import compact_cifar100
from nearsight.recipes.fixed import trained_for
from nearsight.recipes.registry import recipe
from nearsight.study import Study

_EPOCHS = 100


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
