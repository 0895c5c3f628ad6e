"""The parts of the segmentation probe: crops, head, schedule, sizes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from nearsight.data.segmentation import IGNORED, MaskedImages
from nearsight.data.segmentation.masks import LabelTable
from nearsight.errors import InputError
from nearsight.locat import add_locat
from nearsight.models import create_model
from nearsight.probe.features import reading
from nearsight.probe.frozen import size_step, take_other_sizes
from nearsight.probe.segmentation.config import SegmentConfig, default_settings
from nearsight.probe.segmentation.crops import TrainingCrops, distorted
from nearsight.probe.segmentation.head import new_head, one_cycle, pixel_logits, pixel_loss, whole_size
from nearsight.probe.settings import FeatureSpec

FILL = (0.2, 0.4, 0.6)


def written(folder: Path, sizes: list[tuple[int, int]], seed: int = 0) -> MaskedImages:
    """Images of noise with masks of 3 classes and ignored pixels, of these numbers of rows and columns."""
    generator = np.random.default_rng(seed)
    pairs = []
    for number, (rows, columns) in enumerate(sizes):
        image, mask = folder / f"{number}.png", folder / f"{number}-mask.png"
        Image.fromarray(generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8)).save(image)
        Image.fromarray(generator.choice(np.array([0, 1, 2, 255], dtype=np.uint8), (rows, columns))).save(mask)
        pairs.append((image, mask))
    return MaskedImages(tuple(pairs), LabelTable.starting_at(0, 3, ignored=(IGNORED,)))


def config(**changes: object) -> SegmentConfig:
    settings = {"iterations": 7, "batch_size": 3, "crop": 16, "shortest": 20, "longest": 60, "seed": 5, **changes}
    return SegmentConfig(**settings)  # type: ignore[arg-type]


def test_a_crop_is_a_window_of_the_scaled_image(tmp_path: Path) -> None:
    images = written(tmp_path, [(30, 44)])
    settings = config(largest_share=1.0)
    crops = TrainingCrops(images, settings, fill=FILL)
    for step in range(4):
        for draws in crops.draws(step).tolist():
            image, mask = crops.crop(0, draws)
            scale, mirror, down, right = draws[9:13]
            factor = (0.5 + 1.5 * scale) * 20 / 30
            size = round(44 * factor), round(30 * factor)
            picture, labels = (Image.open(path) for path in images.pairs[0])
            whole = np.asarray(picture.resize(size, Image.Resampling.BILINEAR)).astype(int)
            whole_mask = torch.from_numpy(np.array(labels)).float()[None, None]
            classes = F.interpolate(whole_mask, size=size[::-1], mode="nearest-exact")[0, 0].numpy()
            rows, columns = min(16, size[1]), min(16, size[0])
            top, left = int(down * (size[1] - rows + 1)), int(right * (size[0] - columns + 1))
            window = np.s_[top : top + rows, left : left + columns]
            order = -1 if mirror < 0.5 else 1
            # Pillow rounds the two passes of a resize once each: a level of difference is rounding.
            found = image[:rows, :columns].astype(int)
            assert abs(found - whole[window][:, ::order]).max() <= 1
            assert (mask[:rows, :columns] == classes[window][:, ::order]).all()
            outside = np.ones((16, 16), dtype=bool)
            outside[:rows, :columns] = False
            assert (mask[outside] == IGNORED).all()
            assert (image[outside] == [51, 102, 153]).all()


def test_crops_of_nearly_one_class_are_drawn_again(tmp_path: Path) -> None:
    labels = np.zeros((40, 200), dtype=np.uint8)
    labels[:, :30] = 1
    Image.fromarray(labels).save(tmp_path / "mask.png")
    Image.new("RGB", (200, 40)).save(tmp_path / "image.png")
    pair = (tmp_path / "image.png", tmp_path / "mask.png")
    images = MaskedImages((pair,), LabelTable.starting_at(0, 2, ignored=(IGNORED,)))

    def mixed(largest_share: float) -> int:
        crops = TrainingCrops(images, config(largest_share=largest_share, batch_size=40, longest=400), fill=FILL)
        masks = [crops.crop(0, draws)[1] for draws in crops.draws(0).tolist()]
        shares = [float((mask == 1).sum() / (mask != IGNORED).sum()) for mask in masks]
        return sum(0.25 < share < 0.75 for share in shares)

    assert mixed(0.75) > 1.5 * mixed(0.0) > 0


def test_ignored_pixels_are_no_second_class(tmp_path: Path) -> None:
    """Half a crop of one class and half of nothing is a crop of one class."""
    crops = TrainingCrops(written(tmp_path, [(20, 20)]), config(largest_share=0.75), fill=FILL)
    labels = np.zeros((16, 16), dtype=np.uint8)
    labels[:8] = IGNORED
    assert not crops._is_mixed(labels)
    labels[8:12] = 1
    assert crops._is_mixed(labels)


def test_batches_depend_on_the_step_alone(tmp_path: Path) -> None:
    images = written(tmp_path, [(30, 44), (25, 20), (20, 50), (21, 21)])
    crops = TrainingCrops(images, config(), fill=FILL)
    cpu = torch.device("cpu")
    whole = list(crops.batches(0, cpu))
    assert len(whole) == 7
    for first in (4, 6):
        again = list(TrainingCrops(images, config(), fill=FILL).batches(first, cpu))
        assert all(
            torch.equal(a, b)
            for one, other in zip(whole[first:], again, strict=True)
            for a, b in zip(one, other, strict=True)
        )
    others = next(iter(TrainingCrops(images, config(seed=6), fill=FILL).batches(0, cpu)))
    assert not torch.equal(others[0], whole[0][0])
    # All images in turn, in another order each time.
    order = [crops.index(*divmod(place, 3)) for place in range(20)]
    rounds = [order[start : start + 4] for start in range(0, 20, 4)]
    assert all(sorted(part) == [0, 1, 2, 3] for part in rounds)
    assert len({tuple(part) for part in rounds}) > 1


def test_kept_images_are_read_once_and_change_nothing(tmp_path: Path) -> None:
    read: list[int] = []

    class Counted(MaskedImages):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            read.append(index)
            return super().__getitem__(index)

    plain = written(tmp_path, [(30, 44), (25, 20), (20, 50), (21, 21)])
    images, batches = Counted(plain.pairs, plain.labels), {}
    # Room for none, for the one that comes first of those that fit, and for all.
    for room, most in ((0, 0), (4 * 30 * 44, 3), (2**20, 4)):
        read.clear()
        crops = TrainingCrops(images, config(), fill=FILL, room=room)
        batches[room] = [crops.crop(crops.index(step, slot), [0.5] * 33) for step in range(7) for slot in range(3)]
        once = [index for index in range(4) if read.count(index) == 1]
        assert len(once) <= most
        assert bool(once) == bool(room)
    assert len(read) == 4
    for room in (4 * 30 * 44, 2**20):
        for (image, mask), (image_read, mask_read) in zip(batches[room], batches[0], strict=True):
            assert (image == image_read).all()
            assert (mask == mask_read).all()


def test_colours_change_as_in_torchvision_by_the_draws() -> None:
    theirs = v2.RandomPhotometricDistort(hue=(-0.1, 0.1))
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (40, 3, 9, 11), dtype=torch.uint8, generator=generator)
    draws = torch.rand(40, 9, generator=generator)
    ours = distorted(images, draws)
    for image, changed, own in zip(images, ours, draws.tolist(), strict=True):
        params: dict[str, float | bool | None] = {"contrast_before": own[8] < 0.5, "channel_permutation": None}
        for place, name in enumerate(("brightness", "contrast", "saturation", "hue")):
            least, most = getattr(theirs, name)
            factor = least + own[2 * place + 1] * (most - least)
            params[f"{name}_factor"] = factor if own[2 * place] < 0.5 else None
        expected = theirs.transform(image, params)
        # A factor of float32 may round a level down where that of float64 did not; hue can carry that one further.
        difference = (changed.int() - expected.int()).abs()
        assert difference.max() <= 2
        assert (difference > 0).double().mean() < 0.05
    never = draws.clone()
    never[:, 0:8:2] = 0.9
    assert torch.equal(distorted(images, never), images)


def test_the_head_is_that_of_the_paper() -> None:
    head = new_head(6, 4, config(width=8))
    assert [tuple(weight.shape) for weight in head.parameters()] == [
        *((8, 6, 1, 1), (8,)),  # 1×1 convolution
        *((8,), (8,)),  # GroupNorm
        *((4, 8, 1, 1), (4,)),  # classifier
    ]
    features = torch.randn(2, 6, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, norm_weight, last = (head.double()[place].weight for place in (0, 1, 3))
    hidden = torch.einsum("oi,bihw->bohw", first[..., 0, 0], features) + head[0].bias.view(-1, 1, 1)
    mean, variance = hidden.mean((1, 2, 3), keepdim=True), hidden.var((1, 2, 3), unbiased=False, keepdim=True)
    hidden = (hidden - mean) / (variance + 1e-5).sqrt() * norm_weight.view(-1, 1, 1) + head[1].bias.view(-1, 1, 1)
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    logits = torch.einsum("oi,bihw->bohw", last[..., 0, 0], hidden) + head[3].bias.view(-1, 1, 1)
    assert torch.allclose(pixel_logits(head, features, (3, 5)), logits)
    assert pixel_logits(head, features, (12, 20)).shape == (2, 4, 12, 20)
    state = torch.get_rng_state()
    again = new_head(6, 4, config(width=8))
    assert torch.equal(again[0].weight.double(), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_ignored_pixels_do_not_count_in_the_loss() -> None:
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    masks = torch.randint(3, (2, 4, 4))
    masks[0, :2] = IGNORED
    known = masks != IGNORED
    expected = -F.log_softmax(logits, 1).movedim(1, -1)[known].gather(1, masks[known].unsqueeze(1)).mean()
    parts = [pixel_loss(logits[one], masks[one], IGNORED, known.sum()) for one in (slice(0, 1), slice(1, 2))]
    assert torch.allclose(sum(parts), expected)
    nothing = pixel_loss(logits, torch.full_like(masks, IGNORED), IGNORED, torch.tensor(0))
    nothing.backward()
    assert float(nothing.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(("iterations", "rising"), [(40, 0.25), (7, 0.5), (100, 0.1)])
def test_the_learning_rate_is_pytorchs_one_cycle(iterations: int, rising: float) -> None:
    settings = config(iterations=iterations, rising=rising, lr=2e-3)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=iterations, pct_start=rising, anneal_strategy="linear", cycle_momentum=False
    )
    expected = []
    for _ in range(iterations):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < iterations:
            schedule.step()
    assert [one_cycle(step, settings) for step in range(iterations)] == pytest.approx(expected, rel=1e-9)


def test_whole_images_keep_their_shape_in_multiples_of_a_patch() -> None:
    ade, context = SegmentConfig(), SegmentConfig(**default_settings("pascal-context", image_size=224, step=16))
    assert whole_size((512, 683), ade, 16) == (512, 688)
    assert whole_size((100, 1000), ade, 16) == (208, 2048)  # the longer side decides
    assert whole_size((375, 500), context, 16) == (384, 512)  # 390×520
    assert whole_size((375, 500), SegmentConfig(crop=224, square=True), 16) == (224, 224)
    # As many times a small model's images as 512 is of 224.
    small = default_settings("voc-small", image_size=32, step=4)
    assert (small["crop"], small["shortest"], small["longest"]) == (76, 73, 293)


MODELS = {
    "compact_vit": {"depth": 1},
    "jumbo_vit_tiny_patch16_224": {"depth": 1, "img_size": 32},
    "vit_tiny_patch16_rope_mixed_224": {"depth": 1, "img_size": 32},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1, 2, 2), "embed_dim": 24, "img_size": 64, "window_size": 2},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 16), "num_heads": (1, 1, 1, 1)},
}


@pytest.mark.parametrize("with_locat", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_take_other_sizes(name: str, with_locat: bool) -> None:
    torch.manual_seed(0)
    model = create_model(name, **MODELS[name]).eval()
    if with_locat and name in ("davit_tiny", "jumbo_vit_tiny_patch16_224"):
        return
    if with_locat:
        add_locat(model)
    step, own = size_step(model), 224 if name == "davit_tiny" else 64 if "swin" in name else 32
    image = torch.randn(1, 3, own, own)

    def read(images: Tensor) -> Tensor:
        with reading(model, FeatureSpec(), image_size=(images.shape[2], images.shape[3])) as reader:
            return reader(images)

    before = read(image)
    take_other_sizes(model, 3 * own)
    # What it says of its own images stays; a Swin's last stage, one window before, now knows shifted windows.
    assert torch.allclose(read(image), before, atol=1e-5) or "swin" in name
    rows, columns = read(torch.randn(1, 3, own + step, own)).shape[2:]
    assert (rows, columns) == ((own + step) // step, own // step)


def test_a_wider_grid_is_what_timm_makes_of_it() -> None:
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=1).eval()
    image = torch.randn(1, 3, 48, 64)
    take_other_sizes(model, 64)
    with reading(model, FeatureSpec(), image_size=(48, 64)) as reader:
        found = reader(image)
    other = create_model("compact_vit", depth=1).eval()
    other.load_state_dict(model.state_dict())
    other.set_input_size(img_size=(48, 64))
    with reading(other, FeatureSpec(), image_size=(48, 64)) as reader:
        assert torch.allclose(reader(image), found, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iterations": 0}, "iterations is 0"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"smallest_scale": 3.0}, "goes from 3.0 to 2.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(**changes)
