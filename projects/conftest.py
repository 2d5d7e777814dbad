"""The tests of a project find its package beside them, and have what tests/fixtures.py has."""

import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_configure  # noqa: F401

HERE = Path(__file__).parent
# No training of a user depends on these: their long tests run before a release
OF_A_RELEASE = ("benchmarks", "noisy_student", "paper")
LONG = ("slow", "fuzz", "benchmark")

sys.path[:0] = [str(path) for path in HERE.iterdir() if path.is_dir()]


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items):
    folders = [HERE / project for project in OF_A_RELEASE]
    for item in items:
        if any(map(item.get_closest_marker, LONG)) and {*folders} & {*item.path.parents}:
            item.add_marker("release")
