"""The folder of each project can be removed, and everything else still stands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.checkout, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = sorted(path for path in ROOT.glob("projects/*") if path.is_dir())
MARKERS = "not (slow or fuzz or benchmark or gpu)"  # of the quick tests


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository without its projects."""
    folder = tmp_path_factory.mktemp("copy") / "house"
    left_out = shutil.ignore_patterns(
        "projects", ".git", ".venv*", "output", "__pycache__", "*.pth"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def _run_pytest(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_all_tests_of_the_house_are_found_without_projects(copy):
    _run_pytest(copy, "--collect-only", "tests")


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_the_house_stands_without_a_project(project, copy):
    """Its folder can be removed: pages, configurations and arrows are right without it."""
    others = shutil.ignore_patterns(project.name, "__pycache__")
    shutil.copytree(ROOT / "projects", copy / "projects", ignore=others)
    house = [f"tests/test_{name}.py" for name in ("structure", "docs", "configs")]
    try:
        _run_pytest(copy, "-m", MARKERS, *house)
    finally:
        shutil.rmtree(copy / "projects")
