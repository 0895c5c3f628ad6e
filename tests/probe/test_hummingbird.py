"""The protocol of open-hummingbird-eval: against its own code where that is installed, and written again in loops."""

import math
import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch.nn import functional as F
from torchvision.transforms import ColorJitter, InterpolationMode, RandomResizedCrop, ToTensor
from torchvision.transforms import functional as TF

from nearsight.errors import InputError
from nearsight.models import create_model
from nearsight.probe import FeatureSpec, Preparation, Retriever, hummingbird, miou_score, reading
from nearsight.randomness import uniform

IGNORED, SIZE = 255, (32, 32)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREPARATION = Preparation(size=SIZE, mean=MEAN, std=STD)


class Pictures(list):
    """(image, mask) pairs; the colours of a picture follow its classes, but for noise."""

    def __init__(self, num, seed, labels):
        generator = torch.Generator().manual_seed(seed)
        colours = torch.rand(256, 3, generator=torch.Generator().manual_seed(7)) * 200
        for number in range(num):
            rows, columns = 40 + number % 3 * 9, 44 + number % 2 * 50
            coarse = torch.tensor(labels)[torch.randint(len(labels), (3, 4), generator=generator)]
            mask = coarse.repeat_interleave(-(-rows // 3), 0).repeat_interleave(-(-columns // 4), 1)[:rows, :columns]
            noise = 50 * torch.rand(rows, columns, 3, generator=generator)
            self.append(((colours[mask] + noise).to(torch.uint8).permute(2, 0, 1), mask.to(torch.uint8)))


def pictures(name="made", labels=(0, 1, 2, 2, IGNORED)):
    """Five classes, of which one is nowhere."""
    names = ("floor", "sea", "sand", "nowhere", "stone")
    parts = {"train": Pictures(4, 0, labels), "test": Pictures(3, 1, (*labels, 4))}
    return SimpleNamespace(name=name, num_classes=5, class_names=names, ignore_index=IGNORED, **parts)


@pytest.fixture(scope="module")
def reader():
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=24, num_heads=3).eval()
    with reading(model, FeatureSpec(place="norm"), image_size=SIZE) as reader:
        yield reader


@contextmanager
def drawing(draws, monkeypatch):
    """Torchvision's crop with given draws instead of those of torch's generator."""
    waiting = iter(draws)

    def empty(_):
        return SimpleNamespace(
            uniform_=lambda low, high: torch.tensor(float(low) + next(waiting) * (float(high) - float(low)))
        )

    def randint(low, high, size):
        return torch.full(size, low + int(next(waiting) * (high - low)))

    fake = SimpleNamespace(empty=empty, randint=randint, log=torch.log, tensor=torch.tensor, exp=torch.exp)
    with monkeypatch.context() as patched:
        patched.setattr("torchvision.transforms.transforms.torch", fake)
        yield


@pytest.mark.parametrize("size", [(40, 60), (33, 33), (20, 90), (90, 20)])
def test_crops_are_those_of_torchvision(size, monkeypatch):
    image, generator, fallbacks = torch.zeros(3, *size), torch.Generator().manual_seed(0), 0
    for _ in range(50):
        draws = torch.rand(40, generator=generator).double().tolist()
        found = hummingbird.crop_window(size, draws)
        # torchvision draws a place only for a crop that fits, so the draws of a failed try are not all used.
        used = iter(draws)
        with drawing(aligned(used, size), monkeypatch):
            expected = RandomResizedCrop.get_params(image, scale=(0.5, 2.0), ratio=(3 / 4, 4 / 3))
        assert found == tuple(map(int, expected))
        fallbacks += found[2] == size[0] or found[3] == size[1]
    assert fallbacks


def aligned(draws, size):
    """Two draws of each try, and two more of the first that fits."""
    area = size[0] * size[1]
    for target, aspect, down, right in zip(draws, draws, draws, draws, strict=True):
        yield target
        yield aspect
        square = area * (0.5 + 1.5 * target)
        ratio = math.exp(math.log(3 / 4) + aspect * (math.log(4 / 3) - math.log(3 / 4)))
        if round(math.sqrt(square * ratio)) <= size[1] and round(math.sqrt(square / ratio)) <= size[0]:
            yield down
            yield right


def test_an_augmented_image_is_that_of_torchvisions_transforms():
    """In the order of the original: colours of a picture in bytes, tensor, normalised, then crop and size."""
    (image, mask), generator = Pictures(2, 3, (0, 1, 4))[1], torch.Generator().manual_seed(1)
    for _ in range(8):
        draws = torch.rand(48, generator=generator).tolist()
        found, labels = hummingbird.augmented(image, mask, SIZE, draws)
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        for place, name in enumerate(("brightness", "contrast", "saturation", "hue")):
            whether, amount = draws[2 * place : 2 * place + 2]
            low, high = getattr(ColorJitter(**{name: 0.1}), name)
            if whether < 0.5:
                picture = getattr(TF, f"adjust_{name}")(picture, low + amount * (high - low))
        normal = TF.normalize(ToTensor()(picture), MEAN, STD)
        window = hummingbird.crop_window(tuple(mask.shape), draws[8:])
        expected = TF.resized_crop(normal, *window, SIZE, interpolation=InterpolationMode.BILINEAR, antialias=True)
        torch.testing.assert_close(PREPARATION.normalized(found)[0], expected, atol=2e-5, rtol=0)
        target = ToTensor()(Image.fromarray(mask.numpy()))
        target = TF.resized_crop(target, *window, SIZE, interpolation=InterpolationMode.NEAREST)
        assert torch.equal(labels, (target * 255).long()[0])


def test_rare_patches_come_first():
    """The score of a patch: over its classes, in how many patches each is; in loops."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(30, 4, generator=generator) < 0.3).float()
    labels[:, 0] += 0.1
    labels /= labels.sum(1, keepdim=True)
    draws = torch.rand(30, generator=generator)
    scores = []
    for patch in range(30):
        present = [label for label in range(4) if labels[patch, label] > 0]
        often = [sum(bool(labels[other, label] > 0) for other in range(30)) for label in present]
        scores.append(sum(often) * float(draws[patch]))
    expected = sorted(range(30), key=scores.__getitem__)[:7]
    assert hummingbird.rare_first(labels, 7, draws).tolist() == expected
    assert sorted(hummingbird.rare_first(labels, 99, draws).tolist()) == list(range(30))


def test_classes_are_matched():
    confusion = torch.tensor([[1, 8, 0], [9, 0, 1], [0, 0, 0]])
    assert hummingbird.matched(confusion).tolist() == [1, 0, 2]
    found = random.Random(0).choices(range(50), k=64)
    confusion = torch.tensor(found).view(8, 8)
    ious = [
        [float(confusion[r, c] / (confusion[r].sum() + confusion[:, c].sum() - confusion[r, c])) for c in range(8)]
        for r in range(8)
    ]
    best = linear_sum_assignment(np.array(ious), maximize=True)[1]
    assert hummingbird.matched(confusion).tolist() == best.tolist()


def remembered(reader, dataset, num_epochs, quota=None, other=None):
    """(features [C], label shares) of every patch of the memory, image by image in float64."""
    num_classes, memory = dataset.num_classes + (other is not None), []
    for epoch in range(num_epochs):
        for place, (image, mask) in enumerate(dataset.train):
            where = torch.tensor(epoch), torch.tensor(place)
            draws = uniform(torch.tensor(5), "hummingbird images", *where, 48).tolist()
            picture, labels = hummingbird.augmented(image, mask, SIZE, draws)
            labels[labels == IGNORED] = 0 if other is None else other
            patches = reader(PREPARATION.normalized(picture))[0].flatten(1).T.double()
            shares = [
                [
                    float((labels[4 * row : 4 * row + 4, 4 * col : 4 * col + 4] == c).double().mean())
                    for c in range(num_classes)
                ]
                for row in range(8)
                for col in range(8)
            ]
            scores = uniform(torch.tensor(5), "hummingbird patches", *where, 64).double()
            often = (torch.tensor(shares) > 0).sum(0)
            for patch in range(64):
                scores[patch] *= sum(int(often[c]) for c in range(num_classes) if shares[patch][c] > 0)
            chosen = range(64) if quota is None else scores.argsort()[:quota].tolist()
            memory += [(patches[patch] / patches[patch].norm(), shares[patch]) for patch in chosen]
    return torch.stack([patch for patch, _ in memory]), torch.tensor([share for _, share in memory]).double()


def expected_miou(reader, dataset, memory, num_classes):
    features, labels = memory
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.float64)
    for image, mask in dataset.test:
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(SIZE, Image.Resampling.BILINEAR)
        small = TF.normalize(ToTensor()(picture), MEAN, STD)
        target = TF.resize(ToTensor()(Image.fromarray(mask.numpy())), SIZE, interpolation=InterpolationMode.NEAREST)
        queries = reader(small.unsqueeze(0))[0].flatten(1).T.double()
        predictions = []
        for query in queries:
            similarity = features @ query / query.norm()
            nearest = similarity.argsort(descending=True)[:7]
            weights = torch.exp(similarity[nearest] / 0.02)
            predictions.append((weights[:, None] * labels[nearest]).sum(0) / weights.sum())
        shares = torch.stack(predictions).T.unflatten(1, (8, 8)).unsqueeze(0).float()
        found = F.interpolate(shares, size=SIZE, mode="bilinear")[0].argmax(0)
        for true, taken in zip((target * 255).long().flatten().tolist(), found.flatten().tolist(), strict=True):
            if true != IGNORED:
                confusion[true, taken] += 1
    union = confusion.sum(1, keepdim=True) + confusion.sum(0, keepdim=True) - confusion
    ious = confusion / union.clamp(min=1e-8)
    rows, columns = linear_sum_assignment(1 - ious.numpy())
    return float(ious[rows, columns].mean())  # over all classes, also those that are nowhere


@pytest.mark.parametrize(
    ("name", "num_epochs", "size", "quota", "other"),
    [("made", 1, 10_000, None, None), ("made", 2, 8 * 9 + 3, 9, None), ("ade20k", 1, 10_000, None, 5)],
)
def test_a_data_set_from_end_to_end(reader, name, num_epochs, size, quota, other):
    dataset, settings = pictures(name), {"num_epochs": num_epochs, "size": size, "seed": 5}
    memory = hummingbird.build_memory(reader, dataset, PREPARATION, batch_size=3, **settings)
    expected = remembered(reader, dataset, num_epochs, quota, other)
    nearest, order = torch.cdist(memory.features_MC.double(), expected[0]).min(1)
    assert float(nearest.max()) < 1e-5
    assert len(memory) == len(expected[0]) == num_epochs * 4 * (quota or 64)
    assert len(set(order.tolist())) == len(order)
    torch.testing.assert_close(memory.labels_Mc.double(), expected[1][order], atol=1e-6, rtol=0)
    found = hummingbird.retrieve(reader, Retriever(memory, k=7), dataset, PREPARATION, batch_size=2)
    num_classes = 5 + (other is not None)
    assert found.mean_iou == pytest.approx(expected_miou(reader, dataset, expected, num_classes), abs=2e-3)
    assert found.mean_iou > 0.2
    assert found.per_class_iou[3] == 0  # which is nowhere, and counts
    assert miou_score(found.counts_N3c, count_absent=True).value == pytest.approx(found.mean_iou, abs=1e-12)
    assert 3 in found.unseen
    again = hummingbird.build_memory(reader, dataset, PREPARATION, batch_size=1, **settings)
    torch.testing.assert_close(again.features_MC, memory.features_MC)
    other_seed = hummingbird.build_memory(reader, dataset, PREPARATION, **{**settings, "seed": 6})
    assert not torch.allclose(other_seed.features_MC, memory.features_MC)


def test_bad_input_is_named(reader):
    dataset = pictures()
    with pytest.raises(InputError, match="--augmentation-epochs is 0"):
        hummingbird.build_memory(reader, dataset, PREPARATION, num_epochs=0)
    memory = hummingbird.build_memory(reader, dataset, PREPARATION, size=12)
    with pytest.raises(InputError, match="the memory has 5 classes, not 6"):
        hummingbird.retrieve(reader, Retriever(memory, k=3), pictures("ade20k"), PREPARATION)


def test_the_code_of_its_authors_gives_the_same(reader, monkeypatch):
    """With exact search in the place of FAISS on a GPU, on the same augmented images."""
    original = pytest.importorskip("hbird.hbird_eval", reason="needs open-hummingbird-eval 2.0.0")

    class Extractor(torch.nn.Module):
        eval_spatial_resolution, d_model = 8, 24

        def forward_features(self, images):
            return reader(images).flatten(2).transpose(1, 2), None

    class Exact:
        def __init__(self, memory, k):
            self.memory, self.k = memory, k

        def find_nearest_neighbors(self, queries):
            return (queries @ self.memory.T).topk(self.k).indices.numpy(), None

    def create(self, k, **_):
        self.NN_algorithm = Exact(self.feature_memory, k)

    monkeypatch.setattr(original.HbirdEvaluation, "_create_nn", create)
    dataset = pictures()
    train, test = [], []
    for place, (image, mask) in enumerate(dataset.train):
        draws = uniform(torch.tensor(5), "hummingbird images", torch.tensor(0), torch.tensor(place), 48).tolist()
        picture, labels = hummingbird.augmented(image, mask, SIZE, draws)
        train.append((PREPARATION.normalized(picture), labels[None, None] / 255))
    transforms = original.get_hbird_val_transforms(SIZE[0])
    whole = original.CombTransforms(img_transform=transforms["img"], img_tgt_transform=transforms["shared"])
    for image, mask in dataset.test:
        picture, target = whole(Image.fromarray(image.permute(1, 2, 0).numpy()), Image.fromarray(mask.numpy()))
        test.append((picture.unsqueeze(0), target.unsqueeze(0)))
    evaluation = original.HbirdEvaluation(Extractor(), train, 5, n_neighbours=7, nn_method="faiss")
    expected = evaluation.evaluate(test, 8, ignore_index=IGNORED)
    memory = hummingbird.build_memory(reader, dataset, PREPARATION, seed=5)
    found = hummingbird.retrieve(reader, Retriever(memory, k=7), dataset, PREPARATION)
    assert found.mean_iou == pytest.approx(float(expected), abs=2e-3)
