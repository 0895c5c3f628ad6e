"""Two-level fractional designs: which conditions, and which effects they cannot distinguish.

Factors are the letters A, B, C, … (I is the identity and is left out), their levels -1 and +1. A generator D=ABC sets
the level of D to the product of the others, so the word ABCD is constant. Such words and their products are the
defining relation; two effects whose product is one of them are aliases: their columns are equal up to a sign
(Box, Hunter & Hunter, Statistics for Experimenters, ch. 6).
"""

import itertools
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearsight.errors import InputError

FRACTION = "fraction: "
"""What the description of such a design begins with."""
LETTERS = string.ascii_uppercase.replace("I", "")
Word = frozenset[str]


@dataclass(frozen=True)
class Fraction:
    """The design of so many two-level factors that these generators make."""

    num_factors: int
    generators: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.num_factors <= len(LETTERS):
            raise InputError(f"a fractional design has 1 to {len(LETTERS)} factors, not {self.num_factors}")
        basic = set(self.letters) - {letter for letter, _, _ in self._parsed()}
        for (letter, _, word), text in zip(self._parsed(), self.generators, strict=True):
            if letter in word or not word <= basic:
                raise InputError(
                    f"generator {text!r}: a factor is generated from those that are not, here {_join(basic)}"
                )
        if len(basic) + len(self.generators) != self.num_factors:
            raise InputError(f"two of the generators {', '.join(self.generators)} are of the same factor")

    @property
    def letters(self) -> str:
        return LETTERS[: self.num_factors]

    def rows(self) -> list[tuple[int, ...]]:
        """A row per condition: -1 (first level) or +1 (second) of every factor; the last basic one varies fastest."""
        generated = {letter: (sign, word) for letter, sign, word in self._parsed()}
        basic = [letter for letter in self.letters if letter not in generated]
        rows = []
        for signs in itertools.product((-1, 1), repeat=len(basic)):
            level = dict(zip(basic, signs, strict=True))
            for letter, (sign, word) in generated.items():
                level[letter] = sign * math.prod(level[each] for each in word)
            rows.append(tuple(level[letter] for letter in self.letters))
        return rows

    def defining_relation(self) -> dict[str, int]:
        """Every word that is constant over the design, with its sign; shortest first."""
        single = [(word | {letter}, sign) for letter, sign, word in self._parsed()]
        words: dict[Word, int] = {}
        for size in range(1, len(single) + 1):
            for some in itertools.combinations(single, size):
                word: Word = frozenset()
                for each, _ in some:
                    word ^= each  # a letter squared is the identity
                words[word] = math.prod(sign for _, sign in some)
        return {_join(word): words[word] for word in sorted(words, key=_order)}

    @property
    def resolution(self) -> int | None:
        """The length of the shortest word: main effects are aliased with no effect of fewer than one factor less."""
        return min(map(len, self.defining_relation()), default=None)

    def aliases(self, effect: str) -> tuple[str, ...]:
        """The effects that cannot be distinguished from this one, with a minus where their columns are opposite."""
        wanted = frozenset(effect)
        if not wanted <= set(self.letters):
            raise InputError(f"effect {effect!r} is not made of the factors {self.letters}")
        found = {wanted ^ frozenset(word): sign for word, sign in self.defining_relation().items()}
        return tuple(_signed(word, found[word]) for word in sorted(found, key=_order))

    def describe(self, names: Sequence[str]) -> str:
        """The design in a line for people, with the factors' names: aliases of main effects and of pairs."""
        letters = dict(zip(self.letters, names, strict=True))
        relation = " = ".join(_signed(frozenset(word), sign) for word, sign in self.defining_relation().items())
        named = ", ".join(f"{letter} {name}" for letter, name in letters.items())
        sets = "; ".join(self._alias_sets(letters))
        return f"{named}; I = {relation}, resolution {_ROMAN[self.resolution or 0]}; aliases: {sets}"

    def _alias_sets(self, letters: Mapping[str, str]) -> Iterable[str]:
        listed: set[str] = set()
        for size in (1, 2):
            for letter in itertools.combinations(letters, size):
                effect = "".join(letter)
                others = self.aliases(effect)
                if effect not in listed and others:
                    listed.update((effect, *(other.lstrip("-") for other in others)))
                    yield " = ".join((effect, *others))

    def _parsed(self) -> list[tuple[str, int, Word]]:
        """Generated letter, sign and word of each generator."""
        parsed = []
        for text in self.generators:
            left, equals, right = text.replace(" ", "").upper().partition("=")
            sign = -1 if right.startswith("-") else 1
            right = right.lstrip("+-")
            whole = set(left + right) <= set(self.letters) and len(set(right)) == len(right)
            if not equals or len(left) != 1 or not right or not whole:
                raise InputError(
                    f"generator {text!r} is not of the form D=ABC, with letters of the factors {self.letters}"
                )
            parsed.append((left, sign, frozenset(right)))
        return parsed


_FIRST_OF_12 = (1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1)


def folded_plackett_burman() -> list[tuple[int, ...]]:
    """Plackett and Burman's (1946) 12 rows of 11 two-level factors, then their mirror images: 24 rows of resolution IV.

    Main effects are apart from each other, from all interactions of two, and from which half a row is in. Of two
    interactions of two factors, either is mixed with a third (1/3 or −1/3) of the other, or with nothing of it.
    """
    size = len(_FIRST_OF_12)
    turned = [tuple(_FIRST_OF_12[(place - turn) % size] for place in range(size)) for turn in range(size)]
    rows = [*turned, (-1,) * size]
    return [*rows, *(tuple(-sign for sign in row) for row in rows)]


_ROMAN = ("none", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", *map(str, range(11, 27)))


def _order(word: Word) -> tuple[int, str]:
    return len(word), _join(word)


def _join(word: Iterable[str]) -> str:
    return "".join(sorted(word))


def _signed(word: Word, sign: int) -> str:
    return ("-" if sign < 0 else "") + (_join(word) or "I")
