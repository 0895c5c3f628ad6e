"""`nearsight model NAME …`: what a model is and what a forward of it costs, several side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nearsight.commands.options import Request, parse
from nearsight.errors import InputError, check_at_least
from nearsight.files import check_kind, check_output_folder


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Request):
    """Say what models are and what a forward of one image costs: parameters, multiply-adds, tokens, layers and heads,
    patches, memory, and what LocAt adds.

    Multiply-adds are those of matrices, attention and convolutions, with two for each number that is normalised and one
    for each of an activation function, as in S2's Table 1. Memory is the largest sum of float32 tensors of a forward
    without gradients; attention keeps no map. Neither is measured: shapes alone are counted.

    With --out, models.csv and models.json; of models with LocAt also how wide and how strong their Gaussians are on
    images, layer by layer (S2, Appendix G), as a table and a figure each.
    """

    out: Path | None = None
    """Folder to write to; without it nothing is written."""


def main(arguments: Sequence[str]) -> int:
    options = parse(ModelOptions, arguments, prog="nearsight model")
    if not options.models:
        raise InputError("no model is named; write nearsight model NAME, and see nearsight model --help")
    check_at_least("--num-images", 1 if options.num_images is None else options.num_images, 1)
    if options.out is None and options.images is not None:
        raise InputError("--images are for the Gaussians of LocAt, which are written; say where with --out")
    if options.out is not None:
        check_output_folder(options.out)
        check_kind(options.out, None)
    # Here, because help and mistakes do without.
    from nearsight.commands.describing import as_json, as_text, describe_all, write

    described = describe_all(options)
    files = [] if options.out is None else write(options, described, shlex.join(["nearsight", "model", *arguments]))
    print(json.dumps(as_json(described, files)) if options.json else as_text(described, files))
    return 0
