"""Recipes of single runs by name: small functions that return what to train.

The compact ViT of S1 from scratch on each of its data sets, and on the embedded one; S2's training at 224 pixels, with
the schedule of the data set and the augmentations of a protocol; and the run of the demo. (Those of pretraining are
`nearsight.train.dino.recipes`.)
"""

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any

from nearsight.augment import AUGMENTATIONS, ColorJitter
from nearsight.errors import unknown_name
from nearsight.models import ModelConfig
from nearsight.train.config import PROTOCOLS, DataConfig, Protocol, RunConfig, baseline, locat

RunRecipe = Callable[[str], RunConfig]
"""From the name of a protocol to a run."""

RUNS: dict[str, RunRecipe] = {}
"""Single training runs, for `nearsight train`."""

_TINY = ModelConfig(patch_size=16, depth=12, width=192, num_heads=3, mlp_width=768)
"""ViT-Tiny. Small is `--model.width 384 --model.num-heads 6 --model.mlp-width 1536 --protocol.drop-path 0.2`, Base
`--model.width 768 --model.num-heads 12 --model.mlp-width 3072 --protocol.drop-path 0.4`; LocAt is `--model.gaug
--model.prr`."""


OPTIONS = {"weights": "init", "weights_normalized": "init-normalized"}
"""Field of a run → its option, where that has another name: `init` in a study's factors is that of the model."""


def run_recipe(name: str) -> Callable[[RunRecipe], RunRecipe]:
    """Register a recipe for a single run under `name`."""

    def register(recipe: RunRecipe) -> RunRecipe:
        assert name not in RUNS, name
        RUNS[name] = recipe
        return recipe

    return register


def find_run(name: str) -> RunRecipe:
    if name not in RUNS:
        raise unknown_name("recipe", name, RUNS)
    return RUNS[name]


