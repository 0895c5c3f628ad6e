"""Fractional designs against those in the textbooks, and aliases against the columns themselves."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.errors import InputError
from nearsight.study.fractions import LETTERS, Fraction


def test_the_half_of_four_factors() -> None:
    """2^(4-1), Box, Hunter & Hunter, table 6.1."""
    design = Fraction(4, ("D=ABC",))
    assert set(design.rows()) == {
        *((-1, -1, -1, -1), (1, -1, -1, 1), (-1, 1, -1, 1), (1, 1, -1, -1)),
        *((-1, -1, 1, 1), (1, -1, 1, -1), (-1, 1, 1, -1), (1, 1, 1, 1)),
    }
    assert len(design.rows()) == 8
    assert design.defining_relation() == {"ABCD": 1}
    assert design.resolution == 4
    assert {effect: design.aliases(effect) for effect in ("A", "D", "AB", "AC", "AD", "ABCD")} == {
        "A": ("BCD",),
        "D": ("ABC",),
        "AB": ("CD",),
        "AC": ("BD",),
        "AD": ("BC",),
        "ABCD": ("I",),
    }
    assert design.describe(["cutmix", "autoaugment", "smoothing", "mixup"]) == (
        "A cutmix, B autoaugment, C smoothing, D mixup; I = ABCD, resolution IV; "
        "aliases: A = BCD; B = ACD; C = ABD; D = ABC; AB = CD; AC = BD; AD = BC"
    )


@pytest.mark.parametrize(
    ("num_factors", "generators", "relation", "resolution"),
    [
        (5, ("E=ABCD",), {"ABCDE"}, 5),
        (5, ("D=AB", "E=AC"), {"ABD", "ACE", "BCDE"}, 3),
        (6, ("E=ABC", "F=BCD"), {"ABCE", "BCDF", "ADEF"}, 4),
        (6, ("D=AB", "E=AC", "F=BC"), {"ABD", "ACE", "BCF", "BCDE", "ACDF", "ABEF", "DEF"}, 3),
    ],
)
def test_published_defining_relations(
    num_factors: int, generators: tuple[str, ...], relation: set[str], resolution: int
) -> None:
    design = Fraction(num_factors, generators)
    assert design.defining_relation() == dict.fromkeys(relation, 1)
    assert design.resolution == resolution
    assert len(set(design.rows())) == 2 ** (num_factors - len(generators))


def test_the_saturated_design_of_seven_factors() -> None:
    design = Fraction(7, ("D=AB", "E=AC", "F=BC", "G=ABC"))
    assert len(design.defining_relation()) == 15
    assert design.resolution == 3
    assert {alias for alias in design.aliases("A") if len(alias) == 2} == {"BD", "CE", "FG"}


def test_a_minus_sign_makes_the_other_half() -> None:
    plus, minus = Fraction(3, ("C=AB",)), Fraction(3, ("C = -AB",))
    assert set(plus.rows()) | set(minus.rows()) == set(itertools.product((-1, 1), repeat=3))
    assert minus.defining_relation() == {"ABC": -1}
    assert minus.aliases("A") == ("-BC",)


def test_no_generator_is_the_full_design() -> None:
    design = Fraction(3, ())
    assert sorted(design.rows()) == sorted(itertools.product((-1, 1), repeat=3))
    assert (design.defining_relation(), design.resolution, design.aliases("AB")) == ({}, None, ())


@st.composite
def fractions(draw: st.DrawFn) -> Fraction:
    num_basic, num_generated = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    words = [
        "".join(word) for size in range(2, num_basic + 1) for word in itertools.combinations(LETTERS[:num_basic], size)
    ]
    generators = tuple(
        f"{LETTERS[num_basic + number]}={draw(st.sampled_from(['', '-']))}{draw(st.sampled_from(words))}"
        for number in range(num_generated)
    )
    return Fraction(num_basic + num_generated, generators)


@given(design=fractions())
@settings(max_examples=60, deadline=None)
def test_aliases_are_the_effects_whose_columns_are_equal_or_opposite(design: Fraction) -> None:
    rows = design.rows()
    effects = [
        "".join(word)
        for size in range(1, design.num_factors + 1)
        for word in itertools.combinations(design.letters, size)
    ]

    def column(effect: str) -> list[int]:
        return [math.prod(row[design.letters.index(letter)] for letter in effect) for row in rows]

    columns = {"I": [1] * len(rows)} | {effect: column(effect) for effect in effects}
    for effect in effects:
        found = {other for other in columns if other != effect and columns[other] == columns[effect]}
        opposite = {f"-{other}" for other in columns if columns[other] == [-value for value in columns[effect]]}
        assert set(design.aliases(effect)) == found | opposite
        assert len(design.aliases(effect)) == 2 ** len(design.generators) - 1


def test_i_is_no_factor() -> None:
    assert "I" not in LETTERS
    assert Fraction(9, ("J=ABC",)).letters == "ABCDEFGHJ"


@pytest.mark.parametrize(
    ("generators", "words"),
    [
        (("ABC",), "not of the form D=ABC"),
        (("D=",), "not of the form D=ABC"),
        (("DE=AB",), "not of the form D=ABC"),
        (("D=AAB",), "not of the form D=ABC"),
        (("D=ABZ",), "not of the form D=ABC, with letters of the factors ABCDE"),
        (("D=ABD",), "generated from those that are not, here ABCE"),
        (("D=AB", "E=AD"), "generated from those that are not, here ABC"),
        (("D=AB", "D=AC"), "of the same factor"),
    ],
)
def test_generators_that_make_no_design(generators: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as error:
        Fraction(5, generators)
    assert words in str(error.value)


def test_effects_are_made_of_factors() -> None:
    with pytest.raises(InputError, match="not made of the factors ABCD"):
        Fraction(4, ("D=ABC",)).aliases("AX")
    with pytest.raises(InputError, match="1 to 25 factors"):
        Fraction(26, ())
