"""Files that are no pictures, or pictures beyond all measure: refused with a reason, at once and without memory.
Pictures of every mode become RGB, or are refused by name; none is silently turned white."""

import io
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from nearsight.data import folder_images
from nearsight.data.decoding import FORMATS, MOST_PIXELS, UnreadableError, _Room, decode, open_rgb, opened_image
from nearsight.data.segmentation.masks import LabelTable, MaskedImages
from nearsight.errors import InputError

SECONDS = 5


@contextmanager
def no_hang() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def saved(kind: str, size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: object) -> bytes:
    Image.new(mode, size).save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *more: bytes) -> bytes:
    """A grey picture of one bit, all black, which takes hardly a byte on the disk whatever its size."""
    squeeze = zlib.compressobj(9)
    row = b"\0" * (1 + (width + 7) // 8)
    pixels = b"".join(squeeze.compress(row) for _ in range(height)) + squeeze.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def tiff_with_tile(side: int) -> bytes:
    """Of 16×16 pixels, in a tile of many more, without any of their data."""
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, 8), (325, 8)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0)


def jpeg_with_scans(num: int) -> bytes:
    content = saved("JPEG", (64, 64), "L", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + num * last + content[-2:]


def test_postscript_named_as_a_picture_runs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/it ran'\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # where Pillow notes what it has found
    postscript = saved("EPS", (4, 4))
    (tmp_path / "trap.eps").write_bytes(postscript)
    with pytest.raises(OSError), Image.open(tmp_path / "trap.eps") as picture:
        picture.load()
    assert (tmp_path / "it ran").exists(), "it works where it is let"
    (tmp_path / "it ran").unlink()
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "trap.png").write_bytes(postscript)
    with pytest.raises(InputError, match=r"trap\.png \(is not a picture of a known format\)"):
        folder_images(pictures)
    with pytest.raises(InputError, match=r"trap\.png cannot be read: is not a picture of a known format"):
        MaskedImages([(pictures / "trap.png", pictures / "trap.png")], LABELS).mask(0)
    assert not (tmp_path / "it ran").exists()


LABELS = LabelTable.starting_at(0, 2, ignored=())


@pytest.mark.parametrize("kind", ["ICO", "PCX", "TGA", "SGI", "SPIDER", "JPEG2000", "ICNS", "DDS", "MSP", "XBM"])
def test_other_formats_are_refused(tmp_path: Path, kind: str) -> None:
    mode = {"SPIDER": "F", "MSP": "1", "XBM": "1", "ICNS": "RGBA"}.get(kind, "RGB")
    (tmp_path / "a.png").write_bytes(saved(kind, (32, 32), mode))
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format not in FORMATS
    with pytest.raises(UnreadableError, match="is not a picture of a known format"):
        open_rgb(tmp_path / "a.png")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_link_to_device])
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.png")
    with no_hang(), pytest.raises(UnreadableError, match="is not a file"):
        open_rgb(tmp_path / "a.png")
    with no_hang(), pytest.raises(InputError, match=r"a\.png cannot be read: is not a file"):
        MaskedImages([(tmp_path / "a.png", tmp_path / "a.png")], LABELS).mask(0)


def test_links_to_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(saved("PNG"))
    (tmp_path / "a.png").symlink_to("there.png")
    assert open_rgb(tmp_path / "a.png").size == (8, 8)
    (tmp_path / "there.png").unlink()
    with pytest.raises(UnreadableError, match="No such file"):
        open_rgb(tmp_path / "a.png")


HUGE = {
    "a side": (lambda: png(1_000_000, 1), "is 1000000×1, but a side has at most 65,536 pixels"),
    "a longer side": (lambda: png(50_000_000, 1), "is 50000000×1, but a side has at most"),
    "pixels": (lambda: png(12_000, 12_000), "is 12000×12000, but a picture has at most 50,000,000 pixels"),
    "a tile": (lambda: tiff_with_tile(40_000), "has tiles of 40000×40000, but a tile has at most"),
    "scans": (lambda: jpeg_with_scans(1000), "scans, but a JPEG has at most 100"),
    "text": (lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 2**24))), "Decompressed data too large"),
    "international text": (
        lambda: png(8, 8, chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(b"x" * 2**24))),
        "Decompressed data too large",
    ),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("what", HUGE)
def test_pictures_beyond_all_measure_are_refused_before_they_are_decoded(tmp_path: Path, what: str) -> None:
    make, reason = HUGE[what]
    (tmp_path / "a.png").write_bytes(make())
    with no_hang(), pytest.raises(UnreadableError, match=reason):
        open_rgb(tmp_path / "a.png")


def test_a_file_beyond_all_measure(tmp_path: Path) -> None:
    (tmp_path / "a.webp").write_bytes(saved("WEBP"))
    os.truncate(tmp_path / "a.webp", 2**40)  # which takes no room
    with pytest.raises(UnreadableError, match="has 1,099,511,627,776 bytes, but a picture has at most 536,870,912"):
        open_rgb(tmp_path / "a.webp")


