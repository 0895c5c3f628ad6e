"""What `nearsight COMMAND --help` prints of the commands that have more commands, or recipes, below them.

Here, so that it comes at once, as all of `nearsight_command` does. What is told of recipes and benchmarks is the first
line of their own text; a test holds the two equal.
"""

from collections.abc import Mapping

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
"""Command → what it prints where nothing more is said, or --help."""

MISSING = {"train": "recipe", "study": "action", "probe": "probe", "data": "action", "bench": "benchmark"}
"""Command → what has to come next."""
