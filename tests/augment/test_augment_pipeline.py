"""The pipeline: cells side by side, order, normalisation, what a captured or compiled step needs; which lists can be
stacked, against stacking them; one call of the generator against `Draws` stream by stream."""

import dataclasses
import inspect
import itertools

import pytest
import torch
import torchvision.transforms.v2.functional as torchvision_functional
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.augment import (
    AUGMENTATIONS,
    Augmentation,
    AutoAugment,
    ColorJitter,
    CompiledPipeline,
    CutMix,
    CutOut,
    GaussianBlur,
    HorizontalFlip,
    Mixup,
    Pipeline,
    RandAugment,
    RandomCrop,
    RandomErasing,
    ResizedCrop,
    TileShuffle,
    TimmRandAugment,
    normalize,
    register_augmentation,
)
from nearsight.augment.pipeline import stack_key
from nearsight.augment.streams import Drawn, parts_of
from nearsight.errors import InputError
from nearsight.randomness import Draws
from nearsight.train.config import PROTOCOLS

MEAN = (0.5071, 0.4865, 0.4409)
STD = (0.2673, 0.2564, 0.2762)
CPU = torch.device("cpu")
MODERN = [RandomCrop(), HorizontalFlip(), AutoAugment(), CutMix(p=0.5)]


def stacked(cells) -> Pipeline:
    return Pipeline.stack(cells, num_classes=10, mean=MEAN, std=STD, device=CPU)


def labels(num_cells: int, num: int) -> torch.Tensor:
    return torch.arange(num_cells * num).view(num_cells, num) % 10


def plain(images: torch.Tensor) -> torch.Tensor:
    return (images.float() - torch.tensor(MEAN)[:, None, None] * 255) / (torch.tensor(STD)[:, None, None] * 255)


def test_registry():
    assert all(kind.name == name for name, kind in AUGMENTATIONS.items())
    assert list(AUGMENTATIONS) == [
        *("crop", "resizedcrop", "flip", "autoaugment", "randaugment", "timm_randaugment", "trivialaugment"),
        *("colorjitter", "grey", "blur", "solarize", "tileshuffle", "cutout", "erasing"),
        *("cutmix", "cutfill", "mixup", "mixup_or_cutmix"),
    ], "the order of options, and of augmentations that are given as options"
    assert set(AUGMENTATIONS.values()) == set(Augmentation.__subclasses__())
    with pytest.raises(ValueError, match="there is an augmentation 'flip' already: HorizontalFlip"):
        register_augmentation(HorizontalFlip)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_cell_without_it_is_bit_identical(make_draws, make_images, name):
    kind = AUGMENTATIONS[name]
    images = make_images(60, 24, 28).view(3, 20, 3, 24, 28)
    out, targets = stacked([[kind(p=1.0)], [], [kind(p=0.0)]])(images, labels(3, 20), make_draws(3, 20))
    assert torch.equal(out[1:], plain(images)[1:])
    assert torch.equal(targets[1:], torch.nn.functional.one_hot(labels(3, 20)[1:], 10).float())
    assert not torch.equal(out[0], plain(images)[0])


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_cell_does_not_depend_on_its_stack(make_draws, make_images, name):
    kind = AUGMENTATIONS[name]
    strong = {field: True for field in ("per_sample", "mix_labels") if field in inspect.signature(kind).parameters}
    images = make_images(48).view(3, 16, 3, 32, 32)
    draws = make_draws(3, 16)
    together = stacked([[kind()], [kind(p=0.6, **strong)], []])(images, labels(3, 16), draws)
    for cell, setting in enumerate(([kind()], [kind(p=0.6, **strong)])):
        alone = type(draws)(draws.seed_K[cell : cell + 1], draws.epoch, draws.step, draws.index_KB[cell : cell + 1])
        out, targets = stacked([setting])(images[cell : cell + 1], labels(3, 16)[cell : cell + 1], alone)
        assert torch.equal(out[0], together[0][cell])
        assert torch.equal(targets[0], together[1][cell])


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        (RandAugment(num_ops=2), RandAugment(num_ops=3)),
        (RandAugment(num_ops=3), RandAugment(num_ops=1)),
        (RandAugment(num_ops=0), RandAugment()),
        (TimmRandAugment(num_ops=2), TimmRandAugment(num_ops=5)),
        (TimmRandAugment(num_ops=4), TimmRandAugment(num_ops=1)),
        (GaussianBlur(p=1.0, min_sigma=1.0, max_sigma=1.0), GaussianBlur(max_sigma=4.0)),
        (GaussianBlur(p=1.0), GaussianBlur(min_sigma=0.3, max_sigma=0.3)),
        (TileShuffle(tile=8), TileShuffle(tile=3)),
        (CutMix(), CutMix(feather=2.0)),
        (RandomErasing(p=1.0, noise=0.0), RandomErasing(p=1.0, noise=1.0)),
        (ColorJitter(hue=0.0), ColorJitter()),
        (ResizedCrop(), ResizedCrop(min_area=0.5, min_ratio=1.0)),
    ],
)
def test_strengths_of_other_cells_do_not_show(make_draws, make_images, setting, other):
    images, draws = make_images(120).expand(2, -1, -1, -1, -1), make_draws(2, 120)
    out, targets = stacked([[setting], [other]])(images, labels(2, 120), draws)
    alone = type(draws)(draws.seed_K[:1], draws.epoch, draws.step, draws.index_KB[:1])
    expected, expected_targets = stacked([[setting]])(images[:1], labels(2, 120)[:1], alone)
    assert torch.equal(out[:1], expected)
    assert torch.equal(targets[:1], expected_targets)


