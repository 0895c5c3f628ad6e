"""Parts of a subject's images: together they are all of them, as they are prepared at once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from nearsight.commands.pictures import Images, PreparedImages, RunImages, find_pictures
from nearsight.commands.subjects import Subject, images_record, part_of
from nearsight.data import load_dataset

CONFIG = {"input_size": (3, 16, 16), "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "interpolation": "bilinear"}


def some_images(kind: str, folder: Path) -> Images:
    if kind == "a run's own":
        return RunImages(load_dataset("shapes", num_train=1, num_test=20), 13, torch.device("cpu"))
    if kind == "embedded":
        return PreparedImages(find_pictures(None, 13, None), CONFIG)
    random = np.random.default_rng(0)
    (folder / "below").mkdir(parents=True)
    for number in range(13):
        pixels = random.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("below" if number % 2 else ".") / f"{number}.png")
    return PreparedImages(find_pictures(str(folder), 13, None), CONFIG)


@pytest.mark.parametrize("kind", ["a run's own", "embedded", "files"])
def test_parts_together_are_the_whole(kind: str, tmp_path: Path) -> None:
    images = some_images(kind, tmp_path / "images")
    whole = Subject(text="m", label="m", model=nn.Identity(), images=images, image_size=(16, 16))
    parts = [part_of(whole, span) for span in (range(4), range(4, 5), range(5, 13))]
    assert [len(part.images) for part in parts] == [4, 1, 8]
    seen = torch.cat([batch for part in parts for batch in part.images.batches(3)])
    assert torch.equal(seen, torch.cat(list(images.batches(5))))
    records = [images_record(part.images) for part in (whole, *parts)]
    assert all(records.count(record) == 1 for record in records)
    assert images_record(some_images(kind, tmp_path / "copied")) == records[0]
    if isinstance(images, PreparedImages):
        assert images_record(replace(images, data_config={**CONFIG, "mean": (0, 0, 0)})) != records[0]
