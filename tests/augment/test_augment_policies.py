"""Policies: the tables are torchvision's, the draws have the right frequencies, and the images are what was drawn."""

import itertools
from collections import Counter

import pytest
import torch
from torchvision.transforms import v2

from nearsight.augment import AutoAugment, ColorJitter, RandAugment, TimmRandAugment, TrivialAugment
from nearsight.augment.operations import Operation
from nearsight.augment.policies import POLICIES, STANDARD, WIDE, magnitude_tables, magnitudes
from nearsight.errors import InputError

NUM_DRAWS = 150_000
SIGNIFICANT = 1e-3
BY_NAME = {
    "Identity": Operation.IDENTITY,
    "ShearX": Operation.SHEAR_X,
    "ShearY": Operation.SHEAR_Y,
    "TranslateX": Operation.TRANSLATE_X,
    "TranslateY": Operation.TRANSLATE_Y,
    "Rotate": Operation.ROTATE,
    "Brightness": Operation.BRIGHTNESS,
    "Color": Operation.COLOR,
    "Contrast": Operation.CONTRAST,
    "Sharpness": Operation.SHARPNESS,
    "Posterize": Operation.POSTERIZE,
    "Solarize": Operation.SOLARIZE,
    "AutoContrast": Operation.AUTOCONTRAST,
    "Equalize": Operation.EQUALIZE,
    "Invert": Operation.INVERT,
}
NAME_OF = {operation: name for name, operation in BY_NAME.items()}


def key(*values: float) -> tuple[float, ...]:
    return tuple(round(float(value), 4) + 0.0 for value in values)


def outcomes_of_step(space, name, probability, strength, num_bins, size):
    """(operation, magnitude) → probability for one step of torchvision's policy."""
    magnitudes_of, signed = space[name]
    bins = magnitudes_of(num_bins, size, size)
    magnitude = 0.0 if bins is None else float(bins[strength])
    if name.startswith("Translate"):
        magnitude = float(int(magnitude))
    outcomes = Counter({key(Operation.IDENTITY, 0.0): 1 - probability})
    for sign in (1, -1) if signed and bins is not None else (1,):
        outcomes[key(BY_NAME[name], sign * magnitude)] += probability * (0.5 if signed and bins is not None else 1.0)
    return outcomes


def whole_pixels(operation, magnitude):
    translated = (operation == Operation.TRANSLATE_X) | (operation == Operation.TRANSLATE_Y)
    return torch.where(translated, magnitude.trunc(), magnitude)


def counted(operation, magnitude):
    """How often each row of (operation, magnitude, operation, magnitude, …) occurs."""
    rows = torch.stack((operation.double(), whole_pixels(operation, magnitude).double()), dim=-1).flatten(1)
    found, counts = ((rows * 1e4).round() / 1e4 + 0.0).unique(dim=0, return_counts=True)
    return {key(*row): count for row, count in zip(found.tolist(), counts.tolist(), strict=True)}


def compare(observed, expected, chi_square_p, num=NUM_DRAWS):
    assert set(observed) <= {outcome for outcome, p in expected.items() if p > 0}
    common = [outcome for outcome, p in expected.items() if p * num >= 5]
    rest = sum(p for p in expected.values() if p * num < 5)
    counts = [observed.get(outcome, 0) for outcome in common]
    wanted = [expected[outcome] * num for outcome in common]
    if rest * num >= 5:
        counts.append(num - sum(counts))
        wanted.append(rest * num)
    assert chi_square_p(torch.tensor(counts), torch.tensor(wanted)) > SIGNIFICANT


@pytest.mark.parametrize("policy", v2.AutoAugmentPolicy)
def test_policy_tables(policy):
    expected = v2.AutoAugment(policy)._policies
    ours = [
        tuple((NAME_OF[operation], probability, strength) for operation, probability, strength in pair)
        for pair in POLICIES[policy.value]
    ]
    assert ours == [tuple((name, p, strength or 0) for name, p, strength in pair) for pair in expected]


@pytest.mark.parametrize(
    ("ranges", "space", "num_bins"),
    [
        (STANDARD, v2.AutoAugment._AUGMENTATION_SPACE, 10),
        (STANDARD, v2.RandAugment._AUGMENTATION_SPACE, 31),
        (WIDE, v2.TrivialAugmentWide._AUGMENTATION_SPACE, 31),
    ],
)
@pytest.mark.parametrize("size", [(32, 32), (224, 200)])
def test_magnitudes_are_torchvisions(ranges, space, num_bins, size):
    tables = magnitude_tables(ranges, num_bins)
    for name, (magnitudes_of, signed) in space.items():
        operation = torch.full((num_bins,), int(BY_NAME[name]))
        ours = magnitudes(tables, operation, torch.arange(num_bins), torch.ones(num_bins), *size)
        assert bool(tables["signed"][operation[0]]) == (signed and magnitudes_of(2, *size) is not None), name
        expected = magnitudes_of(num_bins, *size)
        if expected is None:
            assert not ours.any(), name
        elif name.startswith("Translate"):
            assert [int(x) for x in ours] == [int(x) for x in expected], name
        else:
            assert torch.equal(ours, expected.float()), name


