"""From JPEG files to batches that a model takes: ours against timm's default loader and torchvision's, side by side.

Each way goes through whole epochs of the same pictures in turn, after one to warm up, with as many processes as there
are cores. timm's is `create_loader` with its defaults for training (random resized crop, flip, ColorJitter 0.4) and a
worker per core; torchvision's is an ImageFolder in a DataLoader with v2 transforms (random resized crop, flip,
normalise). Both end at normalised float32 batches on the device, and so does ours with crop and flip; another row has
timm's jitter, too, on the device, and another does without simplejpeg where that is installed.

On a GPU the last part costs the cores nothing: ours flips, timm's and ours normalise there. Rows of bytes show what is
left to the cores: timm's batches before they are normalised, ours before they are flipped and normalised.

Pictures are drawn: grey levels whose spectrum falls with the frequency, as that of photographs does, weaker in their
colours, 500×375 or upright, at JPEG quality 90 (some 120 KB each; ImageNet's have 110). `--folder` takes others.

How far a reduced decode is from a full one is measured on larger pictures, four times as wide and high as a result:
the same crops both ways, the mean difference in grey levels and the PSNR. What it saves is the ratio there.

    nearsight bench input
"""

import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_loader
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

from nearsight.augment import Augmentation, ColorJitter, HorizontalFlip, Pipeline, ResizedCrop
from nearsight.bench.costs import wait_for
from nearsight.data import cropping, epoch_batches
from nearsight.data.cropping import Crop, cropped, reduction
from nearsight.data.image_folder import open_tree
from nearsight.data.pictures import Pictures
from nearsight.data.streaming import StreamedImages, cropped_before, num_decoders
from nearsight.errors import InputError, check_at_least
from nearsight.randomness import Draws

_SIZE = 224
_QUALITY = 90
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_NUM_CLASSES = 10
_NUM_LARGE = 16
Epoch = Callable[[], int]
"""Goes through the pictures once; how many they were."""


@dataclass(frozen=True, kw_only=True)
class InputRow:
    """One way of loading, or one reduction, measured."""

    what: str
    device: str
    num_processes: int
    images_per_second: float
    ratio: float
    """Against timm's default loader, of bytes to its bytes; of a reduction, to the full decode."""
    ratio_torchvision: float | None
    """Against torchvision's; None: of a reduction."""
    mean_difference: float | None
    """From the full decode, in grey levels; None: not reduced."""
    psnr: float | None
    """Of the difference, in decibels."""


def bench_input(
    *,
    device: str,
    folder: Path | None = None,
    num_images: int = 512,
    batch_size: int = 64,
    num_turns: int = 5,
) -> list[InputRow]:
    """Every way in turn; rates are medians over the turns, and so are the ratios within a turn."""
    check_at_least("num_images", num_images, _NUM_CLASSES)
    check_at_least("batch_size", batch_size, 1)
    check_at_least("num_turns", num_turns, 1)
    if num_images < batch_size:
        raise InputError(f"num_images is {num_images}, but one batch needs {batch_size}; take more, or a smaller batch")
    with _pictures(folder, num_images) as root:
        ways = _ways(root, batch_size, torch.device(device))
        for epoch in ways.values():
            epoch()
        rates: dict[str, list[float]] = {what: [] for what in ways}
        for _, (what, epoch) in itertools.product(range(num_turns), ways.items()):
            began = time.perf_counter()
            num = epoch()
            rates[what].append(num / (time.perf_counter() - began))
        rows = [
            _row(what, device, of_way, rates["timm, bytes" if what.endswith("bytes") else "timm"], rates["torchvision"])
            for what, of_way in rates.items()
        ]
    return rows + _reductions(device)


def _row(what: str, device: str, rates: list[float], timm: list[float], torchvision: list[float]) -> InputRow:
    def median(peer: list[float]) -> float:
        return statistics.median(own / other for own, other in zip(rates, peer, strict=True))

    return InputRow(
        what=what,
        device=device,
        num_processes=num_decoders(),
        images_per_second=statistics.median(rates),
        ratio=median(timm),
        ratio_torchvision=median(torchvision),
        mean_difference=None,
        psnr=None,
    )


