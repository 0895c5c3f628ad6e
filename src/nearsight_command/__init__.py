"""The start of the `nearsight` command: help and the version are printed at once, without heavy imports.

Not part of the package `nearsight`, because importing that loads torch and timm, which takes seconds. The descriptions
of recipes and benchmarks here are the first lines of their own docstrings; a test holds the two equal.
"""

import errno
import io
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {
    "demo": "train a small ViT with and without CutMix and show what changes",
    "measure": "how far and how selectively each head of a model looks",
    "train": "train a model from a recipe",
    "study": "which part of a recipe makes attention local, with confidence intervals",
    "probe": "what the features of a frozen model are worth",
    "report": "one page of a run, a study or a measured model, or of several side by side",
    "share": "a run as others can load it, in a folder or on the Hugging Face Hub",
    "data": "which data sets are here, getting one, and whether it is intact",
    "bench": "this project and its peers on the same work",
}
"""Name → what it is for. Each is a module of `nearsight.commands`, imported only when it is called."""
RECIPES = {
    "compact-cifar100": "The compact ViT on CIFAR-100 (S1, Table 1; the paper: 48.53 % Baseline, 63.38 % Modern).",
    "compact-cifar10": "The compact ViT on CIFAR-10 (S1, Table 1; the paper: 78.46 % Baseline, 84.84 % Modern).",
    "compact-tiny-imagenet": (
        "The compact ViT on Tiny-ImageNet (S1, Table 1; the paper: 34.89 % Baseline, 41.92 % Modern)."
    ),
    "compact-shapes": "A small compact ViT on the embedded set: minutes on a laptop, nothing to download.",
    "vit-imagenet": "ViT-Tiny on ImageNet-1K (S2, Table 1; the paper: 72.39 %, with LocAt 73.94 %).",
    "vit-mini-imagenet": "ViT-Tiny on mini-ImageNet (S2, Table 3; the paper: 74.94 %, with LocAt 78.47 %).",
    "vit-cifar100-224": (
        "ViT-Tiny on CIFAR-100, enlarged to 224 pixels (S2, Table 3; the paper: 73.84 %, with LocAt 80.43 %)."
    ),
    "dino-imagenet": "DINO pretraining of ViT-S/16 on ImageNet-1K (S2, Table 3): 50 epochs, the original defaults.",
    "dino-tiny-imagenet": "DINO pretraining of the compact ViT on Tiny-ImageNet.",
    "dino-shapes": "DINO pretraining of a small ViT on the embedded set: to see it work, nothing to download.",
}
"""What `nearsight train` takes."""

PROBES = {
    "knn": "classes by the votes of the nearest training images",
    "linear": "a linear classifier on frozen features",
    "segment": "a segmentation head on frozen features",
    "retrieve": "segmentation by the nearest training patches, without training",
    "all": "all of these, of models or of the runs of a study, in one table",
}
"""Name → what it is. Each is a module `nearsight.commands.probe_…`, imported only when it is called."""

BENCHES = {
    "train": "Training by the Modern protocol, K models stacked against one in an ordinary loop with a DataLoader.",
    "measure": (
        "What looking costs: measure against the plain forward, and against keeping every attention map in memory."
    ),
    "gaug": (
        "Attention with the Gaussian bias against plain attention and a dense bias, and a training step with LocAt."
    ),
    "augment": "The Modern CIFAR augmentations, ours against torchvision in a DataLoader that uses every core.",
    "retrieve": (
        "Exact search of the nearest patches: ours against FAISS's flat index and against the matrix products alone."
    ),
    "study": (
        "What a study of many runs costs beside their training: planning, resuming, reporting; with simulated runs."
    ),
}
"""What `nearsight bench` takes."""


def listed(choices: Mapping[str, str]) -> str:
    """For helps: a line for each name with what it is for, one below the other."""
    width = max(map(len, choices))
    return "\n".join(f"  {name:<{width}}  {about}" for name, about in choices.items())


