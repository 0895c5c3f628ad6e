"""Images on the device: resident and streamed give the same bytes."""

import pytest
import torch

from nearsight.data import DeviceImages, ImageSet, epoch_batches, make_shapes
from nearsight.data.device import fits

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def shapes() -> ImageSet:
    return make_shapes(300)


def expected(shapes: ImageSet, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slow, obvious way."""
    images = torch.stack([shapes.images_NCHW[int(i)] for i in index.flatten()])
    return images.view(*index.shape, 3, 32, 32), shapes.labels_N[index]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("max_bytes", [None, 0], ids=["resident", "streamed"])
def test_stream_and_gather_give_the_images(shapes: ImageSet, device: str, max_bytes: int | None) -> None:
    images = DeviceImages(shapes, device, max_bytes=max_bytes)
    assert images.resident == (max_bytes is None)
    assert len(images) == 300
    index = epoch_batches(torch.tensor([1, 2]), 0, 300, 16)
    assert images.positions(index.to(device)).device.type == (device if images.resident else "cpu")
    seen = 0
    for step, (pixels, labels) in enumerate(images.stream(index)):
        want_pixels, want_labels = expected(shapes, index[step])
        assert pixels.device.type == labels.device.type == device
        assert torch.equal(pixels.cpu(), want_pixels)
        assert torch.equal(labels.cpu(), want_labels)
        assert torch.equal(images.gather(index[step]), pixels)
        assert torch.equal(images.labels(index[step]), labels)
        seen += 1
    assert seen == len(index)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_batches_of_several_sizes_and_kept_batches(shapes: ImageSet, device: str) -> None:
    """Batches that the consumer keeps must not be overwritten by later ones."""
    batches = [
        torch.arange(begin, begin + size) for begin, size in ((0, 5), (7, 40), (100, 1), (50, 40), (20, 8), (0, 300))
    ]
    kept = list(DeviceImages(shapes, device, max_bytes=0).stream(batches))
    for index, (pixels, labels) in zip(batches, kept, strict=True):
        assert torch.equal(pixels.cpu(), shapes.images_NCHW[index])
        assert torch.equal(labels.cpu(), shapes.labels_N[index])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_stream_can_be_left_early(shapes: ImageSet, device: str) -> None:
    images = DeviceImages(shapes, device, max_bytes=0)
    for pixels, _ in images.stream(torch.arange(300).view(30, 10)):
        assert torch.equal(pixels.cpu(), shapes.images_NCHW[:10])
        break
    assert len(list(images.stream(torch.arange(300).view(30, 10)))) == 30


def test_nothing_to_stream(shapes: ImageSet) -> None:
    assert list(DeviceImages(shapes, "cpu", max_bytes=0).stream([])) == []


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fits(10, torch.device("cpu"), max_bytes=10)
    assert not fits(11, torch.device("cpu"), max_bytes=10)
    assert fits(2**50, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    assert fits(500, torch.device("cuda"))
    assert not fits(501, torch.device("cuda")), "the model needs room beside the images"


@pytest.mark.gpu
def test_streaming_under_load_gives_the_same_bytes() -> None:
    """The consumer keeps the device busy, so that copies really run ahead of it."""
    shapes = make_shapes(4000)
    resident, streamed = (DeviceImages(shapes, "cuda", max_bytes=limit) for limit in (None, 0))
    index = torch.cat([epoch_batches(torch.tensor([0]), epoch, 4000, 256) for epoch in range(4)])
    busy = torch.randn(2048, 2048, device="cuda")
    for (want, want_labels), (pixels, labels) in zip(resident.stream(index), streamed.stream(index), strict=True):
        busy = (busy @ busy).tanh()
        assert torch.equal(pixels, want)
        assert torch.equal(labels, want_labels)
