"""Frozen dataclass configs to JSON and back, strictly: unknown fields and wrong types are named."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nearsight.errors import InputError

T = TypeVar("T")

ADDED: Mapping[str, Any] = types.MappingProxyType({"added": True})
"""Metadata of a field that came after runs had been stored, whose default says what those runs did: where it has that
value, `identifying` leaves it out, and they keep their identities."""

# Base classes whose instances say which subclass they are, under the key "name": base -> lookup of the subclass.
_families: dict[type, Callable[[str], type]] = {}


def register_family(base: type, lookup: Callable[[str], type]) -> None:
    """Let fields of type `base` hold any class that `lookup` finds by its `name`."""
    _families[base] = lookup


def field_docs(kind: type) -> dict[str, str]:
    """Field name → the text under the field in the dataclass's source, base classes included."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        definition: ast.stmt | None = _classes_in(owner.__module__).get(owner.__name__)
        if definition is None:  # below something else
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for above, below in itertools.pairwise(definition.body):
            if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
                docs[above.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


@functools.cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    """Name → class of a module's source. Python's own search reads the whole file again for each class."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {statement.name: statement for statement in source.body if isinstance(statement, ast.ClassDef)}


def encode(value: Any) -> Any:
    """A config as JSON values. Members of a registered family carry their name."""
    return _encode(value, lambda _owner, _field: True)


def identifying(value: Any) -> Any:
    """What of a config identifies it, as JSON values: all of it but `ADDED` fields that have their defaults."""
    return _encode(value, lambda owner, field: field.metadata != ADDED or getattr(owner, field.name) != field.default)


def _encode(value: Any, wanted: Callable[[Any, dataclasses.Field[Any]], bool]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _encode(getattr(value, field.name), wanted)
            for field in dataclasses.fields(value)
            if wanted(value, field)
        }
        in_family = any(isinstance(value, base) for base in _families)
        return {"name": type(value).name, **fields} if in_family else fields  # type: ignore[attr-defined]
    if isinstance(value, tuple | list):
        return [_encode(item, wanted) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """The config of type `kind` that `encode` turned into `value`; `where` names the place in error messages."""
    return typing.cast("T", _decode(kind, value, where))


def settle_numbers(config: Any, where: str = "") -> None:
    """Make the numbers of a config what reading it from its file would make them, or refuse them as reading would.

    1 and 1.0 are equal except in JSON, from which identities are made; and what is stored must be readable. For a
    frozen dataclass to call when it is made; `where` names it in error messages.
    """
    for name, kind, settled in _number_fields(config.__class__):
        value = getattr(config, name)
        found = tuple(map(type, value)) if type(value) is tuple else type(value)
        if found not in settled:
            object.__setattr__(config, name, _decode(kind, value, _join(where, name)))


@functools.cache
def _number_fields(kind: type) -> tuple[tuple[str, Any, frozenset[object]], ...]:
    """Fields for numbers: name, type, and the types of values (a tuple's: of its items) that stay as they are.

    Cached, because a study makes thousands of configs.
    """
    hints = _type_hints(kind)
    found = []
    for name in (field.name for field in dataclasses.fields(kind)):
        origin, arguments = typing.get_origin(hints[name]), typing.get_args(hints[name])
        members = arguments if origin in (typing.Union, types.UnionType, tuple) else (hints[name],)
        if any(member in (int, float, bool) for member in members):
            found.append((name, hints[name], frozenset({members} if origin is tuple else _types_of_values(members))))
    return tuple(found)


def check_choices(config: Any) -> None:
    """Refuse values that are not among the choices a field names, as reading it from a file would.

    For a frozen dataclass to call when it is made: code that compares with the first of two words would take any
    other for the second.
    """
    for name, kind in _choice_fields(config.__class__):
        _decode(kind, getattr(config, name), name)


@functools.cache
def _choice_fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """Name and type of fields that name their choices, alone or beside other types. Cached, as above."""
    hints = _type_hints(kind)
    names = (field.name for field in dataclasses.fields(kind))
    return tuple((name, hints[name]) for name in names if _names_choices(hints[name]))


def _names_choices(kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    is_union = origin in (typing.Union, types.UnionType)
    return origin is typing.Literal or (is_union and any(map(_names_choices, arguments)))


def _types_of_values(members: tuple[Any, ...]) -> set[type]:
    """Of a union, or of one type alone."""
    plain = [member for member in members if isinstance(member, type)]
    named = [typing.get_args(member) for member in members if typing.get_origin(member) is typing.Literal]
    return {*plain, *map(type, itertools.chain(*named))}


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise InputError(f"{where or 'value'} is {value!r}, but must be {_in_words(kind)}")
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    return _decode_scalar(kind, value, where)


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds:
        try:
            return _decode(kind, value, where)
        except InputError:
            if len(kinds) == 1:
                raise
    raise InputError(f"{where or 'value'} is {value!r}, but must be {' or '.join(map(_in_words, kinds))}")


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{where or 'value'} is {value!r}, but must be a list")
    if arguments[-1] is Ellipsis:
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        raise InputError(f"{where or 'value'} has {len(value)} items, but needs {len(arguments)}")
    return tuple(
        _decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise InputError(f"{where or 'the config'} is {value!r}, but must be an object with named fields")
    fields = dict(value)
    if kind in _families:
        if not isinstance(fields.get("name"), str):
            raise InputError(f"{where or 'the config'} has no 'name'")
        kind = _families[kind](fields.pop("name"))
    hints = _type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    for name in fields:
        if name not in known:
            raise InputError(f"{_join(where, name)} is not a setting this version knows")
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in fields:
            raise InputError(f"{_join(where, field.name)} is missing")
    return kind(**{name: _decode(hints[name], item, _join(where, name)) for name, item in fields.items()})


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    """Cached, because a study reads the configs of thousands of runs."""
    return typing.get_type_hints(kind)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    with contextlib.suppress(OverflowError):  # of a whole number that no float can hold
        if kind is float and is_number and math.isfinite(value):
            return float(value)
    if type(value) is kind and (kind in (int, bool) or (kind is str and _is_text(value))):
        return value
    raise InputError(f"{where or 'value'} is {value!r}, but must be {_in_words(kind)}")


def _is_text(value: str) -> bool:
    """JSON can hold halves of characters, which no file can."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _in_words(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    return f"of type {getattr(kind, '__name__', kind)}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
