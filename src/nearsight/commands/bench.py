"""`nearsight bench {augment}`: this project and its peers on the same work, in one process."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from nearsight.bench.augment import bench_augment
from nearsight.bench.augment import table as augment_table
from nearsight.commands.options import find_device, parse
from nearsight.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    """The Modern CIFAR augmentations, ours against torchvision in a DataLoader that uses every core."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1."""
    num_images: int = 10_000
    """Images in the data set."""
    batch_size: int = 128
    """Images per batch and cell."""
    seconds: float = 5.0
    """How long each row of the table is measured."""
    json: bool = False
    """Print one machine-readable object instead of text."""


def main(arguments: Sequence[str]) -> int:
    benches = {"augment": _augment}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: nearsight bench {{{','.join(benches)}}} [OPTIONS]")
        return 0 if arguments else 2
    if arguments[0] not in benches:
        raise unknown_name("benchmark", arguments[0], benches)
    return benches[arguments[0]](list(arguments[1:]))


def _augment(arguments: list[str]) -> int:
    options = parse(AugmentOptions, arguments, prog="nearsight bench augment")
    rows = bench_augment(
        device=str(find_device(options.device)),
        num_images=options.num_images,
        batch_size=options.batch_size,
        seconds=options.seconds,
    )
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if options.json else augment_table(rows))
    return 0