@pytest.mark.parametrize("policy", ["cifar10", "imagenet", "svhn"])
def test_autoaugment_frequencies(stacked_draws, chi_square_p, policy):
    cells, drawn = stacked_draws([AutoAugment(policy=policy)], NUM_DRAWS)
    observed = counted(*AutoAugment.draw(cells, drawn, 32, 32))
    expected = Counter()
    pairs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    for pair in pairs:
        steps = [outcomes_of_step(v2.AutoAugment._AUGMENTATION_SPACE, *step, 10, 32) for step in pair]
        for (first, p), (second, q) in itertools.product(*(step.items() for step in steps)):
            expected[first + second] += p * q / len(pairs)
    compare(observed, expected, chi_square_p)


def test_randaugment_frequencies_per_cell(stacked_draws, chi_square_p):
    settings = [RandAugment(num_ops=1, magnitude=17), RandAugment(num_ops=2, magnitude=4, p=0.7)]
    cells, drawn = stacked_draws(settings, NUM_DRAWS)
    operation, magnitude = RandAugment.draw(cells, drawn, 32, 32)
    space = v2.RandAugment._AUGMENTATION_SPACE
    for setting, rows in zip(settings, torch.arange(2 * NUM_DRAWS).chunk(2), strict=True):
        step = Counter()
        for name in space:
            for outcome, p in outcomes_of_step(space, name, 1.0, setting.magnitude, 31, 32).items():
                step[outcome] += p / len(space)
        nothing = key(Operation.IDENTITY, 0.0)
        expected = Counter()
        for first, p in step.items():
            for second, q in step.items() if setting.num_ops == 2 else [(nothing, 1.0)]:
                expected[first + second] += p * q * setting.p
        expected[nothing + nothing] += 1 - setting.p
        observed = counted(operation[rows], magnitude[rows])
        compare(observed, expected, chi_square_p)


def test_trivialaugment_frequencies(stacked_draws, chi_square_p):
    cells, drawn = stacked_draws([TrivialAugment()], NUM_DRAWS)
    operation, magnitude = TrivialAugment.draw(cells, drawn, 32, 32)
    space = v2.TrivialAugmentWide._AUGMENTATION_SPACE
    expected = Counter()
    for name, strength in itertools.product(space, range(31)):
        for outcome, p in outcomes_of_step(space, name, 1.0, strength, 31, 32).items():
            expected[outcome] += p / len(space) / 31
    compare(counted(operation.unsqueeze(-1), magnitude.unsqueeze(-1)), expected, chi_square_p)


def test_the_frequency_test_can_fail(stacked_draws, chi_square_p):
    """Draws of a policy with p = 0.98 must not pass for p = 1."""
    cells, drawn = stacked_draws([AutoAugment(p=0.98)], NUM_DRAWS)
    operation, _ = AutoAugment.draw(cells, drawn, 32, 32)
    untouched = float((operation == Operation.IDENTITY).all(-1).float().mean())
    expected = sum((1 - p) * (1 - q) for (_, p, _), (_, q, _) in POLICIES["cifar10"]) / 25
    counts = torch.tensor([untouched, 1 - untouched]) * NUM_DRAWS
    assert chi_square_p(counts, torch.tensor([expected, 1 - expected]) * NUM_DRAWS) < 1e-6


def test_colorjitter_orders_and_ranges(stacked_draws, chi_square_p):
    jitter = ColorJitter(brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1)
    cells, drawn = stacked_draws([jitter], NUM_DRAWS)
    operation, magnitude = ColorJitter.draw(cells, drawn)
    _, counts = operation.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert chi_square_p(counts, torch.full((24,), NUM_DRAWS / 24)) > SIGNIFICANT
    for kind, low, high in (
        (Operation.BRIGHTNESS, -0.4, 0.4),
        (Operation.CONTRAST, -1.0, 1.5),
        (Operation.COLOR, -0.2, 0.2),
        (Operation.HUE, -0.1, 0.1),
    ):
        values = magnitude[operation == kind]
        assert len(values) == NUM_DRAWS
        assert values.min() >= low
        assert values.max() <= high
        share = ((values - low) / (high - low) * 50).floor().clamp(0, 49).long().bincount(minlength=50)
        assert chi_square_p(share, torch.full((50,), NUM_DRAWS / 50)) > SIGNIFICANT


