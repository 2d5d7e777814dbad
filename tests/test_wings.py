"""The core works alone: without its wings, their rows in its tables, and projects.

No wing imports another (tests/test_structure.py), so each may also be deleted alone.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_structure import PACKAGE, ROOT, WINGS, imported

pytestmark = [pytest.mark.slow, pytest.mark.checkout, pytest.mark.posix]

TABLES = ("cli.py", "from_python.py", "detection/prediction/predictor.py", "weights/addresses.py")
# Tests of rooms of the core that are run in the copy
RUN = (
    "detection/test_config.py",
    "modeling/test_build.py",
    "weights/test_formats.py",
    "test_every_module.py",
)
# What is added to them there
EVERY_MODULE = """
import importlib
import sys
from pathlib import Path

import lambda_det

def test_every_module_is_imported():
    (folder,) = lambda_det.__path__
    root = Path(folder).parent
    assert root == Path(__file__).parents[1]
    files = [file for file in root.glob("lambda_det/**/*.py") if file.name != "__main__.py"]
    assert len(files) > 100
    for file in files:
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        # by its own name a package would be made a second time, with its operators
        importlib.import_module(name.removesuffix(".__init__"))
    # An editable installation finds what is not in this copy
    ours = {name: module for name, module in sys.modules.items() if name.startswith("lambda_det.")}
    assert [name for name, module in ours.items() if not module.__file__.startswith(folder)] == []
"""


def without_rows(source: str, wing: str) -> str:
    """A module without the rows of its tables that name something in a wing."""
    module = ast.parse(source)

    def names_it(row: ast.AST) -> bool:
        texts = (node.value for node in ast.walk(row) if isinstance(node, ast.Constant))
        starts = (f"{wing}.", f"lambda_det.{wing}.")
        return any(isinstance(text, str) and text.startswith(starts) for text in texts)

    for statement in module.body:
        table = getattr(statement, "value", None)
        if isinstance(table, ast.Dict):
            rows = zip(table.keys, table.values, strict=True)
            kept = [row for row in rows if not names_it(row[1])]
            table.keys, table.values = [key for key, _ in kept], [value for _, value in kept]
        elif isinstance(table, ast.Tuple):
            table.elts = [row for row in table.elts if not names_it(row)]
    return ast.unparse(module)


def users_of_wings(folder: Path) -> Iterator[Path]:
    """The tests and tools below a folder that import a wing, themselves or by others."""
    files = [file for room in ("tests", "tools") for file in (folder / room).rglob("*.py")]
    names = {".".join(file.relative_to(folder).with_suffix("").parts): file for file in files}
    uses = {name: set(imported(file)) for name, file in names.items()}
    wings = {f"lambda_det.{wing}" for wing in WINGS}
    reached = {
        name
        for name, used in uses.items()
        if any(".".join(each.split(".")[:2]) in wings for each in used)
    }
    while more := {name for name, used in uses.items() if used & reached} - reached:
        reached |= more
    yield from (names[name] for name in reached)


def copy_core(folder: Path) -> None:
    """Copy the project without its projects, its wings, their rows, and what uses them."""
    others = (".*", "*.egg-info", "build", "site", "output", "projects")
    # With what Python has compiled: it is of these files, as their sizes and times show
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*others), dirs_exist_ok=True)
    for wing in WINGS:
        shutil.rmtree(folder / "lambda_det" / wing)
        for table in TABLES:
            file = folder / "lambda_det" / table
            file.write_text(without_rows(file.read_text("utf-8"), wing), "utf-8")
    for file in list(users_of_wings(folder)):
        file.unlink()
    (folder / "tests" / "test_every_module.py").write_text(EVERY_MODULE)


def test_the_core_works_alone(tmp_path):
    """All of its modules can be imported, and some of its tests are run."""
    copy_core(tmp_path)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in RUN)]
    done = subprocess.run(
        [sys.executable, *words, "-m", "not slow"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_rows_of_a_wing_are_found():
    source = (PACKAGE / "cli.py").read_text("utf-8")
    kept = without_rows(source, "export")
    assert "export.command_line" not in kept
    assert "own_data.command_line" in kept
