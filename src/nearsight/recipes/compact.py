"""S1's compact ViT, trained from scratch on each of its data sets, and on the embedded one."""

import dataclasses

from nearsight.augment import ColorJitter
from nearsight.errors import unknown_name
from nearsight.models import ModelConfig
from nearsight.study.recipes import run_recipe
from nearsight.train import PROTOCOLS, DataConfig, Protocol, RunConfig


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
