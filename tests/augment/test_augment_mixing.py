"""CutMix, Mixup and their relatives: boxes, weights, partners, targets; Beta variates and smoothed targets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.augment import CutFill, CutMix, Mixup, MixupOrCutMix, Pipeline, smooth_targets
from nearsight.augment.boxes import Box, box_of_area, snapped
from nearsight.augment.mixing import soft_mask
from nearsight.augment.streams import standard_normal, symmetric_beta
from nearsight.configuration import identifying
from nearsight.errors import InputError
from nearsight.randomness import Draws

MEAN = torch.tensor((0.5071, 0.4865, 0.4409)) * 255
STD = torch.tensor((0.2673, 0.2564, 0.2762)) * 255


def marked_batch(num_cells: int, num: int, height: int = 32, width: int = 32) -> tuple[Tensor, Tensor]:
    """Every image has its own grey level, and its own class: one can read off where a pixel came from."""
    level = torch.arange(num).to(torch.uint8).view(1, -1, 1, 1, 1)
    return level.expand(num_cells, -1, 3, height, width), torch.eye(num).expand(num_cells, -1, -1)


def kolmogorov(sample: Tensor, distribution: Tensor) -> float:
    """√n times the largest distance between the sample's and the given distribution function (1.95: p = 0.001)."""
    n = len(sample)
    step = torch.arange(1, n + 1, dtype=torch.float64) / n
    return float(torch.maximum((step - distribution).abs(), (step - 1 / n - distribution).abs()).max()) * math.sqrt(n)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 7.5])
