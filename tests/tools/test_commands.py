"""Every command and every test beside a foreign package ``tools``, such as Detectron2 installs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
SOURCES = [
    p for part in ("lambda_det", "tools", "tests", "configs") for p in (ROOT / part).rglob("*.py")
]
# Runs each file of the command line with --help, which must answer at once
HELP = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
    else:
        raise AssertionError(f"{path} did not end")
    assert "torch" not in sys.modules, f"{path} imports PyTorch for --help"
"""


@pytest.fixture
def beside_foreign_tools(tmp_path):
    """Run Python with a package ``tools`` that cannot be imported first on its path."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/__init__.py").write_text("raise ImportError('the foreign tools')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def run(*arguments: str) -> str:
        command = [sys.executable, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": path}
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        return result.stdout

    return run


def _imports(path: Path) -> set[str]:
    """The first parts of the names that a file imports, relative imports left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def test_nothing_imports_tools():
    assert len(SOURCES) > 100
    assert [path for path in SOURCES if "tools" in _imports(path)] == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such mode")
def test_every_command_can_be_executed():
    commands = [path for path in TOOLS if path.read_bytes().startswith(b"#!")]
    assert commands and [path for path in commands if not os.access(path, os.X_OK)] == []


@pytest.mark.slow
def test_every_command_starts(beside_foreign_tools):
    assert beside_foreign_tools("-c", HELP, *TOOLS).count("usage: ") == len(TOOLS)


@pytest.mark.slow
def test_every_test_is_collected(beside_foreign_tools):
    output = beside_foreign_tools("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert "tests/tools/test_commands.py" in output
