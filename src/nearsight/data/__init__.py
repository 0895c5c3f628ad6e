"""Where images come from: one file per data set family, splits, and batches that live on the device."""

from nearsight.data.check import check_dataset
from nearsight.data.dataset import Dataset, ImageSet
from nearsight.data.device import DeviceImages
from nearsight.data.fetch import fetch_dataset
from nearsight.data.findings import CheckReport, Finding
from nearsight.data.image_folder import folder_images
from nearsight.data.listing import ListedDataset, list_datasets
from nearsight.data.loading import load_dataset
from nearsight.data.locations import data_folder
from nearsight.data.order import epoch_batches
from nearsight.data.registry import DATASETS
from nearsight.data.shapes import make_shapes
from nearsight.data.source import DatasetSpec
from nearsight.data.splits import balanced_subset, measuring_subset, stratified_split

__all__ = [
    "DATASETS",
    "CheckReport",
    "Dataset",
    "DatasetSpec",
    "DeviceImages",
    "Finding",
    "ImageSet",
    "ListedDataset",
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
    "stratified_split",
]