def protocol_named(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise unknown_name("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]()


@run_recipe("compact-cifar100")
def compact_cifar100(protocol: str) -> RunConfig:
    """The compact ViT on CIFAR-100 (S1, Table 1; the paper: 48.53 % Baseline, 63.38 % Modern).

    Run     nearsight train compact-cifar100 --protocol modern
    Cost    up to 600 epochs of 40,000 images; about 110 images/s on 2 CPU cores, so a GPU is needed
    """
    return RunConfig(data=DataConfig(name="cifar100"), protocol=protocol_named(protocol))


@run_recipe("compact-cifar10")
def compact_cifar10(protocol: str) -> RunConfig:
    """The compact ViT on CIFAR-10 (S1, Table 1; the paper: 78.46 % Baseline, 84.84 % Modern).

    Run     nearsight train compact-cifar10 --protocol modern
    Cost    as compact-cifar100
    """
    return RunConfig(data=DataConfig(name="cifar10"), protocol=protocol_named(protocol))


@run_recipe("compact-tiny-imagenet")
def compact_tiny_imagenet(protocol: str) -> RunConfig:
    """The compact ViT on Tiny-ImageNet (S1, Table 1; the paper: 34.89 % Baseline, 41.92 % Modern).

    Patches of 8 keep the 8×8 grid. Modern has ColorJitter in the place of AutoAugment; the schedule is longer and
    gentler (S1 §4.3.1).

    Run     nearsight train compact-tiny-imagenet --protocol modern
    Cost    up to 400 epochs of 80,000 images
    """
    start = protocol_named(protocol)
    if start.augmentation("autoaugment") is not None:
        start = start.without("autoaugment").with_(ColorJitter())
    gentler = dataclasses.replace(start, lr=5e-4, batch_size=64, max_epochs=400, warmup_epochs=10, patience=30)
    return RunConfig(model=ModelConfig(patch_size=8), data=DataConfig(name="tiny-imagenet"), protocol=gentler)


@run_recipe("compact-shapes")
def compact_shapes(protocol: str) -> RunConfig:
    """A small compact ViT on the embedded set: minutes on a laptop, nothing to download.

    Run     nearsight train compact-shapes --protocol baseline
    """
    short = dataclasses.replace(protocol_named(protocol), max_epochs=20, warmup_epochs=2)
    return RunConfig(
        model=ModelConfig(depth=4, width=96, num_heads=4, mlp_width=192),
        data=DataConfig(name="shapes"),
        protocol=short,
        num_measured=1000,
    )


@run_recipe("vit-shapes")
def vit_shapes(protocol: str) -> RunConfig:
    """A small ViT of timm on the embedded set: any model of timm can be tried so, in minutes, with nothing to download.

    Run     nearsight train vit-shapes --model.name vit_tiny_patch16_reg4_224 --model.settings patch_size=4 depth=4
    """
    model = ModelConfig(name="vit_tiny_patch16_224", settings=("patch_size=4", "depth=4", "embed_dim=96"))
    short = dataclasses.replace(protocol_named(protocol), max_epochs=10, warmup_epochs=1)
    return RunConfig(model=model, data=DataConfig(name="shapes"), protocol=short, num_measured=1000)


@run_recipe("vit-tiny-imagenet")
def vit_tiny_imagenet(protocol: str) -> RunConfig:
    """ViT-Tiny of timm on Tiny-ImageNet at 64 pixels; any backbone of S2 by its name and settings.

    For 8×8 patches --model.settings patch_size=8; Swin: --model.name swin_tiny_patch4_window7_224 --model.settings
    patch_size=2 window_size=4 embed_dim=48 depths=(2,2,6,2); LocAt: --model.gaug --model.prr. Jumbo learns from a
    teacher: --protocol.teacher RUN.

    Run     nearsight train vit-tiny-imagenet --protocol locat --model.gaug --model.prr
    Cost    100 epochs of 95,000 images of 64 pixels; needs a GPU
    Result  not run yet
    """
    model = ModelConfig(name="vit_tiny_patch16_224", settings=("patch_size=8",))
    data = DataConfig(name="tiny-imagenet", validation_fraction=0.05)
    run = _at_224(protocol, data, lr=5e-4, epochs=100, warmup=10)
    return dataclasses.replace(run, model=model, protocol=dataclasses.replace(run.protocol, batch_size=256))


@run_recipe("vit-folder")
def vit_folder(protocol: str) -> RunConfig:
    """Any ViT of timm on pictures of your own, a folder per class, at 224 pixels; from weights that it has, or fresh.

    Pictures are streamed, as in vit-imagenet.

    Run     nearsight train vit-folder --data-dir FOLDER --model.name vit_small_patch16_224 --init pretrained
    Cost    30 epochs of your pictures; a GPU helps
    """
    data = DataConfig(name="image-folder", image_size=224, validation_fraction=0.1, stream=True, crop_pct=0.875)
    run = _at_224(protocol, data, lr=2e-4, epochs=30, warmup=3)
    model = ModelConfig(name="vit_tiny_patch16_224")
    return dataclasses.replace(run, model=model, protocol=dataclasses.replace(run.protocol, batch_size=64))


@run_recipe("vit-imagenet")
def vit_imagenet(protocol: str) -> RunConfig:
    """ViT-Tiny on ImageNet-1K (S2, Table 1; the paper: 72.39 %, with LocAt 73.94 %).

    Any other model by its name: --model.name swin_tiny_patch4_window7_224 --model.gaug --model.prr. Pictures are
    streamed: random crops are those of whole pictures, and 224 of 256 pixels are evaluated; parquet files need
    --data.no-stream --data.crop-pct 1.

    Run     nearsight train vit-imagenet --protocol locat
    Cost    300 epochs of 1,268,000 images of 224 pixels; needs several GPUs' worth of days, and the data
    Result  not run yet
    """
    data = DataConfig(name="imagenet", validation_fraction=0.01, stream=True, crop_pct=0.875)
    return _at_224(protocol, data, lr=1e-3, epochs=300, warmup=20)


@run_recipe("vit-mini-imagenet")
def vit_mini_imagenet(protocol: str) -> RunConfig:
    """ViT-Tiny on mini-ImageNet (S2, Table 3; the paper: 74.94 %, with LocAt 78.47 %).

    Run     nearsight train vit-mini-imagenet --protocol locat
    Cost    600 epochs of 47,500 images of 224 pixels; needs a GPU
    Result  not run yet
    """
    return _at_224(
        protocol, DataConfig(name="mini-imagenet", validation_fraction=0.05), lr=5e-4, epochs=600, warmup=120
    )


@run_recipe("vit-cifar100-224")
def vit_cifar100_224(protocol: str) -> RunConfig:
    """ViT-Tiny on CIFAR-100, enlarged to 224 pixels (S2, Table 3; the paper: 73.84 %, with LocAt 80.43 %).

    Run     nearsight train vit-cifar100-224 --protocol locat
    Cost    600 epochs of 47,500 images of 224 pixels; needs a GPU
    Result  not run yet
    """
    data = DataConfig(name="cifar100", image_size=224, validation_fraction=0.05)
    return _at_224(protocol, data, lr=5e-4, epochs=600, warmup=120)


def _at_224(protocol: str, data: DataConfig, *, lr: float, epochs: int, warmup: int) -> RunConfig:
    """S2 trains on every image and reports the test set; here some are held out to choose the best epoch."""
    chosen = protocol_named(protocol)
    scheduled = dataclasses.replace(
        locat(),
        lr=lr,
        max_epochs=epochs,
        warmup_epochs=warmup,
        patience=epochs,
        augment=chosen.augment,
        smoothing=chosen.smoothing,
    )
    return RunConfig(model=_TINY, data=data, protocol=scheduled, precision="bf16")


def trained_for(run: RunConfig, epochs: int) -> RunConfig:
    """The run with a schedule of so many epochs, all of which are trained; the best epoch's model is still the one
    that is tested. bf16, as in all studies that need a GPU."""
    protocol = dataclasses.replace(run.protocol, max_epochs=epochs, patience=epochs)
    return dataclasses.replace(run, protocol=protocol, precision="bf16")


def command_of(config: RunConfig) -> str | None:
    """The shortest `nearsight train …` that trains this run; None where its options cannot say it."""
    protocol = config.protocol
    said = dataclasses.replace(protocol, augment=())
    for augmentation in filter(None, map(protocol.augmentation, AUGMENTATIONS)):
        said = said.with_(augmentation)
    if said != protocol:  # another order than that of the options, or one that is there twice
        return None
    calls = (_call(name, protocol, config) for name in RUNS for protocol in PROTOCOLS)
    return min((shlex.join(["nearsight", "train", *call]) for call in calls), key=len)


def _call(name: str, protocol: str, wanted: RunConfig) -> list[str]:
    """What to add to a recipe and a protocol."""
    start, options = RUNS[name](protocol), [name, "--protocol", protocol]
    if not start.model.is_like(wanted.model):  # then the recipe's own network counts no more
        options += ["--model.name", wanted.model.name]
        start = dataclasses.replace(start, model=ModelConfig(name=wanted.model.name))
    for section in ("model", "data", "protocol"):
        options += _options(f"--{section}.", getattr(start, section), getattr(wanted, section))
    for kind in AUGMENTATIONS.values():
        held = start.protocol.augmentation(kind.name) or dataclasses.replace(kind(), p=0.0)
        asked = wanted.protocol.augmentation(kind.name) or dataclasses.replace(held, p=0.0)
        options += _options(f"--protocol.{kind.name}.", held, asked)
    return options + _options("--", start, wanted)


def _options(prefix: str, start: Any, wanted: Any) -> list[str]:
    """The fields in which two configs differ, as options; those that are configs have options of their own."""
    options: list[str] = []
    for field in dataclasses.fields(start):
        value = getattr(wanted, field.name)
        if value == getattr(start, field.name) or dataclasses.is_dataclass(value) or field.name == "augment":
            continue
        name = OPTIONS.get(field.name, field.name) if isinstance(start, RunConfig) else field.name
        if isinstance(value, bool):
            options.append(f"{prefix}{'' if value else 'no-'}{name}".replace("_", "-"))
        else:
            values = value if isinstance(value, tuple) else (value,)
            options += [f"{prefix}{name}".replace("_", "-"), *map(str, values)]
    return options


def demo_run(*, seed: int = 0, epochs: int = 7, num_train: int = 4500) -> RunConfig:
    """The plain ViT that `nearsight demo` trains beside one with LocAt, on the embedded set."""
    protocol = dataclasses.replace(
        baseline(), max_epochs=epochs, warmup_epochs=min(2, epochs), patience=epochs, batch_size=64, lr=4e-3
    )
    return RunConfig(
        model=ModelConfig(depth=3, width=64, num_heads=4, mlp_width=128),
        data=DataConfig(name="shapes", num_train=num_train, num_test=1000),
        protocol=protocol,
        seed=seed,
        num_measured=500,
        measure_every=1,
        num_measured_during=128,
    )
