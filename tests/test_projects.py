"""The folders of projects can be removed, and the pages of everything else are still right.

That nothing imports a project is in tests/test_structure.py.
"""

import shutil

import pytest

from tests import test_docs
from tests.test_docs import PAGES, ROOT

pytestmark = pytest.mark.checkout


def test_pages_are_right_without_projects(tmp_path, monkeypatch):
    folder = tmp_path / "house"
    left_out = shutil.ignore_patterns(
        "projects", ".git", ".venv*", "output", "__pycache__", "*.pth"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    monkeypatch.setattr(test_docs, "ROOT", folder)
    kept = [page for file in PAGES if (page := folder / file.relative_to(ROOT)).is_file()]
    assert 10 < len(kept) < len(PAGES)
    for page in kept:
        test_docs.test_what_a_page_names_exists(page)
