"""The images of a subject in parts, and what tells them from others wherever they are."""

import hashlib
import os
from dataclasses import replace
from typing import Any

from nearsight.commands.pictures import FilePictures, Images, Pictures, PreparedImages, RunImages
from nearsight.commands.subjects import Subject
from nearsight.data import measuring_subset


def part_of(subject: Subject, span: range) -> Subject:
    """A subject with some of its images."""
    images: Images = subject.images
    if isinstance(images, PreparedImages):
        images = replace(images, pictures=_some(images.pictures, span))
    else:
        chosen = measuring_subset(len(images.dataset.test), images.num_images)[span.start : span.stop]
        dataset = replace(images.dataset, test=images.dataset.test.select(chosen))
        images = RunImages(dataset, len(span), images.device)
    return replace(subject, images=images)


def _some(pictures: Pictures, span: range) -> Pictures:
    if isinstance(pictures, FilePictures):
        return replace(pictures, paths=pictures.paths[span.start : span.stop])
    return replace(pictures, images_NCHW=pictures.images_NCHW[span.start : span.stop])


def images_record(images: Images) -> dict[str, Any]:
    """Which images, and how they are prepared; not where they are."""
    if isinstance(images, PreparedImages):
        return {"pictures": _pictures_hash(images.pictures), "preparation": dict(images.data_config)}
    return {"data": images.dataset.fingerprint, "num": len(images)}


def _pictures_hash(pictures: Pictures) -> str:
    """Of pixels in memory; of files their names and sizes: to read all of them would take as long as to measure."""
    digest = hashlib.sha256()
    if isinstance(pictures, FilePictures):
        root = os.path.commonpath([path.parent for path in pictures.paths])
        for path in pictures.paths:
            digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
    else:
        digest.update(str(list(pictures.images_NCHW.shape)).encode())
        digest.update(pictures.images_NCHW.contiguous().numpy().data)
    return digest.hexdigest()
