"""Which lists of augmentations can be stacked, against stacking them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.augment import (
    AUGMENTATIONS,
    AutoAugment,
    CutMix,
    HorizontalFlip,
    Mixup,
    Pipeline,
    RandAugment,
    RandomCrop,
    ResizedCrop,
)
from nearsight.augment.pipeline import stack_key
from nearsight.errors import InputError
from nearsight.train.protocol import PROTOCOLS

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
