"""ImageNet, what was made of it, and your own images: trees with a folder per class, shards, or parquet files."""

from pathlib import Path

from nearsight.data.image_folder import open_tree
from nearsight.data.parquet import open_parquet
from nearsight.data.registry import DatasetSpec, Download, Finder, HubDownload, Source, register_dataset
from nearsight.data.shards import open_shards

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _in_folders(*names: str) -> Finder:
    """Finds parquet files, shards or a tree of images in the first of these folders that is there."""

    def find(data_dir: Path, image_size: int) -> Source | None:
        for name in names:
            if (data_dir / name).is_dir():
                folder = data_dir / name
                return (
                    open_parquet(folder, image_size) or open_shards(folder, image_size) or open_tree(folder, image_size)
                )
        return None

    return find


register_dataset(
    "imagenette",
    DatasetSpec(
        about="Imagenette: ten easy classes of ImageNet (fast.ai)",
        find=_in_folders("imagenette2-160", "imagenette2-320", "imagenette2"),
        num_classes=10,
        num_train=9_469,
        num_test=3_925,
        image_size=160,
        other_sizes=True,
        balanced=False,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        downloads=(
            Download(
                url="https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz",
                md5="e793b78cc4c9e9a4ccc0c1155377a412",
                folder="imagenette2-160",
            ),
        ),
    ),
)
register_dataset(
    "mini-imagenet",
    DatasetSpec(
        about="mini-ImageNet: 100 classes, as parquet files or a tree; its validation set is the test set",
        find=_in_folders("mini-imagenet"),
        num_classes=100,
        image_size=224,
        other_sizes=True,
        balanced=False,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        downloads=(HubDownload(repository="timm/mini-imagenet", folder="mini-imagenet"),),
    ),
)
register_dataset(
    "imagenet",
    DatasetSpec(
        about="ImageNet-1k (Russakovsky et al. 2015): train and val, a folder per class; ask its makers for it",
        find=_in_folders("imagenet"),
        num_classes=1000,
        num_train=1_281_167,
        num_test=50_000,
        image_size=224,
        other_sizes=True,
        balanced=False,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
    ),
)
register_dataset(
    "image-folder",
    DatasetSpec(
        about="your own: the data folder itself is a tree with a folder per class, or holds shards or parquet files",
        find=_in_folders("."),
        image_size=224,
        other_sizes=True,
        balanced=False,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
    ),
)
