"""The public names, and the one direction in which rooms import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ptq

PACKAGE = Path(ptq.__file__).parent
# From the ground up: a room imports from its own floor or from below.
FLOORS = [
    {"errors", "allocator", "interruption", "journal"},
    {"formats", "channels", "distributed", "hooks", "batches", "locking", "storage", "vision"},
    {"attention", "batchnorm", "capture", "graph", "observers", "packing", "rectified", "sampling"},
    {"ranges"},
    {"calibration"},
    {"smoothing", "quantization"},
    {"refinement"},
    {"evaluation", "mixed", "racing", "tasks"},
    {"analysis", "export", "folder", "sizing", "sweeping", "training"},
    {"run"},
    {"report"},
    {"grid"},
    {
        "analyze_commands",
        "cli",
        "commands",
        "compare_commands",
        "format_commands",
        "grid_commands",
        "report_commands",
        "train_commands",
    },
    {"__init__", "__main__"},
]


def rooms() -> dict[str, int]:
    return {room: floor for floor, names in enumerate(FLOORS) for room in names}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ptq":
            names = [node.module] if "." in node.module else [f"ptq.{alias.name}" for alias in node.names]
            found |= {name.split(".")[1] for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ptq.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    floors = rooms()
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in floors, f"{room} has no floor yet: give it one in this test and in CONTRIBUTING.md"
    above = {name for name in imports_of(path) if name != room and floors[name] >= floors[room]}
    same_floor = {name for name in above if floors[name] == floors[room]}
    assert above == same_floor, f"{path.name} imports {above - same_floor} from above"


def test_every_public_name_is_there_and_documented() -> None:
    assert list(ptq.__all__) == sorted(ptq.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in ptq.__all__:
        value = getattr(ptq, name)
        assert isinstance(value, (str, tuple)) or value.__doc__, name
    assert set(dir(ptq)) == set(ptq.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = ptq.quantise


@pytest.mark.parametrize("order", ["import ptq.calibration, ptq.smoothing", "import ptq"], ids=["rooms first", "plain"])
def test_verbs_are_functions_whatever_was_imported_before(order: str) -> None:
    code = f"{order}; import ptq; print([callable(getattr(ptq, v)) for v in ('calibrate', 'smooth', 'sweep')])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[True, True, True]"


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, ptq, ptq.cli; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "False False"
