"""`nearsight bench NAME`: our work and that of peers, as ratios."""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearsight.commands.options import asks_for_usage, find_device, listed, parse, print_usage
from nearsight.errors import unknown_name
from nearsight.lazy import torch
from nearsight.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every benchmark. All others go to its function by their names."""

    json: bool = False
    """Print one machine-readable object instead of text."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """Those of a benchmark that computes."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1."""


@dataclass(frozen=True, kw_only=True)
class TrainBenchOptions(BenchOptions):
    """Training, K models stacked against an ordinary loop with a DataLoader; unaugmented, against a compiled loop."""

    num_cells: tuple[int, ...] | None = None
    """Models per stack; each makes a row of the table; 1 8 24 on a GPU and 1 4 elsewhere."""
    num_images: int | None = None
    """Images to train and validate on, 4 to 1; 50000 on a GPU and 640 elsewhere."""
    seconds: float = 5.0
    """How long each row of the table is measured, after an epoch to warm up and for at least another."""
    batch_size: int = 128
    """Images per step and cell."""
    image_size: int = 32
    """Side of the images in pixels."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained; --model.gaug --model.prr for LocAt, --model.name and --model.settings for any model of timm."""


@dataclass(frozen=True, kw_only=True)
class AugmentOptions(BenchOptions):
    """The Modern CIFAR augmentations, ours against torchvision in a DataLoader that uses every core."""

    num_images: int = 10_000
    """Images in the data set."""
    batch_size: int = 128
    """Images per batch and cell."""
    seconds: float = 5.0
    """How long each row of the table is measured."""
    num_cells: tuple[int, ...] | None = None
    """Models whose batches are augmented at once; each makes rows of the table; 1 24 on a GPU and 1 elsewhere."""


@dataclass(frozen=True, kw_only=True)
class InputOptions(BenchOptions):
    """From JPEG files to batches of random crops: ours against timm's default loader and torchvision's."""

    folder: Path | None = None
    """Pictures, a folder per class below train and val; drawn ones by default."""
    num_images: int = 512
    """Pictures that are drawn."""
    batch_size: int = 64
    """Images per batch."""
    num_turns: int = 5
    """Epochs that each way is measured for, in turn."""


@dataclass(frozen=True, kw_only=True)
class MeasureBenchOptions(BenchOptions):
    """What looking costs: measure against the plain forward, and against keeping every attention map in memory."""

    model: str = "vit_base_patch16_224"
    """A ViT of timm's with CLS and patches of 16 pixels."""
    num_tokens: tuple[int, ...] = (197, 1025, 4097)
    """Tokens per image, CLS included; each makes a row of the table."""
    batch_sizes: tuple[int, ...] | None = None
    """Images per batch, one number for each number of tokens; 128 32 8 on a GPU and 8 2 1 elsewhere."""
    num_batches: int | None = None
    """Batches that are timed at a time, five times for each way; 8 on a GPU and 2 elsewhere."""
    what: tuple[str, ...] = ()
    """Further measurements of `nearsight measure`, each timed together with measuring: norms lds sinks kinds, say."""


@dataclass(frozen=True, kw_only=True)
class AblateBenchOptions(BenchOptions):
    """What it costs to ask about every head: ours against whole forwards, and against a loop of hooks with maps."""

    model: str = "compact_vit"
    """A ViT of timm's with CLS."""
    num_images: int | None = None
    """Images that every changed model sees; 10000 on a GPU and 16 elsewhere."""
    num_compared: int | None = None
    """Of these, how many go through all three ways; 1000 on a GPU and 16 elsewhere."""
    batch_size: int | None = None
    """Images per batch; 500 on a GPU and 8 elsewhere."""
    variants_at_once: int = 8
    """Changed models that run as one batch."""


@dataclass(frozen=True, kw_only=True)
class GaugOptions(BenchOptions):
    """Attention with the Gaussian bias against plain attention and a dense bias, and a training step with LocAt."""

    num_tokens: tuple[int, ...] | None = None
    """Tokens per image: CLS, and a square of patches; 197 1025 4097 on a GPU and 197 1025 elsewhere."""
    batch_sizes: tuple[int, ...] | None = None
    """Images per batch, one number for each number of tokens; 256 32 8 on a GPU and 2 1 elsewhere."""
    num_steps: int | None = None
    """Steps that are timed at a time, five times for each way; 10 on a GPU and 1 elsewhere."""
    model: str | None = "vit_base_patch16_224"
    """A ViT of timm's whose training step is timed with and without LocAt; None for no such rows."""


