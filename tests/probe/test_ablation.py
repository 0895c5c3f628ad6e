"""What heads are worth: variants in groups and with a shared prefix give what one whole forward each gives."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.lens import Identity, Plan, Survey, Uniform, Zero, intervene, measure
from nearsight.lens.running import remembering_surveys, surveyed
from nearsight.metrics import mean_iou
from nearsight.metrics.segmentation import confusion_matrix
from nearsight.models import create_model
from nearsight.probe import (
    Ablation,
    Classes,
    Neighbours,
    Pixels,
    Tried,
    Variant,
    every_head,
    every_reach,
    fit_pixels,
    knn_right_of_others,
    miou_score,
    removal,
    try_variants,
)
from nearsight.probe.scores import image_counts
from nearsight.probe.search import unit

NUM_CLASSES = 7


def images(number: int = 6, side: int = 32) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))


def labels(number: int = 6) -> Tensor:
    return torch.arange(number) * 5 % NUM_CLASSES


def compact() -> nn.Module:
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=3, embed_dim=24, num_heads=2, num_classes=NUM_CLASSES)
    for parameter in model.parameters():  # so that heads matter
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def swin() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 4),
        num_classes=NUM_CLASSES,
    ).eval()


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=NUM_CLASSES)
    nn.init.normal_(model.heads[-1].weight)  # which torchvision sets to 0
    return model.eval()


class Looped(nn.Module):
    """One block that runs twice: what comes before it cannot be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = compact()
        self.vit.blocks = nn.Sequential(self.vit.blocks[0], self.vit.blocks[1], self.vit.blocks[0])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.vit(x)
        return out


def some(found: Survey) -> list[Variant]:
    last = len(found.layers) - 1
    plans: list[Plan] = [Zero({0: [1]}), Zero({last: [0]}), Uniform({last: None}), Identity({0: None, last: [1]})]
    listed = [Variant("own", plan, {"number": number}) for number, plan in enumerate(plans)]
    return [*every_reach(found, [1.5])[-2:], *listed]


def right_one_by_one(model: nn.Module, pictures: Tensor, classes: Tensor, found: Tried) -> np.ndarray:
    """By a loop: one variant, one whole forward."""
    rows = []
    with torch.no_grad(), remembering_surveys():
        for variant in found.variants:
            with intervene(model, variant.plan):
                said = [int(model(picture[None])[0].argmax()) for picture in pictures]
            rows.append(np.array(said) == classes.numpy())
    return np.array(rows)


@pytest.mark.parametrize(
    ("make", "at_once"), [(compact, 1), (compact, 4), (swin, 4), (torchvision_vit, 4), (Looped, 4)]
)
def test_groups_and_a_shared_prefix_give_what_whole_forwards_give(make: object, at_once: int) -> None:
    model = make()  # type: ignore[operator]
    pictures = images()
    with torch.no_grad():
        classes = model(pictures).argmax(-1)  # of which the unchanged model gets all right, and changed ones lose some
    batches = [(pictures[:4], classes[:4]), (pictures[4:], classes[4:])]
    found = try_variants(model, batches, some, Classes(), variants_at_once=at_once)
    whole = try_variants(model, batches, some, Classes(), variants_at_once=at_once, share=False)
    np.testing.assert_array_equal(found.values_VN, whole.values_VN)
    np.testing.assert_array_equal(found.values_VN, right_one_by_one(model, pictures, classes, found))
    assert found.base_N.mean() == 1.0
    assert all("forward" not in module.__dict__ for module in model.modules())  # it is left as it was


def answers(variants: tuple[Variant, ...], right: list[list[int]], base: list[int]) -> Ablation:
    model = compact()
    found = surveyed(model, images(1)[0])
    tried = Tried(found, variants, np.array(base, float), np.array(right, float), "accuracy")
    return Ablation(tried, measure(model, images(1)))


