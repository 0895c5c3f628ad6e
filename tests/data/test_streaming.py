"""Streamed pictures: crops are torchvision's of the whole picture, whoever decodes and whatever came before."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_files import write_picture
from timm.data import create_transform
from torchvision.transforms.v2.functional import resized_crop

from nearsight.augment import HorizontalFlip, Pipeline, RandomCrop, ResizedCrop
from nearsight.augment.streams import Drawn
from nearsight.data import cropping, load_dataset
from nearsight.data.cropping import Crop, centred, cropped, reduction, stored_shape
from nearsight.data.dataset import RUN, epoch_batches, windowed_permutation
from nearsight.data.decoding import UnreadableError
from nearsight.data.pictures import Pictures
from nearsight.data.streaming import Decoders, StreamedImages, cropped_before, num_decoders, tasks_of
from nearsight.errors import InputError
from nearsight.randomness import Draws

CPU = torch.device("cpu")


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB", kind: str = "JPEG", **options: object) -> bytes:
    """Noise with the spectrum of photographs."""
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    levels = [
        np.fft.irfft2(generator.standard_normal((2, *frequency.shape)).view(float)[0] / frequency, s=(height, width))
        for _ in range(3)
    ]
    pixels = np.stack([120 + 50 * level / level.std() for level in levels], axis=-1).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def decoded(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).copy()).permute(2, 0, 1)


STORED = {
    "4:2:0": photo(101, 83, quality=90, subsampling=2),
    "4:2:2": photo(90, 121, quality=95, subsampling=1),
    "4:4:4": photo(64, 64, quality=75, subsampling=0),
    "progressive": photo(99, 80, quality=90, progressive=True),
    "restarts": photo(120, 90, quality=90, restart_marker_blocks=3),
    "grey": photo(75, 110, mode="L"),
    "inks": photo(70, 70, mode="CMYK"),
    "PNG": photo(81, 55, kind="PNG"),
    "palette": photo(60, 60, mode="P", kind="PNG"),
}


@pytest.mark.parametrize("content", STORED.values(), ids=STORED)
@pytest.mark.parametrize("fast", [True, False])
def test_a_crop_is_torchvisions_of_the_whole_picture(content: bytes, fast: bool) -> None:
    rows, columns = stored_shape(content)
    whole_CHW = decoded(content)
    assert whole_CHW.shape[1:] == (rows, columns)
    generator = np.random.default_rng(0)
    for _ in range(12):
        crop_rows, crop_columns = (int(generator.integers(1, side + 1)) for side in (rows, columns))
        top, left = (
            int(generator.integers(0, side - part + 1)) for side, part in ((rows, crop_rows), (columns, crop_columns))
        )
        crop = Crop(top, left, crop_rows, crop_columns)
        expected = resized_crop(whole_CHW, *crop, size=[48, 48], antialias=True)
        assert torch.equal(cropped(content, crop, 48, fast=fast), expected)


def test_simplejpeg_and_pillow_see_the_same_pixels_at_every_size() -> None:
    pytest.importorskip("simplejpeg")
    content = photo(900, 700, quality=85)
    for size, by in ((48, 8), (100, 4), (180, 1)):
        crop = Crop(33, 21, 500, 611)
        assert reduction(crop, size) == by
        assert torch.equal(cropped(content, crop, size), cropped(content, crop, size, fast=False))


@pytest.mark.parametrize(("size", "by"), [(56, 8), (112, 4)])
def test_a_reduced_decode_is_near_a_full_one(size: int, by: int) -> None:
    content, crop = photo(800, 800, quality=90), Crop(77, 130, 511, 530)
    assert reduction(crop, size) == by
    difference = cropped(content, crop, size).double() - cropped(content, crop, size, reduce=False).double()
    assert 10 * torch.log10(255**2 / difference.square().mean()) > 30


def test_only_the_rows_that_are_needed_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("simplejpeg")
    heights = []

    def noted(content: bytes, *args: object, **options: object) -> object:
        heights.append(library.decode_jpeg_header(content)[0])
        return library.decode_jpeg(content, *args, **options)

    monkeypatch.setattr(cropping, "simplejpeg", lambda: type("noted", (), {"decode_jpeg": staticmethod(noted)}))
    content = photo(160, 320, quality=90, subsampling=2)
    cropped(content, Crop(0, 0, 60, 60), 32)
    cropped(content, Crop(0, 0, 300, 60), 32)
    cropped(photo(160, 320, progressive=True), Crop(0, 0, 60, 60), 32)
    assert heights == [80, 320, 320]  # of 16 rows a block: those of the crop, and one more


@pytest.mark.parametrize("fast", [True, False])
def test_damaged_pictures_are_refused(fast: bool) -> None:
    content, crop = STORED["4:2:0"], Crop(0, 0, 20, 20)
    for damaged in (content[:-200], content[: len(content) // 2], b"", b"no picture", content[:300]):
        with pytest.raises(UnreadableError):
            cropped(damaged, crop, 16, fast=fast)


def test_the_middle_is_what_timm_evaluates() -> None:
    for content in (STORED["4:2:0"], STORED["PNG"], STORED["4:2:2"]):
        transform = create_transform(56, crop_pct=0.875, interpolation="bicubic", mean=(0,) * 3, std=(1,) * 3)
        expected = transform(Image.open(io.BytesIO(content)).convert("RGB")) * 255
        assert torch.equal(centred(content, 56, 64), expected.round().to(torch.uint8))


def test_pictures_of_many_sizes_are_cropped_as_those_of_one() -> None:
    cells = ResizedCrop.stack([ResizedCrop(), ResizedCrop(p=0.5, min_area=0.5)], CPU)
    index_KB = torch.arange(300).expand(2, -1)
    draws = Draws(torch.tensor([3, 4]), torch.tensor(1), torch.tensor(0), index_KB)
    drawn = Drawn.of(draws, ResizedCrop.sample_draws(cells, torch.Size((3, 1, 1))), {})
    sizes = [(40, 90), (333, 500), (30, 30)]
    which_KB = index_KB % len(sizes)
    height_KB, width_KB = (torch.tensor([size[axis] for size in sizes])[which_KB] for axis in (0, 1))
    found = ResizedCrop.draw(cells, drawn, height_KB, width_KB)
    for number, size in enumerate(sizes):
        expected = ResizedCrop.draw(cells, drawn, *size)
        for some, all_of_one in zip(found, expected, strict=True):
            assert torch.equal(some[which_KB == number], all_of_one[which_KB == number])


def folder_of(root: Path, sizes: list[tuple[int, int]], kind: str = "jpg") -> Pictures:
    paths = []
    for number, size in enumerate(sizes):
        paths.append(root / f"{number}.{kind}")
        write_picture(paths[-1], number, size)
    return Pictures.of_files(root, paths, [number % 3 for number in range(len(sizes))])


def test_square_pictures_are_cropped_as_on_the_device(tmp_path: Path) -> None:
    pictures = folder_of(tmp_path, [(40, 40)] * 9, "png")
    whole_NCHW = torch.stack([decoded(pictures.read(index)) for index in range(9)])
    index_KB = torch.tensor([[8, 2, 5], [0, 1, 2]])
    cells = [[ResizedCrop(min_area=0.3), HorizontalFlip()], [ResizedCrop(p=0.5)]]
    pipeline = Pipeline.stack(cells, num_classes=3, mean=(0.0,) * 3, std=(1 / 255,) * 3, device=CPU)
    draws = Draws(torch.tensor([5, 6]), torch.tensor([2, 7]), torch.tensor(0), index_KB)
    labels_KB = pictures.labels_N[index_KB]
    expected, _ = pipeline(whole_NCHW[index_KB], labels_KB, draws)
    images = StreamedImages(pictures, CPU, size=40)
    ((crops_KBCHW, found_KB),) = images.crops([cell[0] for cell in cells], [5, 6], [2, 7], index_KB[None])
    assert torch.equal(found_KB, labels_KB)
    found, _ = cropped_before(pipeline)(crops_KBCHW, labels_KB, draws)
    assert (found - expected).abs().max() <= 1  # bytes are resized in whole numbers here, in float32 there


def test_decoders_give_the_same_whoever_decodes_and_whatever_was_left_undone(tmp_path: Path) -> None:
    pictures = folder_of(tmp_path, [(50 + 3 * number, 90 - number) for number in range(24)])
    index_SKB = torch.arange(24).view(6, 1, 4)

    def epoch(images: StreamedImages, number: int) -> torch.Tensor:
        return torch.cat([batch.clone() for batch, _ in images.crops([ResizedCrop()], [1], [number], index_SKB)])

    one = StreamedImages(pictures, CPU, size=32)
    one.decoders.num = 1
    several = StreamedImages(pictures, CPU, size=32)
    several.decoders.num = 3
    assert torch.equal(epoch(one, 0), epoch(several, 0))
    left = several.crops([ResizedCrop()], [1], [0], index_SKB)
    next(left)
    left.close()
    assert torch.equal(epoch(one, 1), epoch(several, 1))
    assert not torch.equal(epoch(one, 0), epoch(one, 1))
    ((middles, labels),) = several.stream([torch.arange(24)])  # a larger batch than the ring had room for
    expected = torch.stack([centred(pictures.read(index), 32, 32) for index in range(24)])
    assert torch.equal(middles, expected)
    assert torch.equal(labels, pictures.labels_N)
    assert torch.equal(one.gather(torch.tensor([[3], [5]])), expected[[3, 5]].unsqueeze(1))


def test_memory_is_bounded_by_the_ring(tmp_path: Path) -> None:
    decoders = Decoders(folder_of(tmp_path, [(40, 40)] * 8), 32, 32, num=1)
    taken = []

    def batches():
        for number in range(100):
            taken.append(number)
            yield tasks_of([number % 8, 1])

    for number, _ in enumerate(decoders.batches(batches(), most=2)):
        assert len(taken) - number <= len(decoders._ring.memory_PCHW) // 2
    assert len(taken) == 100
    decoders.close()


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pictures = folder_of(tmp_path, [(40, 40)] * 5)
    (tmp_path / "1.jpg").write_bytes((tmp_path / "1.jpg").read_bytes()[:400])
    (tmp_path / "3.jpg").unlink()
    Image.new("1", (70_000, 10)).save(tmp_path / "4.jpg", "PNG")
    images = StreamedImages(pictures, CPU, size=32)
    with pytest.raises(InputError, match=r"3 image\(s\) in .* cannot be used: ") as said:
        list(images.crops([ResizedCrop()], [0], [0], torch.arange(5).view(1, 1, 5)))
    for name in ("1.jpg", "3.jpg (No such file", "4.jpg (is 70000×10, but a side has at most"):
        assert name in str(said.value)


def test_a_decoder_that_is_killed_ends_the_run_in_words(tmp_path: Path) -> None:
    decoders = Decoders(folder_of(tmp_path, [(40, 40)] * 4), 32, 32, num=1)
    batches = decoders.batches(([tasks_of([0])[0]] for _ in range(10_000)), most=1)
    next(batches)
    (process,) = decoders._executor._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(InputError, match="a process that decodes pictures was killed, perhaps because memory ran out"):
        for _ in batches:
            pass


ORPHANS = """
import sys, time
from pathlib import Path
import torch
from nearsight.data.pictures import Pictures
from nearsight.data.streaming import StreamedImages
folder = Path(sys.argv[1])
images = StreamedImages(Pictures.of_files(folder, [folder / "0.jpg"], [0]), "cpu", size=32)
images.gather(torch.tensor([0]))
print(*[process.pid for process in images.decoders._executor._processes.values()], flush=True)
time.sleep(60)
"""


def test_decoders_end_with_the_process_that_they_decode_for(tmp_path: Path) -> None:
    folder_of(tmp_path, [(40, 40)])
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        assert pids
        process.kill()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def test_how_many_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    assert num_decoders() == 9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert num_decoders() == 2
    monkeypatch.setenv("NEARSIGHT_DECODERS", "5")
    assert num_decoders() == 5
    monkeypatch.setenv("NEARSIGHT_DECODERS", "none")
    with pytest.raises(InputError, match="NEARSIGHT_DECODERS is 'none', but must be a number of processes"):
        num_decoders()


@pytest.mark.parametrize("num", [RUN * 10, RUN * 10 + 7])
def test_the_order_of_shards_is_shuffled_in_windows_of_runs(num: int) -> None:
    seed_K, window = torch.tensor([0, 1]), 3 * RUN
    order_KN = windowed_permutation(seed_K, torch.tensor([4, 4]), num, window)
    assert torch.equal(order_KN.sort(-1).values, torch.arange(num).expand(2, -1))
    assert not torch.equal(order_KN[0], order_KN[1])
    for order_N in order_KN:
        for part in order_N.split(window)[:-1]:
            runs = part // RUN
            assert len(runs.unique()) <= 5  # three whole ones; of one that is shorter, parts of the next
            assert (runs.diff() != 0).float().mean() > 0.4  # mixed within the window
    alone = windowed_permutation(seed_K[1:], torch.tensor([4]), num, window)
    assert torch.equal(alone[0], order_KN[1])
    batches = epoch_batches(seed_K, torch.tensor([4, 4]), num, 50, window=window)
    assert torch.equal(batches.transpose(0, 1).flatten(1), order_KN[:, : num // 50 * 50])
    whole = epoch_batches(seed_K, 4, num, 50, window=num)
    assert torch.equal(whole, epoch_batches(seed_K, 4, num, 50))


def write_shards(root: Path, *, described: str = "cls", names: bool = False) -> None:
    """The pictures of a tree, in shards of 4; classes by number or by name."""
    for part in ("train", "val"):
        classes = sorted(path.name for path in (root / "tree" / part).iterdir())
        files = sorted((root / "tree" / part).rglob("*.jpg"), key=lambda path: path.name)
        for begin in range(0, len(files), 4):
            shard = root / "shards" / f"set-{part}-{begin // 4:04}.tar"
            shard.parent.mkdir(exist_ok=True)
            with tarfile.open(shard, "w") as archive:
                for path in files[begin : begin + 4]:
                    label = path.parent.name if names else classes.index(path.parent.name)
                    text = json.dumps({"label": label, "filename": path.name}) if described == "json" else str(label)
                    for ending, content in (("jpg", path.read_bytes()), (described, text.encode())):
                        member = tarfile.TarInfo(f"./{path.stem}.{ending}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for part, num in (("train", 10), ("val", 6)):
        for number in range(num):
            path = tmp_path / "tree" / part / "ab"[number % 2] / f"{part}{number:02}.jpg"
            write_picture(path, number + 50 * (part == "val"), (40 + number, 64))
    return tmp_path


@pytest.mark.parametrize(("described", "names"), [("cls", False), ("json", True), ("cls", True)])
def test_shards_hold_what_the_tree_does(tree: Path, described: str, names: bool) -> None:
    write_shards(tree, described=described, names=names)
    from_tree, from_shards = (
        load_dataset("image-folder", data_dir=tree / place, image_size=32, stream=True, crop_pct=0.8)
        for place in ("tree", "shards")
    )
    assert from_shards.classes == (("a", "b") if names else ("0", "1"))
    assert from_shards.pictures.in_shards
    assert not from_tree.pictures.in_shards
    order = sorted(range(10), key=lambda index: Path(from_tree.pictures.name(index)).name)
    same = from_tree.pictures.select(torch.tensor(order))
    assert torch.equal(same.labels_N, from_shards.pictures.labels_N)
    assert [same.read(index) for index in range(10)] == [from_shards.pictures.read(index) for index in range(10)]
    by_pixels = [sorted(map(bytes, data.test.images_NCHW.flatten(1).numpy())) for data in (from_tree, from_shards)]
    assert by_pixels[0] == by_pixels[1]
    # Without streaming, all is decoded once, from shards too.
    once = load_dataset("image-folder", data_dir=tree / "shards", image_size=32)
    assert len(once.train) == 10
    assert torch.equal(once.train.images_NCHW[0], centred(from_shards.pictures.read(0), 32, 32))


def test_the_index_of_shards_is_made_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tree)

    def loaded() -> str:
        return load_dataset("image-folder", data_dir=tree / "shards", image_size=32, stream=True).fingerprint

    first = loaded()
    with monkeypatch.context() as patched:
        patched.setattr(tarfile, "open", None)
        assert loaded() == first
    (tree / "shards" / "set-train-0001.tar").unlink()
    assert loaded() != first
    (tree / "shards" / "classes.txt").write_text("one\ntwo\n")
    dataset = load_dataset("image-folder", data_dir=tree / "shards", image_size=32, stream=True)
    assert dataset.classes == ("one", "two")


def test_shards_that_are_not_whole_are_refused(tree: Path) -> None:
    write_shards(tree)
    shards = tree / "shards"

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match):
            load_dataset("image-folder", data_dir=shards, image_size=32, stream=True)

    (shards / "classes.txt").write_text("one\n")
    refused("classes.txt has 1 names of classes, which are not those of the shards")
    (shards / "classes.txt").unlink()
    (shards / "more.tar").write_bytes(b"")
    refused("more.tar does not say which part of the data it is")
    (shards / "more.tar").unlink()
    first = shards / "set-train-0000.tar"
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    refused("set-train-0000.tar is damaged or is not an uncompressed .tar file")
    first.write_bytes(b"\x1f\x8b" + whole[2:])
    refused("set-train-0000.tar is damaged or is not an uncompressed .tar file")
    with tarfile.open(first, "w") as archive:
        archive.add(next((tree / "tree" / "train").rglob("*.jpg")), "x.jpg")
    refused("x.jpg has no class; x.cls, or a label in its .json, is needed")
    for path in shards.glob("*-val-*"):
        path.unlink()
    first.write_bytes(whole)
    refused("has shards, but none named 'val'")


def test_streams_of_sets_that_have_no_files_are_refused() -> None:
    with pytest.raises(InputError, match=r"shapes cannot be streamed: .* give --data.no-stream --data.crop-pct 1"):
        load_dataset("shapes", stream=True)


def test_a_streamed_choice_is_that_of_the_decoded_set(tree: Path) -> None:
    wanted = {"data_dir": tree / "tree", "image_size": 32, "num_train": 4, "num_test": 3}
    streamed, once = load_dataset("image-folder", **wanted, stream=True), load_dataset("image-folder", **wanted)
    assert torch.equal(streamed.test.images_NCHW, once.test.images_NCHW)
    assert torch.equal(streamed.training_labels, once.training_labels)
    images = StreamedImages(streamed.pictures, CPU, size=32, resized=streamed.resized)
    assert torch.equal(images.gather(torch.arange(4)), once.train.images_NCHW)
    assert len(streamed.train) == 0
    with pytest.raises(InputError, match="11 training images of image-folder were asked for, but it has 10"):
        load_dataset("image-folder", **wanted | {"num_train": 11}, stream=True)


def test_a_crop_that_is_not_the_first_augmentation_is_refused() -> None:
    pipeline = Pipeline.stack(
        [[RandomCrop(), ResizedCrop()]], num_classes=2, mean=(0.0,) * 3, std=(1.0,) * 3, device=CPU
    )
    with pytest.raises(InputError, match="but crop comes before resizedcrop; leave one of them out"):
        cropped_before(pipeline)
