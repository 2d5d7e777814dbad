"""The folder of each project can be removed, and everything else still stands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = [pytest.mark.checkout, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = sorted(path for path in ROOT.glob("projects/*") if path.is_dir())
WORDS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository without its projects."""
    folder = tmp_path_factory.mktemp("copy") / "house"
    left_out = shutil.ignore_patterns(
        "projects", ".git", ".venv*", "output", "__pycache__", "*.pth"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def test_the_house_stands_without_projects(copy):
    """All of its tests can be imported, and its configurations are right."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, *WORDS, "tests", "-k", "test_configs.py"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_pages_and_imports_are_right_without_a_project(project, copy, tmp_path):
    others = shutil.ignore_patterns(project.name, "__pycache__")
    shutil.copytree(ROOT / "projects", copy / "projects", ignore=others)
    try:
        house = [f"tests/test_{name}.py" for name in ("structure", "docs")]
        done = forked.run([*WORDS, *house], tmp_path / "printed", cwd=copy)
    finally:
        shutil.rmtree(copy / "projects")
    assert done.returncode == 0, done.stdout[-3000:]