def test_losses_and_their_intervals_are_those_of_a_loop() -> None:
    base, right = [1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 1]
    found = answers((Variant("head", Zero({0: [0]}), {"plan": "zero", "layer": 0, "head": 0}),), [right], base)
    (row,) = found.rows()
    losses = [b - r for b, r in zip(base, right, strict=True)]
    # Bonett & Price (2012): (lost + 1) / (n + 2), (gained + 1) / (n + 2)
    lost, gained = ((losses.count(sign) + 1) / 8 for sign in (1, -1))
    error = ((lost + gained - (lost - gained) ** 2) / 8) ** 0.5
    assert row["accuracy"] == pytest.approx(3 / 6)
    assert row["loss"] == pytest.approx(sum(losses) / 6)
    assert row["loss_se"] == pytest.approx(error)
    ends = lost - gained - 1.96 * error, lost - gained + 1.96 * error
    assert (row["loss_low"], row["loss_high"]) == pytest.approx(ends)
    assert found.to_frame("head").columns.tolist()[:4] == ["plan", "layer", "layer_name", "head"]
    assert found.to_frame("reach").empty


def test_areas_are_means_over_trapezoids_of_single_images() -> None:
    settings = [("most local first", 1), ("most local first", 3), ("random 0", 1), ("random 0", 3), ("random 1", 3)]
    right = [[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
    base = [1, 1, 1, 0]
    variants = tuple(Variant("removal", Zero(), {"order": order, "removed": n}) for order, n in settings)
    (row,) = answers(variants, right, base).areas()
    areas = []
    for image in range(4):
        curve = [float(base[image]), *(float(row[image]) for row in right[:2])]
        chance = [float(base[image]), *(float(row[image]) for row in right[2:4])]
        own = (curve[0] + curve[1]) / 2 / 3 + (curve[1] + curve[2]) / 2 * 2 / 3
        random = (chance[0] + chance[1]) / 2 / 3 + (chance[1] + chance[2]) / 2 * 2 / 3
        areas.append((own, own - (random + (float(base[image]) + float(right[4][image])) / 2) / 2))
    own_areas, above = np.array(areas).T
    assert row["area"] == pytest.approx(own_areas.mean())
    assert row["above_random"] == pytest.approx(above.mean())
    assert row["above_random_se"] == pytest.approx(np.std([*above, 1, -1]) / 6**0.5)


def test_removal_ends_with_all_heads() -> None:
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    variants = removal(order, "own", step=2)
    assert [variant.settings["removed"] for variant in variants] == [2, 4, 5]
    assert variants[0].plan.heads == {0: [0, 1]}


def test_leave_one_out_is_a_loop() -> None:
    features = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(30) % 3
    found = knn_right_of_others(features, classes, k=4)
    unit = torch.nn.functional.normalize(features, dim=1).double()
    for query in range(30):
        similar = sorted(((float(unit[query] @ unit[at]), at) for at in range(30) if at != query), reverse=True)[:4]
        votes = [0.0] * 3
        for similarity, at in similar:
            votes[int(classes[at])] += np.exp(similarity / 0.07)
        assert bool(found[query]) == (int(np.argmax(votes)) == int(classes[query]))


def test_knn_reads_what_the_classifier_takes() -> None:
    """Exactly so: features as they are kept, of length 1 in half precision."""
    model, pictures, classes = compact(), images(24), torch.arange(24) % 3
    found = try_variants(model, [(pictures, classes)], lambda at: every_head(at, Zero, "zero")[:2], Neighbours())
    taken: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))  # type: ignore[union-attr]
    expected = []
    for plans in ([], [Zero({0: [0]})], [Zero({0: [1]})]):
        with torch.no_grad(), intervene(model, plans):
            model(pictures)
        expected.append(knn_right_of_others(unit(taken[-1]).half().float(), classes, k=20).numpy())
    np.testing.assert_array_equal(found.base_N, expected[0])
    np.testing.assert_array_equal(found.values_VN, expected[1:])
    assert (expected[1] != expected[0]).any()


def masks(number: int) -> list[Tensor]:
    """Of several sizes, with two classes of three and pixels that have none."""
    drawn = torch.Generator().manual_seed(3)
    found = [torch.randint(0, 3, (20 + 3 * at, 28), generator=drawn, dtype=torch.uint8) for at in range(number)]
    for mask in found:
        mask[:2] = 255
    return found