def test_beta_distribution(alpha):
    n = 200_000
    generator = torch.Generator().manual_seed(3)
    draws = torch.randint(0, 2**24, (n, 2), generator=generator).float() * 2.0**-24
    sample = symmetric_beta(draws, torch.tensor(alpha)).double()
    assert abs(float((sample < 0.5).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(n)
    assert abs(float(sample.var()) * 4 * (2 * alpha + 1) - 1) < 0.02
    # By symmetry the smaller of x and 1 - x tells the rest. With y = xᵅ the density (1 - y^(1/α))^(α-1) is smooth, so
    # its sum over a fine grid is the distribution function.
    nearer = torch.minimum(sample, 1 - sample).sort().values
    num_steps = 200_000
    edge = torch.linspace(0, 0.5**alpha, num_steps + 1, dtype=torch.float64)
    middle = (edge[1:] + edge[:-1]) / 2
    mass = (1 - middle ** (1 / alpha)) ** (alpha - 1)
    function = torch.cat((torch.zeros(1, dtype=torch.float64), mass.cumsum(0))) / mass.sum()
    place = nearer**alpha / 0.5**alpha * num_steps
    below = place.floor().long().clamp(max=num_steps - 1)
    expected = function[below] + (place - below) * (function[below + 1] - function[below])
    # float32 cannot tell 1 - 1e-8 from 1, where a small α has real mass: such values are only counted.
    resolved = nearer > 1e-5
    step = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert float((step - expected)[resolved].abs().max()) * math.sqrt(n) < 1.95


def test_beta_at_the_ends_of_the_draws():
    ends = torch.tensor([0.0, 2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-24])
    draws = torch.cartesian_prod(ends, ends)
    for alpha in (0.01, 1.0, 100.0):
        values = symmetric_beta(draws, torch.tensor(alpha))
        assert ((values >= 0) & (values <= 1)).all()


def test_standard_normal():
    generator = torch.Generator().manual_seed(4)
    draws = torch.randint(0, 2**24, (100_000,), generator=generator).float() * 2.0**-24
    sample = standard_normal(draws).double().sort().values
    assert kolmogorov(sample, torch.special.ndtr(sample)) < 1.95
    assert standard_normal(torch.tensor([0.0, 1 - 2.0**-24])).isfinite().all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    kept=st.floats(0, 1, width=32),
    row=st.floats(0, 1, width=32, exclude_max=True),
    column=st.floats(0, 1, width=32, exclude_max=True),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
)
def test_box_is_torchvisions(kept, row, column, height, width):
    """The formula of torchvision's CutMix and of the paper's code, written out."""
    box = box_of_area(torch.tensor([[1 - kept]]), torch.tensor([[[row, column]]]), height, width)
    r = 0.5 * math.sqrt(torch.tensor(1 - kept).item())
    y, x = int(torch.tensor(row) * height), int(torch.tensor(column) * width)
    half_h, half_w = (int(torch.tensor(r * size, dtype=torch.float32)) for size in (height, width))
    expected = (max(y - half_h, 0), min(y + half_h, height), max(x - half_w, 0), min(x + half_w, width))
    assert tuple(int(edge) for edge in box) == expected
    assert int(box.mask(height, width).sum()) == int(box.area())


def test_cutmix_pastes_one_box_per_batch(make_draws, apply_one):
    num = 100
    images, targets = marked_batch(1, num)
    seen_areas = set()
    for step in range(20):
        batch = apply_one([CutMix(p=1.0)], images, targets, make_draws(1, num, step=step))
        pasted = batch.images_KBCHW[0] != images[0]
        mask = pasted.any(0).any(0)
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == rows * columns, "the pasted region is a rectangle"
        share = mask.sum() / mask.numel()
        seen_areas.add(float(share))
        partner = batch.images_KBCHW[0, :, 0][:, mask].long()
        if share > 0:
            assert (partner == partner[:, :1]).all(), "each box comes from one image"
            partner = partner[:, 0]
            assert sorted(partner.tolist()) == list(range(num)), "partners are a permutation"
            expected = torch.eye(num) * (1 - share) + torch.eye(num)[partner] * share
            assert torch.allclose(batch.targets_KBC[0], expected, atol=1e-6)
        assert torch.allclose(batch.targets_KBC.sum(-1), torch.ones(1, num), atol=1e-6)
    assert len(seen_areas) > 12


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_cutmix_area_distribution(make_draws, apply_one, alpha):
    """Label mass per sample against areas drawn with torch.distributions and the loop-written box."""
    num = 2_000
    images = torch.zeros(1, num, 1, 16, 16, dtype=torch.uint8)
    targets = torch.zeros(1, num, 2)
    targets[..., 0] = 1.0
    targets[0, : num // 2] = torch.tensor([0.0, 1.0])
    shares = []
    for epoch in range(10):
        batch = apply_one(
            [CutMix(p=1.0, alpha=alpha, per_sample=True)], images, targets, make_draws(1, num, epoch=epoch)
        )
        # Partners of the other class only: their share of the label is the box's area.
        share = torch.where(torch.arange(num) < num // 2, batch.targets_KBC[0, :, 0], batch.targets_KBC[0, :, 1])
        shares.append(share)
    observed = torch.cat(shares)
    torch.manual_seed(5)
    reference = []
    for kept in torch.distributions.Beta(alpha, alpha).sample((20_000,)).tolist():
        y, x = (int(torch.randint(16, ())) for _ in range(2))
        half = int(0.5 * math.sqrt(1 - kept) * 16)
        reference.append((min(y + half, 16) - max(y - half, 0)) * (min(x + half, 16) - max(x - half, 0)) / 256)
    expected = torch.tensor(reference)
    # Half the partners have the same class and show no share: a mixture of the areas with zero.
    for level in (0.02, 0.1, 0.25, 0.5, 0.75):
        p = 0.5 * float((expected > level).float().mean())
        assert abs(float((observed > level).float().mean()) - p) < 5 * math.sqrt(p * (1 - p) / 10_000)


def test_cutmix_coin(make_draws, apply_one):
    images, targets = marked_batch(3, 8)
    settings_of_cells = [CutMix(p=0.5), CutMix(p=0.0), None]
    mixed = torch.zeros(3)
    for step in range(300):
        batch = apply_one(settings_of_cells, images, targets, make_draws(3, 8, step=step))
        mixed += (batch.targets_KBC != targets).flatten(1).any(1)
        assert torch.equal(batch.images_KBCHW[1:], images[1:])
    assert mixed[1] == mixed[2] == 0
    # Some boxes are empty or cut with themselves, so a little below one half.
    assert 100 < mixed[0] < 175


def test_cutmix_per_sample_draws_per_sample(make_draws, apply_one):
    images, targets = marked_batch(2, 200)
    cells = [CutMix(p=0.5, per_sample=True), CutMix(p=1.0)]
    batch = apply_one(cells, images, targets, make_draws(2, 200))
    area = (batch.images_KBCHW != images)[:, :, 0].sum((-1, -2))
    assert len(area[0].unique()) > 50
    assert 0.3 < float((area[0] > 0).float().mean()) < 0.55
    assert len(area[1].unique()) <= 2


def test_patch_aligned_cutmix(make_draws, apply_one):
    images, targets = marked_batch(2, 200)
    cells = [CutMix(p=1.0, per_sample=True, patch=4), CutMix(p=1.0, per_sample=True, patch=1)]
    batch = apply_one(cells, images, targets, make_draws(2, 200))
    pasted = (batch.images_KBCHW != images)[:, :, 0]
    whole = pasted.view(2, 200, 8, 4, 8, 4).float().mean((3, 5))
    assert ((whole[0] == 0) | (whole[0] == 1)).all()
    assert ((whole[1] > 0) & (whole[1] < 1)).any()
    own = batch.targets_KBC[0].diagonal(dim1=0, dim2=1)
    area = pasted[0].flatten(1).float().mean(1)
    moved = area > 0
    assert torch.allclose(1 - own[moved], area[moved], atol=1e-6)


def test_snapping_moves_edges_to_the_nearest_line():
    edges = torch.arange(31).unsqueeze(0)
    box = snapped(Box(edges, edges, edges, edges), torch.tensor([[8]]), 30, 30)
    expected = [min(30, math.floor(e / 8 + 0.5) * 8) for e in range(31)]
    assert box.top[0].tolist() == box.right[0].tolist() == expected
    assert torch.equal(snapped(Box(edges, edges, edges, edges), torch.tensor([[1]]), 30, 30).left, edges)


def test_feathered_cutmix(make_draws, apply_one):
    """The mask is the box blurred by a Gaussian; the label's share is the mask's mean; feather 0 stays sharp."""
    images, targets = marked_batch(2, 50)
    cells = [CutMix(p=1.0, per_sample=True, feather=2.0), CutMix(p=1.0, per_sample=True)]
    batch = apply_one(cells, images, targets, make_draws(2, 50))
    sharp = apply_one([cells[1], cells[1]], images, targets, make_draws(2, 50))
    assert torch.equal(batch.images_KBCHW[1], sharp.images_KBCHW[1].float())
    assert torch.allclose(batch.targets_KBC[1], sharp.targets_KBC[1], atol=1e-6)
    assert torch.allclose(batch.targets_KBC.sum(-1), torch.ones(2, 50), atol=1e-6)
    # The mean grey level of a mixed image is the targets' mean of the two levels.
    level = torch.arange(50, dtype=torch.float32)
    assert torch.allclose(batch.images_KBCHW[0].mean((1, 2, 3)), batch.targets_KBC[0] @ level, atol=1e-3)
    assert (batch.images_KBCHW[0] != batch.images_KBCHW[0].round()).any()


@pytest.mark.parametrize("feather", [0.0, 1.5])
def test_cutmix_with_everybodys_own_label(make_draws, apply_one, feather):
    """The same images as with mixed labels, to the bit, and labels as they were; the cell beside it mixes its own."""
    images, targets = marked_batch(2, 40)
    own, mixed = (CutMix(p=1.0, per_sample=True, feather=feather, mix_labels=mix) for mix in (False, True))
    draws = make_draws(2, 40)
    batch, usual = (apply_one(cells, images, targets, draws) for cells in ([own, mixed], [mixed, mixed]))
    assert torch.equal(batch.images_KBCHW, usual.images_KBCHW)
    assert torch.equal(batch.targets_KBC[0], targets[0])
    assert torch.equal(batch.targets_KBC[1], usual.targets_KBC[1])
    assert not torch.equal(usual.targets_KBC[0], targets[0])


def test_a_setting_that_was_added_leaves_identities_alone():
    assert "mix_labels" not in identifying(CutMix())
    assert identifying(CutMix(mix_labels=False))["mix_labels"] is False


def test_soft_mask_is_a_blurred_box():
    box = Box(*(torch.tensor([[edge]]) for edge in (5, 20, 0, 12)))
    mask = soft_mask(box, torch.tensor([[1.5]]), 32, 32)[0, 0, 0].double()
    # Numerical blur: the box on a grid of 1/64 pixel, smoothed with a sampled Gaussian, read at pixel centres.
    fine = (torch.arange(-20 * 64, 52 * 64).double() + 0.5) / 64

    def blurred(start: float, end: float, at: float) -> float:
        inside = ((fine >= start) & (fine < end)).double()
        kernel = torch.exp(-0.5 * ((fine - at) / 1.5) ** 2)
        return float((inside * kernel).sum() / kernel.sum())

    for row, column in ((4, 3), (5, 0), (12, 11), (20, 12), (31, 31), (2, 13)):
        expected = blurred(5, 20, row + 0.5) * blurred(0, 12, column + 0.5)
        assert abs(float(mask[row, column]) - expected) < 1e-4


@pytest.mark.parametrize("mix_labels", [False, True])
def test_cutfill(make_draws, apply_one, mix_labels):
    num = 60
    images, targets = marked_batch(2, num)
    cells = [CutFill(p=1.0, noise=1.0, mix_labels=mix_labels, per_sample=True), CutFill(p=1.0, noise=0.0)]
    batch = apply_one(cells, images, targets, make_draws(2, num))
    changed = (batch.images_KBCHW != images).any(2)
    area = changed.flatten(2).float().mean(2)
    assert (area[0] > 0).float().mean() > 0.8
    # The mean fills exactly; noise has the data set's mean and deviation.
    filled = batch.images_KBCHW[1].permute(0, 2, 3, 1)[changed[1]]
    assert torch.allclose(filled, MEAN.expand_as(filled))
    noise = (batch.images_KBCHW[0].permute(0, 2, 3, 1)[changed[0]] - MEAN) / STD
    assert noise.mean().abs() < 0.03
    assert abs(float(noise.std()) - 1) < 0.03
    if mix_labels:
        own = batch.targets_KBC[0].diagonal(dim1=0, dim2=1)
        paired_with_another = own < 1
        assert torch.allclose((1 - own)[paired_with_another], area[0][paired_with_another], atol=1e-3)
        assert paired_with_another.float().mean() > 0.8
    else:
        assert torch.equal(batch.targets_KBC, targets)


def test_cutfill_draws_the_box_as_cutmix_does(make_draws, apply_one):
    """Same law, own stream: among many boxes the mean area and its spread are the same."""
    num = 4_000
    images = torch.zeros(1, num, 1, 16, 16, dtype=torch.uint8)
    images[0, ::2] = 255
    areas = []
    for setting in (CutMix(p=1.0, per_sample=True), CutFill(p=1.0, per_sample=True, noise=0.0)):
        changed = apply_one([setting], images, torch.ones(1, num, 1), make_draws(1, num)).images_KBCHW != images
        area = changed.flatten(2).float().mean(2)[0]
        areas.append(area[area > 0])
    assert abs(float(areas[0].mean() - areas[1].mean())) < 0.03
    assert abs(float(areas[0].std() - areas[1].std())) < 0.02


def test_mixup(make_draws, apply_one):
    num = 50
    images, targets = marked_batch(3, num)
    cells = [Mixup(p=1.0, alpha=0.8), Mixup(p=1.0, per_sample=True), None]
    batch = apply_one(cells, images, targets, make_draws(3, num))
    level = torch.arange(num, dtype=torch.float32)
    assert torch.allclose(batch.images_KBCHW.mean((-1, -2, -3)), batch.targets_KBC @ level, atol=1e-3)
    assert torch.allclose(batch.targets_KBC.sum(-1), torch.ones(3, num), atol=1e-6)
    shares = [batch.targets_KBC[cell].diagonal() for cell in range(2)]
    assert len(shares[0][shares[0] < 1].round(decimals=5).unique()) == 1
    assert len(shares[1].round(decimals=5).unique()) > 40
    assert torch.equal(batch.images_KBCHW[2], images[2].float())
    assert torch.equal(batch.targets_KBC[2], targets[2])


def test_mixup_or_cutmix_switches(make_draws, apply_one):
    """S2's mixing: mixup 0.8, cutmix 1.0, switch ½. A sharp image is CutMix's, a uniform one Mixup's."""
    num = 4_000
    images = torch.zeros(1, num, 1, 16, 16, dtype=torch.uint8)
    images[:, : num // 2] = 200
    targets = torch.zeros(1, num, 2)
    targets[0, : num // 2, 0] = 1
    targets[0, num // 2 :, 1] = 1
    setting = MixupOrCutMix(mixup_alpha=0.8, cutmix_alpha=1.0, switch_p=0.5, per_sample=True)
    batch = apply_one([setting], images, targets, make_draws(1, num))
    pixels = batch.images_KBCHW[0].flatten(1)
    assert torch.allclose(pixels.mean(1) / 200, batch.targets_KBC[0, :, 0], atol=1e-4)
    uniform = (pixels == pixels[:, :1]).all(1)
    whole = (pixels[:, 0] == 0) | (pixels[:, 0] == 200)
    blended, cut = uniform & ~whole, ~uniform
    assert (blended | cut | (uniform & whole)).all()
    assert ((pixels[cut] == 0) | (pixels[cut] == 200)).all()
    # Half of the samples meet the other class; a few boxes are empty or full.
    assert abs(float(blended.float().mean()) - 0.25) < 0.03
    assert 0.19 < float(cut.float().mean()) < 0.27
    # Beta(0.8, 0.8) has variance 1/(4·2.6).
    assert abs(float((pixels[blended, 0] / 200).var()) * 4 * 2.6 - 1) < 0.12


def test_mixup_or_cutmix_at_the_ends_of_the_switch(make_draws, apply_one):
    images, targets = marked_batch(2, 30)
    cells = [MixupOrCutMix(switch_p=1.0), MixupOrCutMix(switch_p=0.0)]
    batch = apply_one(cells, images, targets, make_draws(2, 30, step=1))
    assert torch.equal(batch.images_KBCHW[0], batch.images_KBCHW[0].round())
    flat = batch.images_KBCHW[1].flatten(1)
    assert torch.equal(flat, flat[:, :1].expand_as(flat))
    assert (batch.images_KBCHW[1] != images[1]).any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(smoothing=st.floats(0, 1), seed=st.integers(0, 1000))
def test_smoothing_is_cross_entropys(smoothing, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 8, 10, generator=generator)
    targets = torch.rand(2, 8, 10, generator=generator).softmax(-1)
    smoothed = smooth_targets(targets, torch.tensor([smoothing, 0.0]))
    expected = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(logits[0], targets[0])
    ours = -(smoothed[0] * logits[0].log_softmax(-1)).sum(-1).mean()
    assert torch.allclose(ours, expected, atol=1e-6)
    assert torch.equal(smoothed[1], targets[1])
    assert torch.allclose(smoothed.sum(-1), torch.ones(2, 8), atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    p=st.floats(0, 1),
    alpha=st.floats(0.05, 20),
    per_sample=st.booleans(),
    patch=st.integers(1, 9),
    feather=st.sampled_from([0.0, 0.7, 5.0]),
    kind=st.sampled_from([CutMix, Mixup, MixupOrCutMix, CutFill]),
)
def test_targets_stay_distributions(p, alpha, per_sample, patch, feather, kind):
    setting = {
        CutMix: lambda: CutMix(p=p, alpha=alpha, per_sample=per_sample, patch=patch, feather=feather),
        Mixup: lambda: Mixup(p=p, alpha=alpha, per_sample=per_sample),
        MixupOrCutMix: lambda: MixupOrCutMix(p=p, mixup_alpha=alpha, per_sample=per_sample),
        CutFill: lambda: CutFill(p=p, alpha=alpha, per_sample=per_sample, patch=patch, mix_labels=True),
    }[kind]()
    pipeline = Pipeline.stack([[setting], []], num_classes=5, mean=[0.5], std=[0.2], device=torch.device("cpu"))
    draws = Draws(torch.tensor([1, 2]), torch.tensor(0), torch.tensor(0), torch.arange(12).view(2, 6))
    images = torch.arange(2 * 6 * 70).remainder(256).to(torch.uint8).view(2, 6, 1, 10, 7)
    out, targets = pipeline(images, torch.arange(12).view(2, 6) % 5, draws)
    assert out.isfinite().all()
    assert targets.min() >= 0
    assert torch.allclose(targets.sum(-1), torch.ones(2, 6), atol=1e-5)


def test_bad_settings():
    for make in (lambda: CutMix(alpha=0.0), lambda: Mixup(alpha=-1.0), lambda: CutFill(alpha=float("nan"))):
        with pytest.raises(InputError, match=r"alpha is .* must be positive"):
            make()
    with pytest.raises(InputError, match=r"both must be positive"):
        MixupOrCutMix(mixup_alpha=0.0)
    with pytest.raises(InputError, match=r"cutmix.patch"):
        CutMix(patch=0)
    with pytest.raises(InputError, match=r"switch_p"):
        MixupOrCutMix(switch_p=1.5)


@pytest.mark.parametrize("mixing", [CutMix(p=1.0), CutMix(p=0.6, per_sample=True), Mixup(p=1.0)], ids=str)
def test_labels_are_smoothed_alike_before_mixing_and_after(mixing):
    """Weights of a mix sum to 1, so that it is no setting which comes first: of partners smoothed first, by hand."""
    pipeline = Pipeline.stack([[mixing]], num_classes=16, mean=(0.5,) * 3, std=(0.2,) * 3, device=torch.device("cpu"))
    images, labels = marked_batch(1, 16)[0], torch.arange(16).expand(1, -1)
    draws = Draws(torch.tensor([4]), torch.tensor(1), torch.tensor(2), labels)
    _, mixed_KBC = pipeline(images, labels, draws)
    smoothed_first = torch.einsum("kbc,cd->kbd", mixed_KBC, smooth_targets(torch.eye(16)[None], torch.tensor([0.1]))[0])
    assert (mixed_KBC.amax(-1) < 1).any()
    torch.testing.assert_close(smooth_targets(mixed_KBC, torch.tensor([0.1])), smoothed_first)