def test_timm_randaugment_draws(stacked_draws, chi_square_p):
    """Frequencies of timm's 15 operations at p = ½ each, and its formulas for the magnitude, written out."""
    cells, drawn = stacked_draws([TimmRandAugment(), TimmRandAugment(increasing=False, magnitude_std=0.0)], NUM_DRAWS)
    operation, magnitude = (x.view(2, NUM_DRAWS, 2) for x in TimmRandAugment.draw(cells, drawn, 32, 40))
    for cell in range(2):
        for turn in range(2):
            counts = operation[cell, :, turn].bincount(minlength=len(Operation))
            counts = counts[counts > 0]
            expected = torch.tensor([0.5] + [0.5 / 15] * 15) * NUM_DRAWS
            assert chi_square_p(counts, expected) > SIGNIFICANT

    def drawn_magnitudes(cell, kind):
        return magnitude[cell][operation[cell] == kind]

    level = 0.9  # the second cell: magnitude 9 of 10, without noise
    for kind, expected in (
        (Operation.POSTERIZE, {float(int(level * 4))}),
        (Operation.SOLARIZE, {(int(level * 256) - 0.5) / 255}),
        (Operation.SOLARIZE_ADD, {float(int(level * 110))}),
        (Operation.BRIGHTNESS, {level * 1.8 + 0.1 - 1}),
        (Operation.ROTATE, {27.0, -27.0}),
        (Operation.SHEAR_X, {0.27, -0.27}),
        (Operation.TRANSLATE_X, {0.405 * 40, -0.405 * 40}),
        (Operation.TRANSLATE_Y, {0.405 * 32, -0.405 * 32}),
    ):
        assert {round(x, 3) for x in drawn_magnitudes(1, kind).unique().tolist()} == {round(x, 3) for x in expected}, (
            kind
        )
    # The first cell: the level is N(9, 0.5²) cut at 10, and rotation is ±3° per level.
    rotation = drawn_magnitudes(0, Operation.ROTATE)
    assert abs(float((rotation > 0).float().mean()) - 0.5) < 4 * 0.5 / len(rotation) ** 0.5
    share_cut = float((rotation.abs() >= 30 - 1e-4).float().mean())
    assert abs(share_cut - 0.02275) < 4 * (0.02275 / len(rotation)) ** 0.5
    assert abs(float(rotation.abs().median()) / 3 - 9) < 0.05
    assert set(drawn_magnitudes(0, Operation.POSTERIZE).unique().tolist()) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("setting", [AutoAugment(), AutoAugment(policy="imagenet"), RandAugment(magnitude=12)])
def test_images_are_what_was_drawn(make_images, make_draws, stacked_draws, apply_one, setting):
    num = 200
    images = make_images(num).unsqueeze(0)
    cells, drawn = stacked_draws([setting], num)
    operation, magnitude = type(setting).draw(cells, drawn, 32, 32)
    result = apply_one([setting], images, torch.ones(1, num, 1), make_draws(1, num)).images_KBCHW[0]
    policy = v2.AutoAugment()
    for i in range(num):
        image = images[0, i]
        for kind, strength in zip(operation[i].tolist(), magnitude[i].tolist(), strict=True):
            image = policy._apply_image_or_video_transform(
                image, NAME_OF[Operation(kind)], strength, "nearest", policy._fill
            )
        assert (result[i] != image).float().mean() < 1e-3, i


def test_colorjitter_images(make_images, make_draws, stacked_draws, apply_one):
    setting = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    images = make_images(100).unsqueeze(0)
    cells, drawn = stacked_draws([setting], 100)
    operation, magnitude = ColorJitter.draw(cells, drawn)
    result = apply_one([setting], images, torch.ones(1, 100, 1), make_draws(1, 100)).images_KBCHW[0]
    adjust = {
        Operation.BRIGHTNESS: lambda x, m: v2.functional.adjust_brightness(x, 1 + m),
        Operation.CONTRAST: lambda x, m: v2.functional.adjust_contrast(x, 1 + m),
        Operation.COLOR: lambda x, m: v2.functional.adjust_saturation(x, 1 + m),
        Operation.HUE: v2.functional.adjust_hue,
    }
    for i in range(100):
        image = images[0, i]
        for kind, strength in zip(operation[i].tolist(), magnitude[i].tolist(), strict=True):
            image = adjust[Operation(kind)](image, strength)
        difference = (result[i].int() - image.int()).abs()
        assert (difference > 1).float().mean() < 0.01, i


def test_a_part_of_colorjitter_that_is_off_is_left_out(stacked_draws):
    cells, drawn = stacked_draws([ColorJitter(hue=0.0), ColorJitter(brightness=0.0)], 1000)
    operation, _ = ColorJitter.draw(cells, drawn)
    assert not (operation[:1000] == Operation.HUE).any()
    assert not (operation[1000:] == Operation.BRIGHTNESS).any()
    assert (operation[1000:] == Operation.HUE).any(-1).all()


def test_bad_settings():
    with pytest.raises(InputError, match=r"did you mean 'cifar10'"):
        AutoAugment(policy="cifar100")
    with pytest.raises(InputError, match=r"randaugment.magnitude"):
        RandAugment(magnitude=31)
    with pytest.raises(InputError, match=r"colorjitter.hue"):
        ColorJitter(hue=0.6)
    with pytest.raises(InputError, match=r"autoaugment.p"):
        AutoAugment(p=1.5)
    with pytest.raises(InputError, match=r"policy differs"):
        AutoAugment.stack([AutoAugment(), AutoAugment(policy="imagenet")], torch.device("cpu"))
