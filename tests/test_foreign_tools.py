"""Beside the real Detectron2, which installs a top-level package named ``tools``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
    str(file) for folder in ("tools", "datasets") for file in (ROOT / folder).glob("*.py")
)

HELP = """
import contextlib, importlib, io, runpy, sys
from pathlib import Path

def print_help(commands):
    for command in commands:
        sys.argv[:] = [command, "--help"]
        run = runpy.run_path if command.endswith(".py") else runpy.run_module
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                run(command, run_name="__main__")
            except SystemExit as end:
                assert not end.code, (command, end.code)
            else:
                raise AssertionError(f"{command} --help does not end")
        assert printed.getvalue().startswith("usage: "), command
"""
COMMANDS_SCRIPT = """
print_help(sys.argv[1:])
assert "torch" not in sys.modules
"""
MODULES_SCRIPT = """
root = sys.argv[1]
import lambda_det
print_help(["lambda_det.run", "lambda_det.doctor"])
for file in sorted(Path(root, "tests").rglob("test_*.py")):
    importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
assert "tools" not in sys.modules
"""


@pytest.fixture
def python(tmp_path):
    """Run a script where the import of ``tools`` finds another's, and fails."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("raise RuntimeError('the tools of another')")

    def python(script: str, *arguments: str) -> None:
        process = subprocess.run(
            [sys.executable, "-c", HELP + script, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr

    return python


@pytest.mark.checkout
def test_help_of_commands_imports_no_torch(python):
    python(COMMANDS_SCRIPT, *COMMANDS)


@pytest.mark.slow
def test_modules_with_commands_and_all_test_modules(python):
    python(MODULES_SCRIPT, str(ROOT))