def test_select_keeps_the_cells(make_draws, make_images):
    images = make_images(48).view(3, 16, 3, 32, 32)
    draws = make_draws(3, 16)
    pipeline = stacked([MODERN, [RandomCrop(padding=2)], [AutoAugment(p=0.5), CutMix(p=1.0, alpha=0.3)]])
    whole = pipeline(images, labels(3, 16), draws)
    keep = torch.tensor([2, 0])
    kept_draws = type(draws)(draws.seed_K[keep], draws.epoch, draws.step, draws.index_KB[keep])
    out, targets = pipeline.select(keep)(images[keep], labels(3, 16)[keep], kept_draws)
    assert torch.equal(out, whole[0][keep])
    assert torch.equal(targets, whole[1][keep])


def test_samples_keep_their_draws_in_another_batch(make_draws, make_images):
    """Augmentations of single images depend on the sample, not on its place in the batch."""
    images = make_images(20).unsqueeze(0)
    draws = make_draws(1, 20)
    pipeline = stacked([[RandomCrop(), HorizontalFlip(), AutoAugment(), CutOut()]])
    out, _ = pipeline(images, labels(1, 20), draws)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    moved = type(draws)(draws.seed_K, draws.epoch, draws.step + 1, draws.index_KB[:, order])
    assert torch.equal(pipeline(images[:, order], labels(1, 20), moved)[0], out[:, order])


def test_epochs_steps_and_seeds_differ(make_draws, make_images):
    images = make_images(30).unsqueeze(0)
    pipeline = stacked([[RandomCrop(), CutMix(p=1.0)]])

    def out(**change):
        return pipeline(images, labels(1, 30), make_draws(1, 30, **change))[0]

    assert torch.equal(out(), out())
    for change in ({"seed": 1}, {"epoch": 4}, {"step": 6}):
        assert not torch.equal(out(), out(**change)), change


def test_stages_after_a_resize_see_the_new_size(make_draws, make_images):
    images = make_images(20, 32, 40).view(2, 10, 3, 32, 40)
    later = [RandomErasing(p=1.0, noise=1.0), TileShuffle(tile=4)]
    out, _ = stacked([[ResizedCrop(size=16), *later], [ResizedCrop(size=16)]])(images, labels(2, 10), make_draws(2, 10))
    assert out.shape == (2, 10, 3, 16, 16)
    assert out.isfinite().all()


def test_a_resize_that_never_crops_still_resizes(make_draws, make_images):
    images = make_images(10, 32, 40).unsqueeze(0)
    arguments = labels(1, 10), make_draws(1, 10)
    never = stacked([[ResizedCrop(size=24, p=0.0)]])(images, *arguments)[0]
    whole = torchvision_functional.resize(images[0], [24, 24], antialias=True)
    assert (never[0] - plain(whole)).abs().max() <= 1.001 / (255 * min(STD))
    assert torch.equal(stacked([[ResizedCrop(p=0.0)]])(images, *arguments)[0], plain(images))


