"""The folders of projects can be removed, and the pages of everything else are still right.

That nothing imports a project is in tests/test_structure.py.
"""

import shutil
from pathlib import Path

import pytest

from tests import forked

pytestmark = [pytest.mark.checkout, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]


def test_pages_are_right_without_projects(tmp_path):
    folder = tmp_path / "house"
    left_out = shutil.ignore_patterns(
        "projects", ".git", ".venv*", "output", "__pycache__", "*.pth"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_docs.py"]
    done = forked.run(words, tmp_path / "printed", cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:]
