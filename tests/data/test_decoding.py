"""Pictures of every mode become RGB, or are refused by name; none is silently turned white."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from nearsight.data import folder_images
from nearsight.data.decoding import UnreadableError, decode, open_rgb
from nearsight.errors import InputError

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
