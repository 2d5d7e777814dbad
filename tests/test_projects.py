"""The folders of projects can be removed, and the pages of everything else are still right.

That nothing imports a project is in tests/test_structure.py.
"""

import runpy
import shutil
from types import SimpleNamespace

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
    monkeypatch.setattr(
        test_docs,
        "load_tool",
        lambda name, room: SimpleNamespace(**runpy.run_path(str(folder / room / f"{name}.py"))),
    )
    kept = [page for file in PAGES if (page := folder / file.relative_to(ROOT)).is_file()]
    assert 10 < len(kept) < len(PAGES)
    for page in kept:
        test_docs.test_what_a_page_names_exists(page)
    test_docs.test_the_readme_is_one_page_with_its_two_commands()
    test_docs.test_the_page_of_keys_has_what_the_code_has()