@dataclass(frozen=True, kw_only=True)
class LocalityBenchOptions(BenchOptions):
    """Each inducer of locality against plain attention, a bias in memory and FlexAttention."""

    inducers: tuple[str, ...] = ("gaug", "gaussian", "alibi2d", "neighborhood")
    """Which, with their options if any: neighborhood:radius=1.5."""
    num_tokens: tuple[int, ...] | None = None
    """Tokens per image: CLS, and a square of patches; 197 1025 4097 on a GPU and 197 1025 elsewhere."""
    batch_sizes: tuple[int, ...] | None = None
    """Images per batch, one number for each number of tokens; 256 32 8 on a GPU and 2 1 elsewhere."""
    num_heads: int = 12
    """Heads of the attention."""
    head_size: int = 64
    """Channels of each."""
    num_steps: int | None = None
    """Steps that are timed at a time, five times for each way; 10 on a GPU and 1 elsewhere."""


@dataclass(frozen=True, kw_only=True)
class RetrieveBenchOptions(BenchOptions):
    """Exact search of the nearest patches: ours against FAISS's flat index and against the matrix products alone."""

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


@dataclass(frozen=True, kw_only=True)
class StudyBenchOptions(Options):
    """What a study of many runs costs beside their training: planning, resuming, reporting; with simulated runs."""

    num_cells: tuple[int, ...] = (10, 100, 1000)
    """Cells of the study; each makes a row of the table. 10000 takes some minutes and 1 GB of disk."""
    study: str = "ablation-cifar100"
    """Whose conditions to take, as `nearsight study list` calls it; all of them, or as many as divide the cells."""
    folder: Path | None = None
    """Where to make a folder that goes at the end, to measure that disk; the system's place for such by default."""


@dataclass(frozen=True, kw_only=True)
class QueueBenchOptions(BenchOptions):
    """What is left of the engine's rate in a whole study that stops early, seed after seed and from one queue."""

    results: Path = Path("results/ablation-cifar100")
    """Committed results of a study; the lengths of its runs are taken."""
    shorter: float = 25.0
    """By how much runs are shortened; at least an epoch is left of each."""
    num_images: int | None = None
    """Images to train and validate on, 4 to 1; 50000 on a GPU and 640 elsewhere."""
    batch_size: int = 128
    """Images per step and cell."""
    checkpoint_every: int = 10
    """Epochs between checkpoints."""
    most: int = 24
    """Cells that train at a time, at most."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""


@dataclass(frozen=True, kw_only=True)
class StartBenchOptions(BenchOptions):
    """From the start of a process to its first training step, with an empty cache of compiled programs and again."""

    num_cells: tuple[int, ...] | None = None
    """Models per stack; each makes two rows of the table; 1 24 on a GPU and 1 elsewhere."""
    batch_size: int = 128
    """Images per step and cell."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""


BENCHES: dict[str, type[Options]] = {
    "train": TrainBenchOptions,
    "measure": MeasureBenchOptions,
    "ablate": AblateBenchOptions,
    "gaug": GaugOptions,
    "locality": LocalityBenchOptions,
    "augment": AugmentOptions,
    "input": InputOptions,
    "retrieve": RetrieveBenchOptions,
    "study": StudyBenchOptions,
    "queue": QueueBenchOptions,
    "start": StartBenchOptions,
}
"""Name → what it takes. Each is `bench_…`, with its `table`, in a module `nearsight.bench.…`, imported only when it is
called."""


def main(arguments: Sequence[str]) -> int:
    if asks_for_usage(arguments):
        about = {name: (options.__doc__ or "").splitlines()[0] for name, options in BENCHES.items()}
        usage = f"usage: nearsight bench {{{','.join(about)}}} [OPTIONS]\n\n{listed(about)}"
        return print_usage("bench", usage, "benchmark", arguments)
    name = arguments[0]
    if name not in BENCHES:
        raise unknown_name("benchmark", name, BENCHES)
    options = parse(BENCHES[name], arguments[1:], prog=f"nearsight bench {name}")
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.name != "json"}
    where: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(options, BenchOptions):
        device = find_device(options.device)
        given["device"] = str(device)
        if device.type == "cuda":
            # What waits for a device, asks for its memory or captures its work means the current one.
            where = torch.cuda.device(device)
    bench = importlib.import_module(f"nearsight.bench.{name}")
    with where:
        rows = getattr(bench, f"bench_{name}")(**given)
    described = {"bench": name, "rows": [dataclasses.asdict(row) for row in rows]}
    print(json.dumps(described) if options.json else bench.table(rows))
    return 0
