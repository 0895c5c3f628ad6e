"""Readers given files that nobody wrote: they read something, or say what is wrong; they never end in any other way."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzed_formats import FORMATS, Format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearsight.errors import InputError
from nearsight.train import RunConfig, modern

INSERTED = (
    b"\0",
    b"\xff",
    b"-1",
    b"nan",
    b"1e999",
    b"null",
    b'"',
    b"\n",
    b"\t",
    b",",
    b"../",
    b"9" * 5000,
    b"[" * 100_000,
)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Ways to damage a file. Places are fractions of its length, from either end: headers are there."""
    place, from_end, kind = draw(st.floats(0, 1)), draw(st.booleans()), draw(st.integers(0, 4))
    near, more = draw(st.booleans()), draw(st.binary(min_size=1, max_size=8))
    inserted = draw(st.sampled_from(INSERTED))

    def damage(content: bytes) -> bytes:
        position = int(place * (min(len(content), 200) if near else len(content)))
        position = len(content) - position if from_end else position
        before, after = content[:position], content[position:]
        damaged = (
            before,
            before + bytes(byte ^ 0x55 for byte in after[:1]) + after[1:],
            before + more + after[len(more) :],
            before + inserted + after[1:],
            before + after[len(more) :],
        )
        return damaged[kind]

    return damage


def fuzz(form: Format, folder: Path, num_examples: int) -> None:
    folder.mkdir()
    form.write(folder)
    form.read(folder)  # what is good is read
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(path=st.sampled_from(files), damage=damages())
    def read(path: Path, damage: Callable[[bytes], bytes]) -> None:
        content = path.read_bytes()
        path.write_bytes(damage(content))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                form.read(folder)
        except InputError:
            pass
        finally:
            path.write_bytes(content)

    read()


@pytest.mark.parametrize("name", FORMATS)
def test_a_few_files_of_every_format(tmp_path: Path, name: str) -> None:
    fuzz(FORMATS[name], tmp_path / "good", 6)


@pytest.mark.faults
@pytest.mark.parametrize("name", FORMATS)
def test_many_files_of_every_format(tmp_path: Path, name: str) -> None:
    fuzz(FORMATS[name], tmp_path / "good", 400)


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