def test_pixels_are_those_of_a_loop() -> None:
    model, pictures, truth = compact(), images(5), masks(5)
    read = fit_pixels(model, [(pictures[:3], truth[:3]), (pictures[3:], truth[3:])], 3, steps=4, batch_size=2)
    batches = [(pictures[:3], truth[:3]), (pictures[3:], truth[3:])]
    found = try_variants(model, batches, some, read, variants_at_once=4)
    assert found.metric == "miou"
    tokens: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda *given: tokens.append(given[-1]))  # type: ignore[index, union-attr]
    scores = []
    with torch.no_grad(), remembering_surveys():
        for plan in [None, *(variant.plan for variant in found.variants)]:
            total = torch.zeros(3, 3, dtype=torch.int64)
            with intervene(model, [] if plan is None else plan):
                for picture, mask in zip(pictures, truth, strict=True):
                    model(picture[None])
                    features = tokens[-1][0, 1:].T.reshape(1, 24, 8, 8)
                    logits = nn.functional.interpolate(read.head(features), size=tuple(mask.shape), mode="bilinear")
                    total += confusion_matrix(logits.argmax(1)[0], mask, 3, 255)
            scores.append(float(mean_iou(total)))
    np.testing.assert_allclose(found.base_N.mean(), scores[0], rtol=1e-12)
    np.testing.assert_allclose(found.values_VN.mean(1), scores[1:], rtol=1e-12)
    assert np.ptp(scores) > 0.01


def test_the_interval_of_a_miou_is_that_of_resampled_images() -> None:
    drawn = torch.Generator().manual_seed(0)
    truth, said = (torch.randint(0, 4, (80, 100), generator=drawn) for _ in range(2))
    said = torch.where(torch.rand(80, 1, generator=drawn) < 0.5, truth, said)  # images differ in how hard they are
    counts = torch.stack([image_counts(confusion_matrix(s, t, 4, 255)) for s, t in zip(said, truth, strict=True)])
    values = Pixels(nn.Identity(), 4).values(counts.flatten(1), [], torch.device("cpu"))
    expected = miou_score(counts)
    assert values.mean() == pytest.approx(expected.value)
    error = values.std(ddof=1) / 80**0.5
    assert expected.low is not None
    assert expected.high is not None
    assert 2 * 1.96 * error == pytest.approx(expected.high - expected.low, rel=0.1)


def test_a_fitted_head_reads_what_patches_show() -> None:
    """Images of dark and bright halves, which any features tell apart."""
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=24, num_heads=2, num_classes=NUM_CLASSES).eval()
    truth = torch.zeros(12, 32, 32, dtype=torch.uint8)
    truth[:6, :16], truth[6:, :, 16:] = 1, 1
    pictures = (2.0 * truth[:, None] - 1.0).expand(-1, 3, -1, -1) + 0.1 * images(12)
    read = fit_pixels(model, [(pictures, truth)], 2, steps=60)
    found = nearsight.ablate(model, pictures, truth, what=["heads"], plans=["zero"], score=read)
    assert found.score > 0.9
    assert found.to_frame("head").columns.tolist()[4:6] == ["miou", "loss"]


def test_in_python_it_is_one_call() -> None:
    model, pictures = compact(), images(8)
    found = nearsight.ablate(model, pictures, labels(8), plans=["zero", "mean"], orders=1, reference=pictures[:4])
    heads = found.to_frame("head")
    assert heads["plan"].value_counts().to_dict() == {"zero": 6, "mean": 6}
    assert heads["mad"].notna().all()
    reaches = found.to_frame("reach")
    assert set(reaches["layer"]) == {0, 1, 2, "all"}
    assert reaches["reach"].max() == 6
    order = heads[heads["plan"] == "zero"].sort_values("mad")[["layer", "head"]].iloc[0]
    (first,) = [
        v for v in found.tried.variants if v.settings.get("order") == "most local first" and v.settings["removed"] == 1
    ]
    assert first.plan.heads == {order["layer"]: [order["head"]]}
    assert {row["order"] for row in found.areas()} == {"most local first", "least local first"}
    usual = nearsight.ablate(model, pictures, labels(8), what=["heads"])
    assert set(usual.to_frame("head")["plan"]) == {"zero", "identity", "uniform"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"labels": torch.arange(5)}, "8 images, but 5 labels"),
        ({"labels": torch.full((8,), 9)}, "classes; score='knn'"),
        ({"plans": ["zeros"]}, "zero"),
        ({"what": ["head"]}, "heads"),
        ({"plans": ["mean"]}, "reference"),
        ({"reaches": [-1.0]}, "0 or more"),
        ({"score": "nearest"}, "knn"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, object], said: str) -> None:
    arguments: dict[str, object] = {"labels": labels(8), **wrong}
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        nearsight.ablate(compact(), images(8), **arguments)  # type: ignore[arg-type]
