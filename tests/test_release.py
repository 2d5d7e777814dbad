"""What a release is made of: its version, and the versions of others that it is for."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from tests.test_packaging import PACKAGED
from tests.tool import load_tool

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone of this tree without tags, in a commit of its own."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in (*PACKAGED, "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "lambda_det").mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "lambda_det" / name, folder / "lambda_det")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> None:
    run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b", *words)


def commit(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "one")


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def build(folder: Path, what: str) -> Path:
    run(folder, sys.executable, "setup.py", "--quiet", what, "--dist-dir", "made")
    (made,) = (folder / "made").iterdir()
    return made


@pytest.mark.slow
def test_the_version_is_that_of_the_tag(clone, tmp_path):
    """Of the file without a tag; also in the wheel of a source distribution, which has no clone."""
    version = (sys.executable, "setup.py", "--quiet", "--version")

    def said(folder: Path) -> str:
        return run(folder, *version).strip()

    written = (clone / "lambda_det" / "version.py").read_text("utf-8")
    assert f'"{said(clone)}"' in written
    git(clone, "tag", "v9.8.7rc1")
    git(clone, "tag", "other")
    assert said(clone) == "9.8.7rc1"
    with tarfile.open(build(clone, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    commit(clone)
    assert re.fullmatch(r"9\.8\.7rc1\+1\.g[0-9a-f]+", said(clone))
    assert (clone / "lambda_det" / "version.py").read_text("utf-8") == written
    (folder,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(folder, "bdist_wheel")) as archive:
        assert '__version__ = "9.8.7rc1"' in archive.read("lambda_det/version.py").decode()
        about = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "\nVersion: 9.8.7rc1\n" in archive.read(about).decode()


def test_the_versions_are_the_same_everywhere():
    """Those that `make matrix` tries, the workflow, the page, and what the package asks for."""
    tried = [(pair.python, pair.torch, pair.numpy) for pair in load_tool("matrix", ".ci").PAIRS]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    strategy = workflow["jobs"]["quick"]["strategy"]["matrix"]
    assert strategy["pair"] == [f"{python}:{torch}" for python, torch, _ in tried]
    page = (ROOT / "docs/versions.md").read_text("utf-8")
    rows = re.findall(r"^\| (3\.\d+) \| (\S+) \| (\S+) \|", page, re.M)
    assert sorted(rows) == sorted(tried)

    setup = (ROOT / "setup.py").read_text("utf-8")
    minors = sorted({int(python.partition(".")[2]) for python, *_ in tried})
    assert re.search(r'python_requires=">=3\.(\d+)"', setup)[1] == str(minors[0])
    classified = re.search(r"for minor in \(([\d, ]+)\)", setup)[1]
    assert [int(minor) for minor in classified.split(", ")] == minors
    for place, name in ((1, "torch"), (2, "numpy")):
        least = re.search(rf'"{name}>=([\d.]+)"', setup)[1]
        assert min((pair[place] for pair in tried), key=Version).startswith(f"{least}.")
