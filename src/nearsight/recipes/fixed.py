"""Runs that all see the same number of images."""

import dataclasses

from nearsight.train import RunConfig


def trained_for(run: RunConfig, epochs: int) -> RunConfig:
    """The run with a schedule of so many epochs, all of which are trained; the best epoch's model is still the one
    that is tested. bf16, as in all studies that need a GPU."""
    protocol = dataclasses.replace(run.protocol, max_epochs=epochs, patience=epochs)
    return dataclasses.replace(run, protocol=protocol, precision="bf16")
