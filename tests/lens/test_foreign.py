"""Models of other libraries: measured as their own code says, or refused with a reason; nothing between."""

import pytest
from foreign_references.case import Case
from foreign_references.outcomes import fault, outcome
from foreign_references.registry import CASES, LIBRARIES


def cases() -> list[object]:
    return [
        pytest.param(case, id=f"{case.library}: {case.name}", marks=[] if case.quick else [pytest.mark.slow])
        for case in CASES
    ]


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("case", cases())
def test_a_model_is_measured_as_its_own_code_says_or_refused(case: Case) -> None:
    pytest.importorskip(LIBRARIES[case.library].module)
    assert fault(case, outcome(case)) == ""


def test_names_are_those_of_one_model_each() -> None:
    names = [(case.library, case.name) for case in CASES]
    assert len(set(names)) == len(names)