@pytest.mark.parametrize("augmentations", [[], [RandomCrop(), CutMix()], [Mixup()], [AutoAugment()]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_only_grey_levels_as_they_are_stored(make_draws, make_images, augmentations, dtype):
    arguments = make_images(4).to(dtype).unsqueeze(0), labels(1, 4), make_draws(1, 4)
    pipeline = stacked([augmentations])
    with pytest.raises(InputError, match=rf"images are {dtype}, but .* torch\.uint8"):
        pipeline(*arguments)
    with pytest.raises(InputError, match=rf"images are {dtype}, but .* torch\.uint8"):
        CompiledPipeline(backend="eager")(pipeline, *arguments)


def test_tiles_larger_than_the_image_are_refused(make_draws, make_images):
    arguments = labels(1, 4), make_draws(1, 4)
    for cell, shown in (([TileShuffle()], "7×20"), ([ResizedCrop(size=6), TileShuffle(tile=7)], "6×6")):
        with pytest.raises(InputError, match=rf"tileshuffle\.tile is .* images of {shown} pixels have no such tile"):
            stacked([cell])(make_images(4, 7, 20).unsqueeze(0), *arguments)
    stacked([[TileShuffle(tile=7)]])(make_images(4, 7, 20).unsqueeze(0), *arguments)


def test_normalize(make_images):
    images = make_images(6)
    ours = normalize(images, torch.tensor(MEAN) * 255, torch.tensor(STD) * 255)
    assert torch.allclose(ours, plain(images))
    assert ours.dtype == torch.float32


def test_the_order_of_the_list_is_kept(make_draws, make_images):
    images = make_images(30).unsqueeze(0)
    draws = make_draws(1, 30)
    first = stacked([[HorizontalFlip(), RandomCrop()]])(images, labels(1, 30), draws)[0]
    second = stacked([[RandomCrop(), HorizontalFlip()]])(images, labels(1, 30), draws)[0]
    assert not torch.equal(first, second)
    assert [kind.name for kind, _ in stacked([[CutMix()], [RandomCrop()], [AutoAugment()]]).stages] == [
        "crop",
        "autoaugment",
        "cutmix",
    ]


def test_bad_lists(make_draws, make_images):
    with pytest.raises(InputError, match=r"listed twice"):
        stacked([[CutMix(), CutMix(p=0.5)]])
    with pytest.raises(InputError, match=r"different orders"):
        stacked([[CutMix(), RandomCrop()], [RandomCrop(), CutMix()]])
    blended_too_early = stacked([[Mixup(), AutoAugment()]])
    with pytest.raises(InputError, match=r"autoaugment works on whole grey levels"):
        blended_too_early(make_images(4).unsqueeze(0), labels(1, 4), make_draws(1, 4))
    with pytest.raises(InputError, match=r"none of the cells"):
        CutMix.stack([None, None], CPU)


def test_threads_are_left_as_they_were(make_draws, make_images):
    seen = []

    class Watching(HorizontalFlip):
        @classmethod
        def apply(cls, batch, cells, drawn):
            seen.append(torch.get_num_threads())
            if len(seen) == 2:
                raise RuntimeError("stop")
            return super().apply(batch, cells, drawn)

    pipeline = stacked([[Watching()]])
    arguments = (make_images(4).unsqueeze(0), labels(1, 4), make_draws(1, 4))
    torch.set_num_threads(2)
    pipeline(*arguments)
    with pytest.raises(RuntimeError, match="stop"):
        pipeline(*arguments)
    assert torch.get_num_threads() == 2
    large = make_images(1).expand(1, 3000, -1, -1, -1)
    pipeline(large, labels(1, 3000), make_draws(1, 3000))
    assert seen == [1, 1, 2]
    assert torch.get_num_threads() == 2


def test_one_graph_without_a_look_at_the_data(make_draws, make_images):
    """fullgraph refuses .item(), boolean masks and anything else that would make the host wait for the device."""
    everything = [kind(p=0.9) for kind in AUGMENTATIONS.values()]
    images = make_images(12, 16, 16).view(2, 6, 3, 16, 16)
    pipeline = stacked([everything, []])
    torch._dynamo.reset()
    compiled = torch.compile(pipeline, fullgraph=True, backend="eager", dynamic=False)
    out, targets = compiled(images, labels(2, 6), make_draws(2, 6))
    expected, expected_targets = pipeline(images, labels(2, 6), make_draws(2, 6))
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(targets, expected_targets, atol=1e-6)
    assert torch.equal(out[1], plain(images)[1])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_cells=st.integers(1, 3),
    num=st.integers(1, 5),
    height=st.integers(3, 20),
    width=st.integers(3, 20),
    padding=st.integers(0, 9),
    magnitude=st.integers(0, 30),
)
def test_any_shape(num_cells, num, height, width, padding, magnitude):
    generator = torch.Generator().manual_seed(height * 31 + width)
    images = torch.randint(0, 256, (num_cells, num, 3, height, width), generator=generator).to(torch.uint8)
    index = torch.arange(num_cells * num).view(num_cells, num)
    draws = Draws(torch.arange(num_cells), torch.tensor(0), torch.tensor(0), index)
    cell = [RandomCrop(padding=padding), HorizontalFlip(), RandAugment(magnitude=magnitude), CutMix(p=1.0)]
    out, targets = stacked([cell] * num_cells)(images, index % 10, draws)
    assert out.shape == images.shape
    grey = out * torch.tensor(STD)[:, None, None] * 255 + torch.tensor(MEAN)[:, None, None] * 255
    assert grey.min() > -0.01
    assert grey.max() < 255.01
    assert torch.allclose(targets.sum(-1), torch.ones(num_cells, num), atol=1e-6)


SETTINGS = (
    *(AutoAugment(), AutoAugment(policy="imagenet"), AutoAugment(policy="svhn", p=0.5)),
    *(ResizedCrop(), ResizedCrop(size=16), ResizedCrop(size=24, min_area=0.5)),
    *(RandomCrop(), HorizontalFlip(), RandAugment(num_ops=3), CutMix(p=0.5), Mixup()),
)


def stack(*lists):
    return Pipeline.stack(lists, num_classes=2, mean=(0.5,), std=(0.2,), device=torch.device("cpu"))


@st.composite
def lists(draw):
    picked = draw(st.lists(st.sampled_from(SETTINGS), max_size=4, unique_by=lambda augmentation: augmentation.name))
    return tuple(draw(st.permutations(picked)))


def test_lists_with_one_key_can_be_stacked():
    """Every order of some of five: all that have a key together, for two by two they might."""
    five = (RandomCrop(), HorizontalFlip(), AutoAugment(policy="svhn"), CutMix(), Mixup())
    alike = {}
    for order in itertools.chain(*(itertools.permutations(five, num) for num in range(6))):
        alike.setdefault(stack_key(order), []).append(order)
    assert sum(map(len, alike.values())) == 326
    assert max(map(len, alike.values())) == 16
    for group in alike.values():
        stack(*group)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lists(), lists())
