"""The house: each room imports only from rooms before it, the core only from libraries every machine has."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nearsight

ROOT = Path(nearsight.__file__).parent
LEVELS = [
    {"errors", "files", "lazy", "owner", "randomness", "configuration", "tensorfile", "triton_language", "version"},
    {"metrics", "augment"},
    {"data"},
    {"models"},
    {"locat"},
    {"lens"},
    {"train"},
    {"probe"},
    {"work"},
    {"study"},
    {"report"},
    {"papers"},
    {"bench", "recipes"},
    {"commands", "cli"},
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
FOUNDATIONS = LEVELS[0]
# What may be imported when these rooms are imported; anything else only inside a function, where it is needed.
CORE = {"metrics", "augment", "data", "models", "locat", "lens", "train", "probe"} | FOUNDATIONS
CORE_LIBRARIES = {"torch", "numpy", "timm", "torchvision", "safetensors", "pandas", "PIL"}


# The two looks ahead: methods of HeadTable that draw, say and write ask for it inside, when they are called; and so
# does a model's config whose attention is to be made local.
LOOKS_AHEAD = (
    ("lens/table.py", "nearsight.report"),
    ("models/factory.py", "nearsight.lens.locality"),
    ("models/factory.py", "nearsight.locat.inducers"),
)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (
                [f"nearsight.{alias.name}" for alias in node.names]
                if node.module == "nearsight"
                else [node.module or ""]
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


SOURCES = sorted(
    path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem not in ("__init__", "__main__")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_from_rooms_before_them(path: Path) -> None:
    room = room_of(path)
    for name in imports(ast.parse(path.read_text())):
        if not name.startswith("nearsight."):
            continue
        if (path.relative_to(ROOT).as_posix(), name) in LOOKS_AHEAD:
            continue
        other = name.split(".")[1]
        both_foundations = room in FOUNDATIONS and other in FOUNDATIONS
        assert other == room or both_foundations or LEVEL[other] < LEVEL[room], f"{room} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if room_of(p) in CORE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_core_needs_few_libraries_at_import(path: Path) -> None:
    allowed = CORE_LIBRARIES | {"nearsight"} | set(sys.stdlib_module_names)
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imports(ast.Module([node], [])):
                assert name.split(".")[0] in allowed, f"{path.name} imports {name} at module level"


@pytest.mark.parametrize(("place", "name"), LOOKS_AHEAD)
def test_what_looks_ahead_does_so_inside_functions_alone(place: str, name: str) -> None:
    tree = ast.parse((ROOT / place).read_text())
    assert name not in imports(
        ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    )
    assert name in imports(tree)


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in SOURCES} <= set(LEVEL)


def printing(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of print, except in a module's own `main`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node
        yield from printing(node)


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if room_of(path) not in ("commands", "cli")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_library_code_never_prints(path: Path) -> None:
    assert not list(printing(ast.parse(path.read_text())))


def test_the_guide_shows_the_same_rooms() -> None:
    """CONTRIBUTING.md has the order of the rooms in one line, and names all that lie below them."""
    guide = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^`(.* → .*)`$", guide, re.MULTILINE)
    assert [set(rooms.split(", ")) for rooms in line.split(" → ")] == LEVELS[1:]
    (below,) = re.findall(r"Below all rooms lie (.*?)\. `tests", guide, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", below)) == FOUNDATIONS
