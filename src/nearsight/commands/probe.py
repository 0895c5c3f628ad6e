"""`nearsight probe {knn,linear,segment,retrieve,all} MODEL …`: what the features of frozen models are worth."""

import importlib
from collections.abc import Sequence

from nearsight.errors import unknown_name
from nearsight_command import listed

PROBES = {
    "knn": "classes by the votes of the nearest training images",
    "linear": "a linear classifier on frozen features",
    "segment": "a segmentation head on frozen features",
    "retrieve": "segmentation by the nearest training patches, without training",
    "all": "all of these, of models or of the runs of a study, in one table",
}
"""Name → what it is. Each is a module `nearsight.commands.probe_…`, imported only when it is called."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: nearsight probe {{{','.join(PROBES)}}} RUN_OR_MODEL [...] [OPTIONS]\n\n{listed(PROBES)}")
        return 0 if arguments else 2
    if arguments[0] not in PROBES:
        raise unknown_name("probe", arguments[0], PROBES)
    return int(importlib.import_module(f"nearsight.commands.probe_{arguments[0]}").main(list(arguments[1:])))