def test_a_narrow_picture_would_become_a_huge_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(60_000, 1))
    reason = r"is 60000×1: resized to 224 on its shorter side it has 3,010,560,000 pixels, but"
    with pytest.raises(InputError, match=reason):
        list(decode(tmp_path, [tmp_path / "a.png"], [0], 224))
    [(images, _)] = decode(tmp_path, [tmp_path / "a.png"], [0], 16)  # of which it has few
    assert images.shape == (1, 3, 16, 16)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_of_many_pictures_in_a_file_the_first_is_read(tmp_path: Path, kind: str) -> None:
    others = [Image.new("RGB", (8, 8), (number, 0, 0)) for number in range(1, 200)]
    content = saved(kind, save_all=True, append_images=others)
    (tmp_path / "a.png").write_bytes(content)
    with no_hang():
        np.testing.assert_array_equal(np.asarray(open_rgb(tmp_path / "a.png")), 0)


def test_those_who_find_too_little_room_wait() -> None:
    room, at_once, most = _Room(100), [], []

    def open_one(pixels: int) -> None:
        with room.taking(pixels):
            at_once.append(pixels)
            most.append(sum(at_once))
            time.sleep(0.005)
            at_once.remove(pixels)

    threads = [threading.Thread(target=open_one, args=(pixels,)) for pixels in (100, 60, 50, 30, 20, 100, 40, 1) * 3]
    with no_hang():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(most) == len(threads)
    assert max(most) <= 100


def test_room_is_given_back_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(7000, 7000)[:-100])
    for _ in range(3):  # each has nearly all there is
        with no_hang(), pytest.raises(UnreadableError):
            open_rgb(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(saved("PNG"))
    with pytest.raises(ZeroDivisionError), opened_image(tmp_path / "b.png", shorter_side=int(MOST_PIXELS**0.5)):
        raise ZeroDivisionError  # what is no fault of the file stays what it is
    with no_hang(), opened_image(tmp_path / "b.png", shorter_side=int(MOST_PIXELS**0.5)) as picture:
        assert picture.size == (8, 8)


RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1", "CMYK"])
def test_modes_of_eight_bits(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("picture.tif" if mode == "CMYK" else "picture.png")
    Image.fromarray(RAMP).convert("RGB").convert(mode).save(path)
    picture = open_rgb(path)
    assert picture.mode == "RGB"
    if mode not in ("1", "P"):
        np.testing.assert_array_equal(np.asarray(picture)[..., 0], RAMP)


@pytest.mark.parametrize("name", ["picture.png", "picture.tif"])
def test_sixteen_bits_are_scaled_and_not_cut_off(name: str, tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(np.uint16) * 257).save(tmp_path / name)
    np.testing.assert_array_equal(np.asarray(open_rgb(tmp_path / name)), np.stack([RAMP] * 3, axis=-1))


def test_thirty_two_bits_of_sixteen(tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(np.int32) * 257).save(tmp_path / "picture.tif")
    np.testing.assert_array_equal(np.asarray(open_rgb(tmp_path / "picture.tif"))[..., 1], RAMP)


@pytest.mark.parametrize(("kind", "factor"), [(np.float32, 1 / 255), (np.int32, 70_000), (np.int32, -1), (np.int32, 1)])
def test_values_of_unknown_range_are_refused_by_name(kind: type, factor: float, tmp_path: Path) -> None:
    Image.fromarray((RAMP.astype(np.float64) * factor).astype(kind)).save(tmp_path / "strange.tif")
    with pytest.raises(UnreadableError, match="values of unknown range; save it with 8 or 16 bits"):
        open_rgb(tmp_path / "strange.tif")
    with pytest.raises(InputError, match=r"strange\.tif \(has values of unknown range"):
        folder_images(tmp_path)


def test_a_camera_s_note_turns_nothing_as_in_torchvision(tmp_path: Path) -> None:
    note = Image.Exif()
    note[0x112] = 6  # held on its side
    Image.fromarray(RAMP[:8]).save(tmp_path / "turned.jpg", exif=note)
    np.testing.assert_array_equal(open_rgb(tmp_path / "turned.jpg"), pil_loader(tmp_path / "turned.jpg"))


def test_random_sizes_are_resized_and_cropped_as_in_torchvision(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = [(224, 330, 220), *([int(number) for number in random.integers(5, 100, 3)] for _ in range(150))]
    for size, width, height in shapes:
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / "picture.bmp")
        [(images, _)] = decode(tmp_path, [tmp_path / "picture.bmp"], [0], size)
        prepare = v2.Compose([v2.Resize(size, interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(size)])
        expected = np.asarray(prepare(pil_loader(tmp_path / "picture.bmp"))).transpose(2, 0, 1)
        np.testing.assert_array_equal(images[0], expected, err_msg=f"{width}×{height} at {size}")
