"""The house: imports run one way, and nothing relies on what the package does not bring."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tool import load_tool

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lambda_det"
# A wing may be deleted with its rows in the core's tables. The rest then works without it
WINGS = ("own_data", "export", "classification")
# A room imports from the lines above its own, and from itself: so no wing imports another
FLOORS = (
    ("errors",),
    ("first_use", "install_detectron2"),
    ("files", "config", "foundation", "native", "process", "version"),
    ("distributed", "weights"),
    ("cpu", "layers", "training"),
    ("modeling",),
    ("detection", "doctor"),
    ("run",),
    WINGS,
    ("cli",),
    ("from_python",),
    ("__init__", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def imported(file: Path) -> Iterator[str]:
    """The full name of every module that a file imports, also within functions."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module != "lambda_det":  # whose names are rooms, or are made by __init__
                yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def against_the_house(file: Path) -> list[str]:
    """The modules that a file of the package imports and must not."""
    own, found = room_of(file), []
    for name in imported(file):
        top, *rest = name.split(".")
        # model_zoo needs pkg_resources, which setuptools 81 and newer does not have
        foreign = top in ("tools", "tests") or name == "detectron2.model_zoo"
        if foreign or (own == "layers" and top == "detectron2"):
            found.append(name)
        elif top == "lambda_det":
            room = rest[0] if rest and rest[0] in LEVEL else "__init__"
            if room != own and LEVEL[room] >= LEVEL[own]:
                found.append(name)
    return found


def test_every_room_is_on_a_floor():
    rooms = {room_of(file) for file in PACKAGE.rglob("*.py")}
    assert rooms == set(LEVEL)


def test_imports_run_one_way():
    wrong = {str(f.relative_to(ROOT)): against_the_house(f) for f in PACKAGE.rglob("*.py")}
    assert not {file: names for file, names in wrong.items() if names}


def test_a_room_names_no_module_of_a_wing_except_in_a_table():
    """CONTRIBUTING.md has the tables, whose rows name "module:function"."""
    starts = tuple(f"lambda_det.{wing}" for wing in WINGS)
    named = {
        (str(file.relative_to(PACKAGE)), node.value)
        for file in PACKAGE.rglob("*.py")
        if room_of(file) not in WINGS
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith(starts) and ":" not in node.value
    }
    assert named == set()


# The folder of the project of each package that only a project has
PROJECTS = {path.parent.name: path.parents[1] for path in ROOT.glob("projects/*/*/__init__.py")}


@pytest.mark.slow
def test_nothing_imports_a_project():
    """Nor does one project import another."""
    rooms = ("lambda_det", "tools", "datasets", "configs", "tests", "projects")
    wrong = []
    for file in (file for room in rooms for file in ROOT.glob(f"{room}/**/*.py")):
        tops = {name.partition(".")[0] for name in imported(file)}
        own = {name for name, project in PROJECTS.items() if project in file.parents}
        wrong += [(file, top) for top in tops & ({"projects", *PROJECTS} - own)]
    assert wrong == []


def test_size_is_tokens_whatever_their_layout():
    """Folding, comments and docstrings change nothing; a table in a string counts by words."""
    count = load_tool("size", ".ci").python_tokens
    plain = 'def f(a, b):\n    return g(a, f"{b}!")\n'
    folded = 'def f(\n    a, b\n):\n    """Say."""\n    # why\n    return g(\n        a, f"{b}!")\n'
    assert count(plain) == count(folded) == 15
    assert count('T = """a b c\nd e"""\n') == 2 + 5
