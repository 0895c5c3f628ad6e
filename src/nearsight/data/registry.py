"""The data sets by name. A new one is a file that finds it and a line here."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from nearsight.data.cifar import find_cifar10, find_cifar100
from nearsight.data.downloads import Download, HubDownload
from nearsight.data.image_folder import open_tree
from nearsight.data.parquet import open_parquet
from nearsight.data.source import DatasetSpec, Finder, Source
from nearsight.data.svhn import find_svhn
from nearsight.data.tiny_imagenet import find_tiny_imagenet

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _in_folders(*names: str) -> Finder:
    """Finds a tree of images or parquet files in the first of these folders that is there."""

    def find(data_dir: Path, image_size: int) -> Source | None:
        for name in names:
            if (data_dir / name).is_dir():
                return open_parquet(data_dir / name, image_size) or open_tree(data_dir / name, image_size)
        return None

    return find


DATASETS: Mapping[str, DatasetSpec] = MappingProxyType(
    {
        "shapes": DatasetSpec(
            about="ten textured objects on cluttered grounds; drawn by nearsight, nothing to download",
            find=None,
            num_classes=10,
            num_train=10_000,
            num_test=2_000,
            image_size=32,
            other_sizes=True,
            mean=(0.438, 0.438, 0.438),
            std=(0.174, 0.174, 0.174),
        ),
        "cifar10": DatasetSpec(
            about="CIFAR-10 (Krizhevsky 2009)",
            find=find_cifar10,
            num_classes=10,
            num_train=50_000,
            num_test=10_000,
            image_size=32,
            other_sizes=True,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            md5={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
                "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
            },
            downloads=(
                Download(
                    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                    md5="c58f30108f718f92721af3b95e74349a",
                    folder="cifar-10-batches-py",
                ),
            ),
        ),
        "cifar100": DatasetSpec(
            about="CIFAR-100 (Krizhevsky 2009), the 100 fine classes",
            find=find_cifar100,
            num_classes=100,
            num_train=50_000,
            num_test=10_000,
            image_size=32,
            other_sizes=True,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            md5={
                "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
                "test.bin": "4499cfba6c016c1be1438163640a0898",
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "meta": "7973b15100ade9c7d40fb424638fde48",
            },
            downloads=(
                Download(
                    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                    md5="eb9058c3a382ffc7106e4002c42a8d85",
                    folder="cifar-100-python",
                ),
            ),
        ),
        "tiny-imagenet": DatasetSpec(
            about="Tiny-ImageNet-200 (Stanford CS231n); the labelled validation set is the test set",
            find=find_tiny_imagenet,
            num_classes=200,
            num_train=100_000,
            num_test=10_000,
            image_size=64,
            mean=(0.4802, 0.4481, 0.3975),
            std=(0.2770, 0.2691, 0.2821),
            md5={
                "wnids.txt": "6c81990e2d7ae3bd3c88dceb97b46342",
                "val/val_annotations.txt": "e9a8a28f9975223592f4c6da9fd2369b",
            },
            downloads=(
                Download(
                    url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                    md5="90528d7ca1a48142e341f4ef8d21d0de",
                    folder="tiny-imagenet-200",
                ),
            ),
        ),
        "svhn": DatasetSpec(
            about="SVHN, cropped digits (Netzer et al. 2011)",
            find=find_svhn,
            num_classes=10,
            num_train=73_257,
            num_test=26_032,
            image_size=32,
            balanced=False,
            mean=(0.4377, 0.4438, 0.4728),
            std=(0.1980, 0.2010, 0.1970),
            md5={
                "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
            },
            downloads=(
                Download(
                    url="http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                    md5="e26dedcc434d2e4c54c9b2d4a06d8373",
                    folder="svhn",
                ),
                Download(
                    url="http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                    md5="eb5a983be6a315427106f1b164d9cef3",
                    folder="svhn",
                ),
            ),
        ),
        "imagenette": DatasetSpec(
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
        "mini-imagenet": DatasetSpec(
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
        "imagenet": DatasetSpec(
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
        "image-folder": DatasetSpec(
            about="your own: the data folder itself is a tree with a folder per class, or holds parquet files",
            find=_in_folders("."),
            image_size=224,
            other_sizes=True,
            balanced=False,
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
        ),
    }
)