def test_lists_that_cannot_be_stacked_have_other_keys(first, second):
    try:
        stack(first, second)
    except InputError:
        assert stack_key(first) != stack_key(second)


def test_usual_lists_are_all_alike():
    """In the order of the registry and with default settings of what is shared, whatever is in them."""
    everything = [kind() for kind in AUGMENTATIONS.values()]
    usual = [protocol().augment for protocol in PROTOCOLS.values()]
    usual += [[], everything, everything[::2], [RandAugment(num_ops=3), CutMix(p=0.1)], [AutoAugment(p=0.3)]]
    assert len({stack_key(each) for each in usual}) == 1
    stack(*usual)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_what_is_shared_is_refused_where_it_differs(name):
    kind = AUGMENTATIONS[name]
    others = {"policy": "svhn", "size": 8}
    for field in kind.shared:
        a, b = kind(), kind(**{field: others[field]})
        assert stack_key([a]) != stack_key([b])
        with pytest.raises(InputError, match=rf"{name}\.{field} differs between cells of one stack"):
            stack([a], [b])


def test_other_orders_have_other_keys():
    trio = (RandomCrop(), HorizontalFlip(), CutMix())
    assert len({stack_key(order) for order in itertools.permutations(trio)}) == 6


def test_equal_to_draws(make_draws):
    draws = make_draws(3, 11, seed=2**33 + 1)
    sample_nums = {"a": 1, "b": 4, "c": 5, "d": 23}
    batch_nums = {"a.batch": 6, "e": 2}
    drawn = Drawn.of(draws, sample_nums, batch_nums)
    assert list(drawn.sample) == list(sample_nums)
    assert list(drawn.batch) == list(batch_nums)
    for name, num in sample_nums.items():
        assert torch.equal(drawn.sample[name], draws.per_sample(name, num)), name
    for name, num in batch_nums.items():
        assert torch.equal(drawn.batch[name], draws.per_batch(name, num)), name


def test_no_streams(make_draws):
    assert Drawn.of(make_draws(2, 3), {}, {}) == Drawn({}, {})


def test_cells_in_different_epochs(make_draws):
    draws = dataclasses.replace(make_draws(3, 5), epoch=torch.tensor([4, 0, 9]))
    drawn = Drawn.of(draws, {"a": 5}, {"b": 3})
    assert torch.equal(drawn.sample["a"], draws.per_sample("a", 5))
    assert torch.equal(drawn.batch["b"], draws.per_batch("b", 3))
    for cell, epoch in enumerate((4, 0, 9)):
        alone = dataclasses.replace(make_draws(3, 5), epoch=torch.tensor(epoch))
        assert torch.equal(drawn.sample["a"][cell], alone.per_sample("a", 5)[cell])


def test_parts_are_where_a_cell_alone_has_them(make_draws):
    """As many draws as each cell needs, cut into equal parts, whatever the others need."""
    nums, num_parts = [2, 0, 5, 3], 3
    draws = make_draws(len(nums), 7)
    parts = parts_of(draws.per_sample("a", num_parts * max(nums)), torch.tensor(nums), max(nums), num_parts)
    for cell, num in enumerate(nums):
        alone = draws.per_sample("a", num_parts * num)[cell].tensor_split(num_parts, dim=-1)
        for part, expected in zip(parts, alone, strict=True):
            assert part.shape == (len(nums), 7, max(nums))
            assert torch.equal(part[cell, :, :num], expected)
