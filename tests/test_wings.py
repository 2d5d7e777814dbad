"""Each wing may be deleted with its rows in the tables of the core: the rest works without it."""

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
# Tests of rooms of the core that are run in the copy; the others are only collected
RUN = (
    "test_imports.py",
    "detection/test_config.py",
    "detection/test_lazy_config.py",
    "modeling/test_build.py",
    "training/test_schedule.py",
    "weights/test_formats.py",
)


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


def users_of(wing: str, folder: Path) -> Iterator[Path]:
    """The tests, tools and projects below a folder that import a wing, themselves or by others."""
    files = [
        file for room in ("tests", "tools", "projects") for file in (folder / room).rglob("*.py")
    ]
    names = {".".join(file.relative_to(folder).with_suffix("").parts): file for file in files}
    uses = {name: set(imported(file)) for name, file in names.items()}
    prefix = f"lambda_det.{wing}"
    reached = {
        name
        for name, used in uses.items()
        if any(each == prefix or each.startswith(f"{prefix}.") for each in used)
    }
    while more := {name for name, used in uses.items() if used & reached} - reached:
        reached |= more
    yield from (names[name] for name in reached)


def delete(wing: str, folder: Path) -> None:
    """Copy the project without a wing, its rows and what uses it."""
    others = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "site", "output")
    shutil.copytree(ROOT, folder, ignore=others, dirs_exist_ok=True)
    shutil.rmtree(folder / "lambda_det" / wing)
    for table in TABLES:
        file = folder / "lambda_det" / table
        file.write_text(without_rows(file.read_text("utf-8"), wing), "utf-8")
    for file in list(users_of(wing, folder)):
        file.unlink()


@pytest.mark.parametrize("wing", WINGS)
def test_the_rest_works_without(wing, tmp_path):
    delete(wing, tmp_path)
    assert (tmp_path / "lambda_det" / "detection").is_dir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    modules = [
        ".".join(file.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((tmp_path / "lambda_det").rglob("*.py"))
        if file.name != "__main__.py"
    ]
    imports = "import importlib, lambda_det\n" + "\n".join(
        f"importlib.import_module({name!r})" for name in modules
    )
    check = f"{imports}\nassert lambda_det.__path__ == [{str(tmp_path / 'lambda_det')!r}]"
    options = ("-q", "-p", "no:cacheprovider")
    kept = [f"tests/{name}" for name in RUN if (tmp_path / "tests" / name).is_file()]
    for words in (
        ("-c", check),
        ("-m", "pytest", *options, "--collect-only", "tests"),
        ("-m", "pytest", *options, "-m", "not slow and not fuzz and not benchmark", *kept),
    ):
        run = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def test_rows_of_a_wing_are_found():
    source = (PACKAGE / "cli.py").read_text("utf-8")
    kept = without_rows(source, "export")
    assert "export.command_line" not in kept
    assert "own_data.command_line" in kept
