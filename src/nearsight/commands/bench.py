"""`nearsight bench {train,measure,gaug,augment,retrieve}`: this project and its peers on the same work."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nearsight.bench.augment import bench_augment
from nearsight.bench.augment import table as augment_table
from nearsight.bench.gaug import bench_gaug
from nearsight.bench.gaug import table as gaug_table
from nearsight.bench.measure import bench_measure
from nearsight.bench.measure import table as measure_table
from nearsight.bench.retrieve import bench_retrieve
from nearsight.bench.retrieve import table as retrieve_table
from nearsight.bench.train import bench_train
from nearsight.bench.train import table as train_table
from nearsight.commands.options import find_device, parse
from nearsight.errors import InputError, unknown_name


@dataclass(frozen=True, kw_only=True)
class TrainBenchOptions:
    """Training by the Modern protocol, K models stacked against one in an ordinary loop with a DataLoader."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1."""
    num_cells: tuple[int, ...] | None = None
    """Models per stack; each makes a row of the table; 1 8 24 on a GPU and 1 4 elsewhere."""
    num_images: int | None = None
    """Images to train and validate on, 4 to 1; 50000 on a GPU and 640 elsewhere."""
    seconds: float = 5.0
    """How long each row of the table is measured, after an epoch to warm up and for at least another."""
    json: bool = False
    """Print one machine-readable object instead of text."""


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


@dataclass(frozen=True, kw_only=True)
class MeasureBenchOptions:
    """What looking costs: measure against the plain forward, and against keeping every attention map in memory."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1."""
    model: str = "vit_base_patch16_224"
    """A ViT of timm's with patches of 16 pixels."""
    num_tokens: tuple[int, ...] = (197, 1025, 4097)
    """Tokens per image, CLS included; each makes a row of the table."""
    batch_sizes: tuple[int, ...] | None = None
    """Images per batch, one number for each number of tokens; 128 32 8 on a GPU and 8 2 1 elsewhere."""
    num_batches: int = 8
    """Batches that are timed."""
    json: bool = False
    """Print one machine-readable object instead of text."""


@dataclass(frozen=True, kw_only=True)
class GaugOptions:
    """Attention with the Gaussian bias against plain attention and a dense bias, and a training step with LocAt."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1."""
    num_tokens: tuple[int, ...] | None = None
    """Tokens per image: CLS, and a square of patches; 197 1025 4097 on a GPU and 197 1025 elsewhere."""
    batch_sizes: tuple[int, ...] | None = None
    """Images per batch, one number for each number of tokens; 256 32 8 on a GPU and 2 1 elsewhere."""
    num_steps: int | None = None
    """Steps that are timed at a time, five times for each way; 10 on a GPU and 1 elsewhere."""
    model: str | None = "vit_base_patch16_224"
    """A ViT of timm's whose training step is timed with and without LocAt; None for no such rows."""
    json: bool = False
    """Print one machine-readable object instead of text."""


@dataclass(frozen=True, kw_only=True)
class RetrieveBenchOptions:
    """Exact search of the nearest patches: ours against FAISS's flat index and against the matrix products alone."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1."""
    memory_size: int | None = None
    """Patches in the memory; 4000000 on a GPU and 1000000 elsewhere."""
    num_channels: int = 768
    """Channels of each."""
    num_queries: int | None = None
    """Patches that look for their nearest; 16384 on a GPU and 512 elsewhere."""
    k: int = 30
    """Neighbours of each."""
    num_turns: int = 3
    """Times that each way is measured."""
    json: bool = False
    """Print one machine-readable object instead of text."""


def main(arguments: Sequence[str]) -> int:
    benches = {"train": _train, "measure": _measure, "gaug": _gaug, "augment": _augment, "retrieve": _retrieve}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: nearsight bench {{{','.join(benches)}}} [OPTIONS]")
        return 0 if arguments else 2
    if arguments[0] not in benches:
        raise unknown_name("benchmark", arguments[0], benches)
    return benches[arguments[0]](list(arguments[1:]))


def _train(arguments: list[str]) -> int:
    options = parse(TrainBenchOptions, arguments, prog="nearsight bench train")
    rows = bench_train(
        device=str(find_device(options.device)),
        num_cells=options.num_cells,
        num_images=options.num_images,
        seconds=options.seconds,
    )
    return _shown(rows, train_table(rows), as_json=options.json)


def _augment(arguments: list[str]) -> int:
    options = parse(AugmentOptions, arguments, prog="nearsight bench augment")
    rows = bench_augment(
        device=str(find_device(options.device)),
        num_images=options.num_images,
        batch_size=options.batch_size,
        seconds=options.seconds,
    )
    return _shown(rows, augment_table(rows), as_json=options.json)


def _measure(arguments: list[str]) -> int:
    options = parse(MeasureBenchOptions, arguments, prog="nearsight bench measure")
    if options.batch_sizes is not None and len(options.batch_sizes) != len(options.num_tokens):
        raise InputError("--batch-sizes needs one number for each of --num-tokens")
    if options.batch_sizes is None and len(options.num_tokens) != 3:
        raise InputError("--num-tokens other than three numbers needs --batch-sizes, one for each")
    rows = bench_measure(
        device=str(find_device(options.device)),
        model=options.model,
        num_tokens=options.num_tokens,
        batch_sizes=options.batch_sizes,
        num_batches=options.num_batches,
    )
    return _shown(rows, measure_table(rows), as_json=options.json)


def _gaug(arguments: list[str]) -> int:
    options = parse(GaugOptions, arguments, prog="nearsight bench gaug")
    rows = bench_gaug(
        device=str(find_device(options.device)),
        num_tokens=options.num_tokens,
        batch_sizes=options.batch_sizes,
        num_steps=options.num_steps,
        model=options.model,
    )
    return _shown(rows, gaug_table(rows), as_json=options.json)


def _retrieve(arguments: list[str]) -> int:
    options = parse(RetrieveBenchOptions, arguments, prog="nearsight bench retrieve")
    rows = bench_retrieve(
        device=str(find_device(options.device)),
        memory_size=options.memory_size,
        num_channels=options.num_channels,
        num_queries=options.num_queries,
        k=options.k,
        num_turns=options.num_turns,
    )
    return _shown(rows, retrieve_table(rows), as_json=options.json)


def _shown(rows: Sequence[Any], text: str, *, as_json: bool) -> int:
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if as_json else text)
    return 0
