"""What a release is made of: version, site, image and workflows agree with the rest of the tree."""

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

from tests.tool import load_tool

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "NOTICE",
    "requirements.txt",
)


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone of this tree without tags, in a commit of its own."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in PACKAGED:
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
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "one")


def build(folder: Path, what: str) -> Path:
    command = [sys.executable, "setup.py", "--quiet", what, "--dist-dir", "made"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = (folder / "made").iterdir()
    return made


def version_in(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("lambda_det/version.py").decode()
        about = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        (of_metadata,) = re.findall(r"^Version: (.*)$", archive.read(about).decode(), re.M)
    assert f'__version__ = "{of_metadata}"' in text
    return of_metadata


@pytest.mark.slow
def test_the_version_is_that_of_the_tag(clone):
    written = (clone / "lambda_det" / "version.py").read_text("utf-8")
    assert f'"{version_in(build(clone, "bdist_wheel"))}"' in written  # no tag: the file's
    shutil.rmtree(clone / "made")
    git(clone, "tag", "v9.8.7rc1")
    git(clone, "tag", "other")
    assert version_in(build(clone, "bdist_wheel")) == "9.8.7rc1"
    shutil.rmtree(clone / "made")
    commit(clone)
    assert re.fullmatch(r"9\.8\.7rc1\+1\.g[0-9a-f]+", version_in(build(clone, "bdist_wheel")))
    assert (clone / "lambda_det" / "version.py").read_text("utf-8") == written


@pytest.mark.slow
def test_a_source_distribution_keeps_the_version_of_the_tag(clone, tmp_path):
    git(clone, "tag", "v9.8.7")
    with tarfile.open(build(clone, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert version_in(build(folder, "bdist_wheel")) == "9.8.7"


def _pages(nav: object) -> list[str]:
    parts = nav.values() if isinstance(nav, dict) else nav
    return [nav] if isinstance(nav, str) else [page for part in parts for page in _pages(part)]


def _site() -> dict:
    text = (ROOT / "mkdocs.yml").read_text("utf-8").replace("!ENV", "")
    return yaml.safe_load(text)


def test_each_page_is_in_the_site_once():
    pages = _pages(_site()["nav"])
    written = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(pages) == sorted([*written, "datasets.md", "index.md", "reference.md"])


@pytest.mark.slow
def test_the_site_has_no_broken_link_and_every_public_name(tmp_path):
    pytest.importorskip("mkdocs", reason='it is in the extra: pip install ".[docs]"')
    pytest.importorskip("mkdocstrings")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    import lambda_det

    text = (tmp_path / "reference" / "index.html").read_text("utf-8")
    for name in lambda_det.__all__:
        assert name.startswith("__") or re.search(rf'id="lambda_det\.[\w.]*\b{name}"', text), name


def test_the_image_follows_the_readme_and_the_pins():
    image = (ROOT / "Dockerfile").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for command in ("pip install .", "lambda-det doctor --install"):
        assert re.search(rf"^    {re.escape(command)}( |$)", readme, re.M)
        assert command in image.replace("--no-cache-dir ", "")
    pins = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    for pin in re.findall(r"\w+==[\w.]+", image):
        assert any(line.partition(";")[0].strip() == pin for line in pins), pin


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