@contextmanager
def _pictures(folder: Path | None, num: int) -> Iterator[Path]:
    """A tree with a folder per class; drawn ones are gone afterwards."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        generator = np.random.default_rng(0)
        drawn = [*(("train", number) for number in range(num)), *(("val", number) for number in range(_NUM_CLASSES))]
        for part, number in drawn:
            path = Path(made) / part / f"class{number % _NUM_CLASSES}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            sides = (500, 375) if number % 4 else (375, 500)
            drawn_photo(generator, *sides).save(path, quality=_QUALITY)
        yield Path(made)


def drawn_photo(generator: np.random.Generator, width: int, height: int) -> Image.Image:
    """A picture with the spectrum of photographs: amplitudes of one over the frequency."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf

    def field(deviation: float) -> Any:
        noise = generator.standard_normal(frequency.shape) + 1j * generator.standard_normal(frequency.shape)
        levels = np.fft.irfft2(noise / frequency, s=(height, width))
        return deviation * levels / levels.std()

    grey, blue, red = field(50) + 120, field(14), field(14)
    levels_HWC = np.stack([grey + 1.4 * red, grey - 0.34 * blue - 0.71 * red, grey + 1.77 * blue], axis=-1)
    return Image.fromarray(levels_HWC.clip(0, 255).astype(np.uint8))


def _ways(root: Path, batch_size: int, device: torch.device) -> dict[str, Epoch]:
    source = open_tree(root, _SIZE)
    assert source.train_pictures is not None
    pictures = source.train_pictures()
    flip = HorizontalFlip()
    timm = _timm(source.files[0], batch_size, device)
    ways = {
        "timm": lambda: _seen(timm, device),
        "timm, bytes": lambda: _seen(timm.loader, device),
        "torchvision": _torchvision(source.files[0], batch_size, device),
        "nearsight": _ours(pictures, batch_size, device, [flip]),
        "nearsight, jitter": _ours(pictures, batch_size, device, [flip, _jitter()]),
        "nearsight, bytes": _ours(pictures, batch_size, device, None),
    }
    if cropping.simplejpeg() is not None:
        ways["nearsight, Pillow, bytes"] = _ours(pictures, batch_size, device, None, fast=False)
    if device.type == "cuda":
        ways["nvJPEG"] = _nvjpeg(pictures, batch_size, device)
    return ways


def _jitter() -> Augmentation:
    return ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.0)


def _timm(folder: Path, batch_size: int, device: torch.device) -> Any:
    return create_loader(
        create_dataset("", root=str(folder), is_training=True),
        input_size=(3, _SIZE, _SIZE),
        batch_size=batch_size,
        is_training=True,
        num_workers=num_decoders(),
        device=device,
    )


