"""S2's training from scratch at 224 pixels: the schedule of the data set, the augmentations of a protocol.

All are ViT-Tiny. Small is `--model.width 384 --model.num-heads 6 --model.mlp-width 1536 --protocol.drop-path 0.2`, Base
`--model.width 768 --model.num-heads 12 --model.mlp-width 3072 --protocol.drop-path 0.4`; LocAt is `--model.gaug
--model.prr`. S2 trains on every image and reports the test set; here some are held out to choose the best epoch.
"""

import dataclasses

from nearsight.models import ModelConfig
from nearsight.recipes.compact import protocol_named
from nearsight.study.recipes import run_recipe
from nearsight.train import DataConfig, RunConfig, locat

_TINY = ModelConfig(patch_size=16, depth=12, width=192, num_heads=3, mlp_width=768)


@run_recipe("vit-imagenet")
def vit_imagenet(protocol: str) -> RunConfig:
    """ViT-Tiny on ImageNet-1K (S2, Table 1; the paper: 72.39 %, with LocAt 73.94 %).

    Run     nearsight train vit-imagenet --protocol locat
    Cost    300 epochs of 1,268,000 images of 224 pixels; needs several GPUs' worth of days, and the data
    Result  not run yet
    """
    return _run(protocol, DataConfig(name="imagenet", validation_fraction=0.01), lr=1e-3, epochs=300, warmup=20)


@run_recipe("vit-mini-imagenet")
def vit_mini_imagenet(protocol: str) -> RunConfig:
    """ViT-Tiny on mini-ImageNet (S2, Table 3; the paper: 74.94 %, with LocAt 78.47 %).

    Run     nearsight train vit-mini-imagenet --protocol locat
    Cost    600 epochs of 47,500 images of 224 pixels; needs a GPU
    Result  not run yet
    """
    return _run(protocol, DataConfig(name="mini-imagenet", validation_fraction=0.05), lr=5e-4, epochs=600, warmup=120)


@run_recipe("vit-cifar100-224")
def vit_cifar100_224(protocol: str) -> RunConfig:
    """ViT-Tiny on CIFAR-100, enlarged to 224 pixels (S2, Table 3; the paper: 73.84 %, with LocAt 80.43 %).

    Run     nearsight train vit-cifar100-224 --protocol locat
    Cost    600 epochs of 47,500 images of 224 pixels; needs a GPU
    Result  not run yet
    """
    data = DataConfig(name="cifar100", image_size=224, validation_fraction=0.05)
    return _run(protocol, data, lr=5e-4, epochs=600, warmup=120)


def _run(protocol: str, data: DataConfig, *, lr: float, epochs: int, warmup: int) -> RunConfig:
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
