"""Readers given files that nobody wrote: they read something, or say what is wrong; they never end in any other way."""

import copy
import math
import random
import re
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fuzzed_formats import FORMATS, Format
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.errors import InputError
from nearsight.train import RunConfig, modern

LIMIT_SECONDS, LIMIT_BYTES = 20, 2**31
"""Of a case: what takes longer hangs, and what takes more memory has swallowed it."""
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of damages, as fractions of a file."""
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|NaN")
HOSTILE = (
    *(b"1000000000000", b"99999999999999999999", b"2147483648", b"65536", b"-1", b"0", b"1.5", b"NaN", b"1e308"),
    *(b"1e999", b"Infinity", b'"x"', b"true", b"null", b"[]", b"{}", b"[[1]]", b"", b"9" * 5000),
)
"""Instead of a number."""
INSERTED = (
    b"\0" * 64,
    b"\xff" * 8,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"x" * 2**21,
    b"9" * 5000,
    b"\n",
    b",",
    b'"',
    b"../",
)

Damage = Callable[[bytes, int, random.Random], bytes]


def overwritten(content: bytes, at: int, by: bytes) -> bytes:
    return content[:at] + by + content[at + len(by) :]


def flipped(content: bytes, at: int, draw: random.Random) -> bytes:
    return overwritten(content, at, bytes([content[at] ^ (1 << draw.randrange(8))])) if at < len(content) else content


def cut_short(content: bytes, at: int, draw: random.Random) -> bytes:
    return content[:at]


def cut_out(content: bytes, at: int, draw: random.Random) -> bytes:
    return content[:at] + content[at + draw.randint(1, 64) :]


def doubled(content: bytes, at: int, draw: random.Random) -> bytes:
    return content[:at] + content[max(0, at - draw.randint(1, 4096)) :]


def scrambled(content: bytes, at: int, draw: random.Random) -> bytes:
    return overwritten(content, at, draw.randbytes(draw.randint(1, 8)))


def with_huge_number(content: bytes, at: int, draw: random.Random) -> bytes:
    """In binary: all that formats keep lengths in."""
    return overwritten(
        content, at, draw.choice((b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\0\0\0\x7f", b"\0" * 8))
    )


def inserted(content: bytes, at: int, draw: random.Random) -> bytes:
    return content[:at] + draw.choice(INSERTED) + content[at:]


def other_number(content: bytes, at: int, draw: random.Random) -> bytes:
    """The next number in a text, or the first."""
    found = NUMBER.search(content, at) or NUMBER.search(content)
    return content if found is None else content[: found.start()] + draw.choice(HOSTILE) + content[found.end() :]


DAMAGES: tuple[Damage, ...] = (
    *(flipped, cut_short, cut_out, doubled, scrambled, with_huge_number, inserted),
    *(other_number, other_number, other_number),  # the most telling of all
)


def damaged(content: bytes, number: int, draw: random.Random) -> bytes:
    """Every kind of damage at every place, again and again, a little aside of it each time."""
    damage, place = DAMAGES[number % len(DAMAGES)], PLACES[number // len(DAMAGES) % len(PLACES)]
    aside = draw.randint(0, max(1, len(content) // 4)) if number >= len(PLACES) * len(DAMAGES) else draw.randint(0, 12)
    at = round(place * len(content)) + (-aside if place == 1.0 else aside)
    return damage(content, min(max(at, 0), len(content)), draw)


class HangError(BaseException):
    """Which no reader takes for an error of the file."""


@contextmanager
def limited() -> Iterator[None]:
    """As much time and further memory as a case may take."""

    def end(*_: object) -> None:
        raise HangError

    status = Path("/proc/self/status").read_text()
    size = 1024 * int(re.search(r"VmSize:\s+(\d+)", status)[1])  # type: ignore[index]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def wanted_too_much(error: BaseException | None) -> bool:
    """Whether memory was asked for that is not there, be it that an error with a name was made of it."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Tally:
    """What became of damaged files."""

    tried: int = 0
    refused: int = 0
    survived: int = 0
    """Read all the same: the damage changed nothing, or one value into another."""
    lost: list[str] = field(default_factory=list)
    """Neither read nor refused by name, in time and in memory."""


TALLIES: dict[str, Tally] = {}


def fuzz(form: Format, folder: Path, most: int) -> Tally:
    """Damage the files of a format so often together, and at least each once."""
    folder.mkdir()
    form.write(folder)
    form.read(folder)  # what is good is read
    files = sorted(path for path in folder.glob(form.damaged) if path.is_file())
    # Not files alone: what is healed is written anew.
    good, draw, tally = {path: path.read_bytes() for path in files}, random.Random(2027), Tally()
    for number in range(max(most, len(files))):
        path = files[number % len(files)]
        path.write_bytes(damaged(good[path], number // len(files), draw))
        tally.tried += 1
        try:
            with warnings.catch_warnings(), limited():
                warnings.simplefilter("ignore")
                form.read(folder)
            tally.survived += 1
        except InputError as error:
            tally.refused += 1
            if wanted_too_much(error):
                tally.lost.append(f"{path.name}, damage {number}: {error}")
        except (Exception, HangError) as error:
            tally.lost.append(f"{path.name}, damage {number}: {type(error).__name__}: {error}"[:500])
        finally:
            for each, content in good.items():
                if not each.exists() or each.read_bytes() != content:
                    each.write_bytes(content)
    return tally


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.is_quick])
def test_a_few_files_of_every_format(tmp_path: Path, name: str) -> None:
    assert fuzz(FORMATS[name], tmp_path / "good", 6).lost == []


@pytest.mark.faults
@pytest.mark.parametrize("name", FORMATS)
def test_many_files_of_every_format(tmp_path: Path, name: str) -> None:
    TALLIES[name] = fuzz(FORMATS[name], tmp_path / "good", FORMATS[name].most)
    assert TALLIES[name].lost == []


@pytest.mark.faults
def test_how_many_damages_there_were(capsys: pytest.CaptureFixture[str]) -> None:
    """After all of the above."""
    rows = [(name, tally.tried, tally.refused, tally.survived, len(tally.lost)) for name, tally in TALLIES.items()]
    sums = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
    lines = ["| files | tried | refused | survived | lost |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in (*rows, ("all", *sums))]
    with capsys.disabled():
        print("\n" + "\n".join(lines), file=sys.stderr)  # which is seen from any process
    assert [row[0] for row in rows] == list(FORMATS)


VALUES = (
    *(None, True, 0, -1, 2**70, 10**400, 1.5, 1e308, math.nan, math.inf, "", "x", "\ud800", "cutmix"),
    *([], {}, [1], [[]], {"name": 3}, {"name": []}, {"name": "cutmix"}, {"name": "cutmix", "p": 2}),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*place, key)
        yield from places(item, (*place, key))


CONFIG = RunConfig(protocol=modern()).to_json()


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(place=st.sampled_from(list(places(CONFIG))), value=st.sampled_from(VALUES), kind=st.integers(0, 2))
def test_configs_that_are_json_but_no_configs(place: tuple[Any, ...], value: Any, kind: int) -> None:
    changed: Any = copy.deepcopy(CONFIG)
    at = changed
    for key in place[:-1]:
        at = at[key]
    if kind == 0:
        del at[place[-1]]
    elif kind == 1 and isinstance(at, dict):
        at["p"] = value
    else:
        at[place[-1]] = value
    try:
        config = RunConfig.from_json(changed, "config.json")
    except InputError as error:
        assert "config.json" in str(error)  # noqa: PT017 (what is not refused is looked at, too)
    else:
        assert RunConfig.from_json(config.to_json(), "again") == config
