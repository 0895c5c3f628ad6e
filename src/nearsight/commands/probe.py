"""`nearsight probe {knn,linear,segment,retrieve,all} MODEL …`: what the features of frozen models are worth."""

import importlib
from collections.abc import Sequence

from nearsight.errors import unknown_name
from nearsight_command import PROBES, told_usage


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        return told_usage("probe", arguments)
    if arguments[0] not in PROBES:
        raise unknown_name("probe", arguments[0], PROBES)
    return int(importlib.import_module(f"nearsight.commands.probe_{arguments[0]}").main(list(arguments[1:])))
