"""Where images come from: one file per data set family, splits, and batches that live on the device.

A new data set is one file here, or anywhere else, that calls `register_dataset`.
"""

import importlib
import pkgutil

from nearsight.data.check import CheckReport, Finding, ListedDataset, check_dataset, list_datasets
from nearsight.data.dataset import Dataset, ImageSet, balanced_subset, epoch_batches, measuring_subset, stratified_split
from nearsight.data.device import DeviceImages
from nearsight.data.fetch import fetch_dataset
from nearsight.data.image_folder import folder_images
from nearsight.data.loading import load_dataset
from nearsight.data.locations import data_folder
from nearsight.data.registry import DATASETS, DatasetSpec, Source, register_dataset
from nearsight.data.shapes import make_shapes

# Modules register their data sets. These come first because `shapes` and they are listed in this order.
for _name in (
    "cifar100_sample",
    "cifar",
    "tiny_imagenet",
    "svhn",
    *(module.name for module in pkgutil.iter_modules(__path__)),
):
    importlib.import_module(f"nearsight.data.{_name}")

__all__ = [
    "DATASETS",
    "CheckReport",
    "Dataset",
    "DatasetSpec",
    "DeviceImages",
    "Finding",
    "ImageSet",
    "ListedDataset",
    "Source",
    "balanced_subset",
    "check_dataset",
    "data_folder",
    "epoch_batches",
    "fetch_dataset",
    "folder_images",
    "list_datasets",
    "load_dataset",
    "make_shapes",
    "measuring_subset",
    "register_dataset",
    "stratified_split",
]
