"""Every architecture of timm, and the other libraries' models, with every inducer: taken as it says, or refused."""

import os
from collections import Counter
from unittest import mock

import pytest
import timm
from foreign_references.case import Case
from foreign_references.registry import CASES, LIBRARIES
from foreign_references.write_rows import local_outcome
from vit_references.checking import Family, build
from vit_references.families import FAMILIES
from vit_references.local import Taken, as_weights, taken

from nearsight import measure

QUICK = ("vit_tiny_patch16_224", "convit_tiny")


def of_timm() -> list[object]:
    return [
        pytest.param(family, id=family.variant, marks=() if family.variant in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if family.layers
    ]


def check(found: dict[str, Taken]) -> None:
    """What is wrong has raised by now; a refusal has a reason."""
    assert all(one.reason for one in found.values() if one.kind in ("refused", "partly"))


@pytest.mark.parametrize("family", of_timm())
def test_a_family_takes_each_inducer_or_refuses_it(family: Family) -> None:
    if not timm.is_model(family.variant):
        pytest.skip(f"this timm has no {family.variant}")
    model, images = build(family)
    found = taken(
        model, lambda one: one(as_weights(images, one)), lambda one: measure(one, images), image_size=family.image_size
    )
    check(found)
    kinds = Counter(one.kind for one in found.values())
    if family.variant == "vit_tiny_patch16_224":
        assert kinds == {"gentle": 5, "abrupt": 5}
    if family.variant == "convit_tiny":  # its first blocks have a gate of their own behind the softmax
        assert "after their softmax" in found["relpos"].reason
        assert kinds == {"partly": 8, "refused": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{case.library}: {case.name}") for case in CASES if case.refused is None]
)
def test_a_model_of_another_library_takes_each_inducer_or_refuses_it(case: Case) -> None:
    pytest.importorskip(LIBRARIES[case.library].module)
    with mock.patch.dict(os.environ, case.environment):
        check(local_outcome(case))