def _torchvision(folder: Path, batch_size: int, device: torch.device) -> Epoch:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(_SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _STD),
        ]
    )
    loader: DataLoader[tuple[Tensor, int]] = DataLoader(
        ImageFolder(str(folder), transform),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_decoders(),
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    return lambda: _seen(((images.to(device), labels.to(device)) for images, labels in loader), device)


def _seen(batches: Any, device: torch.device) -> int:
    num = sum(len(labels) for _, labels in batches)
    wait_for(device)
    return num


def _ours(
    pictures: Pictures, batch_size: int, device: torch.device, further: list[Augmentation] | None, *, fast: bool = True
) -> Epoch:
    """With these augmentations on the device, normalised; None: the crops alone."""
    images = StreamedImages(pictures, device, size=_SIZE)
    images.decoders.fast = fast
    crop, epochs = ResizedCrop(), itertools.count()
    augmentations = [crop, *(further or [])]
    pipeline = cropped_before(
        Pipeline.stack([augmentations], num_classes=len(pictures), mean=_MEAN, std=_STD, device=device)
    )

    def epoch() -> int:
        number = next(epochs)
        seed_K, zero = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor(0, device=device)
        index_SKB = epoch_batches(torch.tensor([0]), number, len(pictures), batch_size)
        crops = images.crops([crop], [0], [number], index_SKB)
        if further is None:
            return _seen(((images_KBCHW, labels_KB[0]) for images_KBCHW, labels_KB in crops), device)
        batches = zip(index_SKB.to(device), crops, strict=True)
        augmented = (
            (pipeline(images_KBCHW, labels_KB, Draws(seed_K, zero + number, zero, index_KB))[0], labels_KB[0])
            for index_KB, (images_KBCHW, labels_KB) in batches
        )
        return _seen(augmented, device)

    return epoch


def _nvjpeg(pictures: Pictures, batch_size: int, device: torch.device) -> Epoch:
    """Whole pictures decoded by the GPU, then cropped and resized there one by one. It has not run yet."""
    generator = torch.Generator().manual_seed(0)

    def epoch() -> int:
        for positions in torch.randperm(len(pictures), generator=generator).split(batch_size):
            contents = [torch.frombuffer(bytearray(pictures.read(p)), dtype=torch.uint8) for p in positions.tolist()]
            decoded = decode_jpeg(contents, mode="RGB", device=device)
            assert isinstance(decoded, list)
            torch.stack([v2.RandomResizedCrop(_SIZE)(picture_CHW) for picture_CHW in decoded])
        torch.cuda.synchronize(device)
        return len(pictures)

    return epoch


def _reductions(device: str) -> list[InputRow]:
    """Crops of larger pictures, reduced while they are decoded and not, by this process."""
    generator = np.random.default_rng(1)
    rows = []
    for by in reversed(cropping.REDUCTIONS):
        side = 5 * by * _SIZE // 4
        crop = Crop(by * 3 + 1, by * 2 + 1, side - 5 * by, side - 9 * by)
        assert reduction(crop, _SIZE) == by
        seconds: list[tuple[float, float]] = []
        squares, differences = 0.0, 0.0
        for _ in range(_NUM_LARGE // by):
            content = _as_jpeg(drawn_photo(generator, side, side))
            reduced, reduced_seconds = _timed(content, crop, reduce=True)
            full, full_seconds = _timed(content, crop, reduce=False)
            seconds.append((reduced_seconds, full_seconds))
            difference = reduced.double() - full.double()
            differences += float(difference.abs().mean())
            squares += float(difference.square().mean())
        num = len(seconds)
        rows.append(
            InputRow(
                what=f"decoded at 1/{by} ({side}×{side})",
                device=device,
                num_processes=1,
                images_per_second=1 / statistics.median(reduced for reduced, _ in seconds),
                ratio=statistics.median(full / reduced for reduced, full in seconds),
                ratio_torchvision=None,
                mean_difference=differences / num,
                psnr=float(10 * np.log10(255**2 * num / squares)),
            )
        )
    return rows


def _as_jpeg(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _timed(content: bytes, crop: Crop, *, reduce: bool) -> tuple[Tensor, float]:
    began = time.perf_counter()
    result = cropped(content, crop, _SIZE, reduce=reduce)
    return result, time.perf_counter() - began


def table(rows: list[InputRow]) -> str:
    lines = [f"{'what':<34}{'processes':>10}{'images/s':>10}{'ratio':>8}{'to tv':>8}{'grey':>8}{'dB':>7}"]
    for row in rows:
        to_torchvision = "-" if row.ratio_torchvision is None else f"{row.ratio_torchvision:.2f}"
        difference = "-" if row.mean_difference is None else f"{row.mean_difference:.2f}"
        decibels = "-" if row.psnr is None else f"{row.psnr:.1f}"
        lines.append(
            f"{row.what:<34}{row.num_processes:>10}{row.images_per_second:>10,.0f}{row.ratio:>8.2f}{to_torchvision:>8}"
            f"{difference:>8}{decibels:>7}"
        )
    return "\n".join(lines)
