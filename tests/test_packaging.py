import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.shapes import make_shapes
from tests.test_structure import imported

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[1]
PACKAGED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
# Import names that differ from the distribution's.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "hydra": "hydra-core",
    "yaml": "pyyaml",
}


def build_wheel(copy: Path) -> Path:
    """The wheel of this tree, built in a copy so that no build/ is left in the tree."""
    for name in PACKAGED:
        shutil.copy(ROOT / name, copy)
    for name in ("lambda_det", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."],
        cwd=copy,
        check=True,
    )
    return next(copy.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("source"))


def install(wheel: Path, site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)


@pytest.fixture(scope="session")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_wheel_holds_every_module_and_config_and_nothing_else(wheel):
    modules = (ROOT / "lambda_det").rglob("*")
    suffixes = (".py", ".cpp", ".cu", ".h", ".typed", ".pth")
    expected = {str(p.relative_to(ROOT)) for p in modules if p.suffix in suffixes}
    for suffix in ("yaml", "py"):
        expected |= {
            f"lambda_det/{p.relative_to(ROOT)}" for p in ROOT.glob(f"configs/**/*.{suffix}")
        }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected
    licences = {Path(name).name for name in names if ".dist-info/" in name}
    assert {"LICENSE", "NOTICE"} <= licences
    assert any(name.startswith("lambda_det/configs/mask_rcnn") for name in held)


@pytest.mark.slow
def test_the_installed_wheel_trains_its_configurations(wheel, tmp_path):
    """By the name of one, in an empty folder."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install(wheel, site)
    make_shapes(tmp_path, num_train=4, num_val=2, size=64)
    sizes = ("INPUT.LSJ.SIZE", "64", "INPUT.MIN_SIZE_TEST", "64", "SOLVER.IMS_PER_BATCH", "2")
    words = ["--config", "configs/quick/shapes_lambdaresnet26_slim.yaml", "--output", "run"]
    done = subprocess.run(
        [site / "bin" / "lambda-det", "train", *words, *sizes, "SOLVER.MAX_ITER", "1"],
        cwd=empty,
        env={
            **os.environ,
            "PYTHONPATH": str(site),
            "DETECTRON2_DATASETS": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = (empty / "run" / "config.yaml").read_text()
    assert str(site / "lambda_det" / "configs") in recorded  # the place of the configuration
    assert (empty / "run" / "model_final.pth").is_file()
    assert [path.name for path in empty.iterdir()] == ["run"]


# Prints the library that is taken, and those that this processor can run and that are right
KERNELS = """
import ctypes, pathlib, torch
from lambda_det import native
from lambda_det.layers.local import local_position_output
from lambda_det.native import compiling
torch.manual_seed(0)
inputs = [torch.randn(2, 9, 9, 2, 3), torch.randn(2, 9, 9, 5, 4), torch.randn(3, 4, 7, 7)]
print(pathlib.Path(native._library()._name).stem)
for file in compiling.files(".so"):
    library = ctypes.CDLL(str(file))
    if library.suits_this_processor():
        native._library = lambda: library
        found = local_position_output(*inputs, "compiled")
        expected = local_position_output(*inputs, "query_first")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        print(file.stem)
"""


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(
    not (shutil.which("g++") and sys.platform == "linux" and platform.machine() == "x86_64"),
    reason="its kernels need g++ on Linux with x86-64",
)
def test_a_wheel_with_kernels_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMBDA_DET_KERNELS", "1")
    wheel = build_wheel(tmp_path)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    install(wheel, tmp_path / "site")
    places = {"PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env={**places, "PATH": ""},
        cwd=tmp_path / "site",  # where the sources were copied to, they would be imported
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    taken, *right = said.stdout.split()
    names = ["kernels_1_avx2", "kernels_2_avx512", "kernels_3_avx512_bf16"]
    assert right == names[: len(right)] and taken == right[-1]
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_everything_imported_is_required(metadata):
    required = {canonicalize_name(Requirement(r).name) for r in metadata.get_all("Requires-Dist")}
    assert "detectron2" not in required  # which is not on PyPI
    # PyTorch brings CUDA's bindings where they work; the last serves where somebody has it
    ours = {"lambda_det", "tools", "detectron2", "cuda", "lambda_networks"}
    for file in [*ROOT.glob("lambda_det/**/*.py"), *ROOT.glob("tools/**/*.py")]:
        names = {name.split(".")[0] for name in imported(file)} - ours - sys.stdlib_module_names
        missing = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in names} - required
        assert not missing, f"{file.relative_to(ROOT)} imports {missing}"


@pytest.mark.slow
def test_pins_exist_once_and_satisfy_the_ranges(metadata):
    pins = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            assert re.fullmatch(r"==[^,*]+", str(pin.specifier)), f"{line} is not a pin"
            name = canonicalize_name(pin.name)  # as some versions of setuptools write it
            assert name not in pins, f"{name} is pinned twice"
            pins[name] = str(pin.specifier).removeprefix("==")
    for line in metadata.get_all("Requires-Dist"):
        requirement = Requirement(line)
        if 'extra == "docs"' in line:  # no test needs them
            continue
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, line
