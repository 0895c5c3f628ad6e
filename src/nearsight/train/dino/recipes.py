"""Self-supervised pretraining by DINO (Caron et al. 2021), as S2 compares ViT and LocAt by (§5.2, Table 3).

All are ViTs; LocAt is `--model.gaug --model.prr`. What is left in the run folder is the teacher's backbone, for
`nearsight probe` and `nearsight measure`.
"""

from collections.abc import Callable

from nearsight.models import ModelConfig
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol, ImagesConfig

PretrainingRecipe = Callable[[], DinoConfig]

PRETRAININGS: dict[str, PretrainingRecipe] = {}
"""Pretraining runs, for `nearsight train`."""


def pretraining(name: str) -> Callable[[PretrainingRecipe], PretrainingRecipe]:
    """Register a recipe for a pretraining run under `name`."""

    def register(recipe: PretrainingRecipe) -> PretrainingRecipe:
        assert name not in PRETRAININGS, name
        PRETRAININGS[name] = recipe
        return recipe

    return register


@pretraining("dino-imagenet")
def dino_imagenet() -> DinoConfig:
    """DINO pretraining of ViT-S/16 on ImageNet-1K (S2, Table 3): 50 epochs, the original defaults.

    Images are kept at 224 pixels and crops are taken from those; the original crops before it scales down.

    Run     nearsight train dino-imagenet
    Cost    50 epochs of 1,281,167 images in 10 views; needs several GPUs' worth of days, and the data
    Result  not run
    """
    return DinoConfig(
        model=ModelConfig(patch_size=16, depth=12, width=384, num_heads=6, mlp_width=1536),
        data=ImagesConfig(name="imagenet", image_size=224),
        protocol=DinoProtocol(epochs=50),
        precision="bf16",
    )


@pretraining("dino-tiny-imagenet")
def dino_tiny_imagenet() -> DinoConfig:
    """DINO pretraining of the compact ViT on Tiny-ImageNet.

    Patches of 8 make a grid of 8×8, and of 4×4 in local crops of 32 pixels. Crops are as Gani et al. (2022) choose
    them, who pretrain a ViT of this size on these images. Fewer prototypes, a smaller head and a smaller batch than the
    original's, for a smaller model, a twelfth of the images and few steps (assumed).

    Run     nearsight train dino-tiny-imagenet
    Cost    100 epochs of 100,000 images in 10 views: 10 minutes of one H200 and a minute to compile
    Result  see results/dense/dino, of 90 epochs
    """
    return DinoConfig(
        model=ModelConfig(patch_size=8),
        data=ImagesConfig(name="tiny-imagenet"),
        crops=CropsConfig(
            min_global_area=0.5,
            local_size=32,
            # 29 to 40 pixels wide, so that a local crop shows objects as large as a global one does. From the
            # original's 0.05 on, some would be 14 pixels wide, of which 32 are made.
            min_local_area=0.2,
            # As wide as the original's relative to the image.
            max_sigma=0.6,
        ),
        protocol=DinoProtocol(
            batch_size=512,
            # A model of this size does not overfit in 20,000 steps, and blocks that may be dropped are not fused.
            drop_path=0.0,
            # Where the original's warm-up begins, and its code's default: the paper finds hardly a difference. With few
            # prototypes a warmer teacher comes to say nearly the same of all images.
            teacher_temperature=0.04,
            num_prototypes=4096,
            hidden=1024,
        ),
        precision="bf16",
    )


@pretraining("dino-shapes")
def dino_shapes() -> DinoConfig:
    """DINO pretraining of a small ViT on the embedded set: to see it work, nothing to download.

    Not to see it succeed: here colours and ground, which crops of an image share, say nothing about its class.
    A teacher that follows faster than the original's, since there are few steps, and that stays sharp: with 512
    prototypes, a temperature of 0.07 lets it say nearly the same of all images.

    Run     nearsight train dino-shapes
    Cost    20 epochs of 2,000 images in 6 views; minutes on one CPU core
    """
    return DinoConfig(
        model=ModelConfig(patch_size=8, depth=4, width=96, num_heads=4, mlp_width=192),
        data=ImagesConfig(name="shapes", num_train=2000),
        crops=CropsConfig(num_local=4, local_size=16, max_sigma=0.3),
        protocol=DinoProtocol(
            epochs=20,
            batch_size=64,
            lr=2e-3,
            warmup_epochs=2,
            momentum=0.99,
            teacher_temperature=0.04,
            num_prototypes=512,
            hidden=256,
            bottleneck=64,
        ),
    )