USAGES = {
    "train": (
        "usage: nearsight train RECIPE [--protocol NAME] [OPTIONS]\n\n"
        f"{listed(RECIPES)}\n\n--protocol is for training with labels; dino-… recipes have one of their own.\n"
        "nearsight train RECIPE --help shows every setting of a recipe with its default.\n"
        "A run that was stopped (SIGINT, SIGTERM) or killed continues when the same command is given again.\n"
        "Several GPUs: torchrun --nproc-per-node N -m nearsight train RECIPE …; the batch is that of all together."
    ),
    "study": (
        "usage: nearsight study list\n"
        "       nearsight study run NAME [--seeds N] [--scale {full,small}] [--engine ENGINE] [OPTIONS]\n"
        "       nearsight study show NAME_OR_DIR\n\n"
        "nearsight study run --help shows all options."
    ),
    "probe": f"usage: nearsight probe {{{','.join(PROBES)}}} RUN_OR_MODEL [...] [OPTIONS]\n\n{listed(PROBES)}",
    "data": "usage: nearsight data {list,fetch,check} [NAME] [--data-dir DIR] [--json]",
    "bench": f"usage: nearsight bench {{{','.join(BENCHES)}}} [OPTIONS]\n\n{listed(BENCHES)}",
}
"""Of commands with more commands, or recipes, below them: what is printed where nothing more is said, or --help."""

MISSING = {"train": "recipe", "study": "action", "probe": "probe", "data": "action", "bench": "benchmark"}
"""Command → what has to come next."""

DEBUG = "--debug"
GOES_ON = "what was finished is kept, and the same command does only what is missing"
_MOST_SAID = 300
"""Characters of an error's own words."""


def help_text() -> str:
    """What `nearsight --help` prints."""
    return (
        "nearsight: see, measure and induce spatial locality in Vision Transformers\n\n"
        f"usage: nearsight COMMAND [OPTIONS]\n\n{listed(COMMANDS)}\n\n"
        "nearsight COMMAND --help shows a command's options; nearsight --version the version.\n"
        "With --debug, an unexpected error shows its traceback."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in arguments
    arguments = [argument for argument in arguments if argument != DEBUG]
    show_what_can_be_shown()
    try:
        code = answered(arguments, _installed_version())
        if code is None:
            from nearsight.cli import run  # here, because it takes seconds

            code = run(arguments)
        sys.stdout.flush()  # what cannot be written is known here, not when Python ends
        return code
    except KeyboardInterrupt:
        print(f"nearsight: interrupted; {GOES_ON}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return reader_gone()
    except Exception as error:
        if isinstance(error, OSError) and is_of_output(error):
            return output_failed(error)
        if debug:
            raise
        return unexpected(error, arguments)


def show_what_can_be_shown() -> None:
    """Replace characters that the terminal cannot show, and discard output to a stream that was closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python's way to say so
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def reader_gone() -> int:
    """The exit code when our output is no longer read, as in `nearsight … | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def is_of_output(error: OSError) -> bool:
    """Whether it is our output that cannot be written: files that cannot be are named where they are written."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO)


def output_failed(error: OSError) -> int:
    """Say that our output cannot be written: the exit code."""
    reader_gone()
    print(f"nearsight: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def unexpected(error: Exception, arguments: Sequence[str]) -> int:
    """Print an unexpected error in one line, with the file that has its traceback: the exit code."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_SAID]
    trace = "".join(traceback.format_exception(error))
    try:
        # Only the user can read it, since paths and arguments are in it, and no link can have been put there.
        descriptor, path = tempfile.mkstemp(prefix="nearsight-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(f"nearsight {_installed_version() or ''} {shlex.join(arguments)}\n\n{trace}")
        place = f"the whole error is in {path}"
    except OSError:
        place = "--debug shows the whole error"
    print(f"nearsight: an unexpected error: {said}; {GOES_ON}; {place}", file=sys.stderr)
    return 1


def answered(arguments: Sequence[str], known_version: str | None) -> int | None:
    """Print help or the version, if that is asked for and known: the exit code, otherwise None."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0 if arguments else nothing_named("command")
    if arguments[0] in USAGES and arguments[1:] in ([], ["-h"], ["--help"]):
        return print_usage(arguments[0], arguments[1:])
    if arguments[0] == "--version" and known_version is not None:
        print(known_version)
        return 0
    return None


def print_usage(command: str, arguments: Sequence[str]) -> int:
    """Print how a command is used, if help was asked for or no arguments were given: the exit code."""
    print(USAGES[command])
    return 0 if arguments else nothing_named(MISSING[command], f" {command}")


def nothing_named(what: str, command: str = "") -> int:
    """Say that a command lacks its first word: the exit code."""
    print(f"nearsight: no {what} is named; see nearsight{command} --help", file=sys.stderr)
    return 2


def _installed_version() -> str | None:
    """None where the package is not installed, but found by its path."""
    try:
        return version("nearsight")
    except PackageNotFoundError:
        return None
