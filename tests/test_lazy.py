"""`import nearsight` is nearly free, and yet everything is there when it is asked for."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import nearsight
from nearsight import lazy

ROOMS = [
    *("nearsight", "nearsight.lens", "nearsight.locat", "nearsight.metrics", "nearsight.models", "nearsight.probe"),
    *("nearsight.study", "nearsight.study.statistics", "nearsight.train", "nearsight.train.dino", "nearsight.report"),
    *("nearsight.train.structure", "nearsight.report.explorer", "nearsight.augment", "nearsight.data"),
]


def ran(program: str) -> str:
    """What a program prints in a process of its own, which has loaded nothing."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_loads_next_to_nothing() -> None:
    loaded = ran("import sys; before = set(sys.modules); import nearsight; print(*set(sys.modules) - before)").split()
    assert {name for name in loaded if name.startswith("nearsight")} == {
        "nearsight",
        "nearsight.lazy",
        "nearsight.version",
    }
    assert len(loaded) <= 60


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_what_it_offers(room: str) -> None:
    module = importlib.import_module(room)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {room} import no_such_name")


@pytest.mark.parametrize(
    "program",
    [
        'import nearsight, timm; timm.create_model("compact_vit")',
        'import timm, nearsight; timm.create_model("compact_vit")',
        'import nearsight\nfrom timm import create_model; create_model("locat_compact_vit")',
        'from nearsight import lazy\nfrom timm.models import create_model; create_model("compact_vit_positional")',
        # One of our own modules is the first to import timm, and not yet whole then.
        'import nearsight.models.compact, timm; timm.create_model("locat_vit_tiny_patch16_224")',
        'import nearsight.locat.attention, timm; timm.create_model("compact_vit")',
        'import nearsight; nearsight.create_model("jumbo_vit_tiny_patch16_224")',
        'import nearsight\nfrom importlib.util import find_spec; find_spec("timm")',
    ],
)
def test_timm_knows_our_models_in_any_order(program: str) -> None:
    check = "names = timm.list_models(); print('compact_vit' in names, 'locat_vit_base_patch16_224' in names)"
    assert ran(f"{program}\nimport timm\n{check}") == "True True"


def test_python_finds_and_reloads_modules_as_ever() -> None:
    program = """
import importlib, importlib.util, inspect, pkgutil, sys
import nearsight
watches = len(sys.meta_path)
spec = importlib.util.find_spec("timm")
assert spec.name == "timm" and type(spec.loader).__name__ == "SourceFileLoader" and "timm" not in sys.modules
import timm
assert len(sys.meta_path) == watches - 1 and not any("nearsight" in type(one).__module__ for one in sys.meta_path)
assert inspect.getsource(timm) and timm.__spec__.loader.get_source("timm")
assert importlib.reload(nearsight) is nearsight and nearsight.measure
assert importlib.reload(nearsight.lens) is nearsight.lens and nearsight.lens.measure
names = {module.name for module in pkgutil.iter_modules(nearsight.__path__)}
assert {"lens", "models", "cli", "lazy"} <= names
import importlib.resources
assert (importlib.resources.files("nearsight") / "py.typed").is_file()
print("fine")
"""
    assert ran(program) == "fine"


def test_a_name_that_is_also_a_modules_stays_what_is_offered() -> None:
    program = """
import nearsight.lens.survey, nearsight.probe.retrieve, nearsight.locat.refine
from nearsight.lens import measurement, survey
from nearsight.locat import refine
from nearsight.probe import retrieve
print(*(callable(one) for one in (measurement, survey, refine, retrieve)))
"""
    assert ran(program) == "True True True True"


def test_a_library_takes_its_own_place_at_its_first_use() -> None:
    program = """
import sys
from nearsight.augment import base, mixing
assert "torch" not in sys.modules and mixing.torch is base.torch
assert mixing.torch.float32
import torch
print(mixing.torch is torch, base.torch is torch)
from nearsight.lazy import np, torch as again
print(again is torch, np is sys.modules["numpy"])
"""
    assert ran(program) == "True True\nTrue True"


def test_marked_reads_names_from_text(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "one.py").write_text('import no_such\n\n@recipe("first")\ndef make():\n    """Said."""\n')
    (tmp_path / "two.py").write_text('\n@other("second")\nclass Two: ...\n\n@recipe(name)\ndef three(): ...\n')
    assert [(name, module) for name, module, _ in lazy.marked(tmp_path, "recipe")] == [("first", "below.one")]
    assert [name for name, _, _ in lazy.marked(tmp_path, "recipe", "other")] == ["first", "second"]


def test_every_name_of_the_front_page_is_documented() -> None:
    for name in nearsight.__all__:
        assert name == "__version__" or getattr(nearsight, name).__doc__, name
