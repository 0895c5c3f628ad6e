"""`nearsight atlas LIST`: many models on the same pictures, one table over models, one page."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearsight.commands.options import DEFAULT_ADDRESS, Common, Engine, check_engine, listed, parse
from nearsight.errors import InputError, check_at_least, check_number
from nearsight.files import check_kind, check_output_folder
from nearsight.lens import WHAT
from nearsight.models.lists import find_list, ready_lists
from nearsight.models.zoo import IMAGES

_LOOKED_AT = ("shares", "kinds", "norms", "sinks", "lds")
"""What an atlas measures of every model beside distance and entropy, where there is such a measurement."""


@dataclass(frozen=True, kw_only=True)
class AtlasOptions(Common):
    """Measure all models of a list on the same pictures: one table over models, one page.

    Writes atlas.csv (a row per model), atlas-heads.csv (a row per head), figures and report.html; the table of each
    model is in a folder below models. A model is kept as soon as it is measured, and on the way every 256 of its
    pictures: the same command does only what is missing, and several processes may share a folder. A model that fails
    is listed with the reason, the others go on, and the exit code is 1.
    """

    models: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LIST")]
    """One of the ready lists above, or a .toml file of your own (docs/atlas.md)."""
    out: Path
    """Where to write."""
    images: str = IMAGES
    """A folder of images, or a data set (nearsight data list), then its test images; by default real pictures that come
    with this package."""
    num_images: int = 256
    """Images at most."""
    no_random: bool = False
    """Leave out what the same architectures give with random weights."""
    preparations: bool = False
    """Measure every trained model also with other means and standard deviations than its own: ImageNet's, 0.5, none."""
    what: tuple[str, ...] = tuple(name for name in _LOOKED_AT if name in WHAT)
    """What else to see: names of nearsight measure --what that are per head or per layer."""
    small: bool = False
    """Keep of single pictures only what the tables have intervals of: some kB for each model instead of MB."""
    batch_size: str = "auto"
    """Images per forward, or auto: as many as memory takes."""
    seed: int = 0
    """Seed of random weights."""
    engine: Engine = "local"
    """What measures the models: this process, several of this machine, or a Ray cluster."""
    workers: int | None = None
    """Of the engine processes: how many; by default one per GPU, or on a CPU one per core, with one thread."""
    address: str = DEFAULT_ADDRESS
    """Of the engine ray: auto (the cluster that runs here), local (a new one of this machine), or HOST:PORT."""


def main(arguments: Sequence[str]) -> int:
    description = f"{inspect.getdoc(AtlasOptions)}\n\nReady lists\n{listed(ready_lists())}"
    options = parse(AtlasOptions, arguments, prog="nearsight atlas", description=description)
    models = find_list(options.models)
    check_at_least("--num-images", options.num_images, 1)
    check_number("--seed", options.seed)
    if options.batch_size != "auto" and not (options.batch_size.isdecimal() and int(options.batch_size) > 0):
        raise InputError(f"--batch-size is {options.batch_size}, but must be a number from 1 on, or auto")
    check_output_folder(options.out)
    check_kind(options.out, None)
    check_engine(options.engine, workers=options.workers, address=options.address)
    if options.workers is not None:
        check_at_least("--workers", options.workers, 1)
    # Here, because help and mistakes do without.
    from nearsight.commands.atlasing import measure_all
    from nearsight.lens.running import remembering_surveys
    from nearsight.report.atlas_page import AtlasReport

    with remembering_surveys():
        found, problems = measure_all(options, models)
    if not found:
        reasons = "; ".join(f"{label}: {why}" for label, why in problems.items())
        raise InputError(f"no model of {options.models} could be measured ({reasons})")
    command = shlex.join(["nearsight", "atlas", *arguments])
    said = {"command": command, "title": f"Atlas: {models.name}", "about": models.about}
    report = AtlasReport.of(found, problems, said)
    files = report.write(options.out)
    print(json.dumps(report.as_json(files)) if options.json else "\n".join(report.as_text(files)))
    return 1 if problems else 0
