"""The core works alone: without its wings and projects.

No wing imports another (tests/test_structure.py), so each may also be deleted alone, with its rows
in the core's tables, which name what is imported where it is used.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.test_structure import ROOT, WINGS

pytestmark = [pytest.mark.slow, pytest.mark.checkout, pytest.mark.posix]

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


def test_the_core_works_alone(tmp_path):
    """All of its modules can be imported, and some of its tests are run."""
    others = (".*", "*.egg-info", "build", "site", "output", "projects")
    # With what Python has compiled: it is of these files, as their sizes and times show
    shutil.copytree(ROOT, tmp_path, ignore=shutil.ignore_patterns(*others), dirs_exist_ok=True)
    for wing in WINGS:
        shutil.rmtree(tmp_path / "lambda_det" / wing)
    (tmp_path / "tests" / "test_every_module.py").write_text(EVERY_MODULE)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in RUN)]
    done = subprocess.run(
        [sys.executable, *words, "-m", "not slow"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
