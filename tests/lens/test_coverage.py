"""Every architecture of timm: measured as an independent route says, or named as not spatial; none silently wrong."""

import importlib.util
import re

import pytest
import timm
from vit_references import without_attention
from vit_references.checking import (
    Family,
    build,
    check_that_a_wrong_geometry_would_show,
    expect,
    largest_difference,
)
from vit_references.families import FAMILIES, module_of

from nearsight import measure
from nearsight.lens.survey import survey


def variants() -> list[object]:
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(family, id=family.variant, marks=marks[family.slow]) for family in FAMILIES]


@pytest.mark.parametrize("family", variants())
def test_a_family_is_measured_as_its_own_code_says(family: Family) -> None:
    if not timm.is_model(family.variant):
        pytest.skip(f"this timm has no {family.variant}")
    model, images = build(family)
    if not family.layers:
        found = survey(model, images[0])
        assert not found.sites
        check_reasons(found.skipped, family)
        return
    expected = expect(model, images, family)
    check_that_a_wrong_geometry_would_show(expected)
    table = measure(model, images)
    assert largest_difference(table, expected) < 1e-5
    check_reasons(table.skipped, family)


def check_reasons(skipped: dict[str, str], family: Family) -> None:
    """What is not measured is named, with a reason that fits."""
    for name, reason in skipped.items():
        assert any(re.fullmatch(names, name) and words in reason for names, words in family.skipped.items()), (
            f"{name}: {reason}"
        )
    for names in family.skipped:
        assert any(re.fullmatch(names, name) for name in skipped), names


REFERENCED = {module_of(family.variant) for family in FAMILIES}
MODULES = [name for name in timm.list_modules() if importlib.util.find_spec(f"timm.models.{name}")]


# An LSTM takes long even where nothing is computed.
LONG = {"sequencer": [pytest.mark.slow]}


@pytest.mark.parametrize(
    "module",
    [pytest.param(module, marks=LONG.get(module, [])) for module in MODULES if module not in REFERENCED],
)
def test_a_family_without_reference_has_no_attention(module: str) -> None:
    variant = without_attention.MODULES.get(module) or timm.list_models(module=module)[0]
    if without_attention.attends(variant):
        assert module not in without_attention.MODULES, f"{variant} has a softmax after all"
        pytest.skip(f"timm's {module} is new: it has attention, and no reference here yet")


@pytest.mark.slow
@pytest.mark.parametrize("module", [module for module in MODULES if module in without_attention.MODULES])
def test_no_variant_of_a_family_without_attention_has_any(module: str) -> None:
    assert [variant for variant in timm.list_models(module=module) if without_attention.attends(variant)] == []
