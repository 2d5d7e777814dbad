"""Packaging of lambda_det: `pip install .`, or `pip install -e .` to work on it."""

import os
import platform
import re
import runpy
import shlex
import subprocess
import tempfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
FILE = "lambda_det/version.py"
VERSION = r'^__version__ = "([^"]+)"$'
# LAMBDA_DET_KERNELS=1 makes a wheel for this kind of machine, with kernels for its processors
KERNELS = os.environ.get("LAMBDA_DET_KERNELS") == "1"


def version() -> str:
    """The version of the newest tag such as v0.1.0; "0.1.0+3.gCOMMIT" on the third commit after it.

    Without tags, git or a clone it is that of lambda_det/version.py, which distributions contain.
    """
    describe = ["git", "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        if (ROOT / ".git").exists():  # not in a source distribution that lies in another clone
            said = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout
            if found := re.fullmatch(r"v(.+)-(\d+)-(g\w+)\s*", said):
                tag, after, commit = found.groups()
                return tag if after == "0" else f"{tag}+{after}.{commit}"
    except OSError:  # git is not installed
        pass
    # Read, not imported: importing lambda_det needs torch.
    return re.search(VERSION, (ROOT / FILE).read_text("utf-8"), re.M).group(1)


def write_version(folder: str) -> None:
    """Write the version into lambda_det/version.py of the build."""
    file = Path(folder, FILE)
    if file.is_file():  # an editable installation has none
        text = re.sub(VERSION, f'__version__ = "{version()}"', file.read_text("utf-8"), flags=re.M)
        file.unlink()  # it may be a hard link to that of the clone
        file.write_text(text, "utf-8")


def write_kernels(folder: Path) -> None:
    """Compile the kernels for each processor of a wheel."""
    compiling = runpy.run_path(str(ROOT / "lambda_det" / "native" / "compiling.py"))
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    for name, flags in compiling["PROCESSORS"][platform.machine()].items():
        with tempfile.TemporaryDirectory() as parts:
            library = compiling["compile_kernels"](compiler, flags, Path(parts))
            (folder / f"kernels_{name}.so").write_bytes(library.read_bytes())


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_version(self.build_lib)
            if KERNELS:
                write_kernels(Path(self.build_lib, "lambda_det", "native"))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if KERNELS else tag  # the kernels know nothing of Python


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return KERNELS


class Sdist(sdist):
    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        write_version(base_dir)


setup(
    name="lambda_det",
    version=version(),
    distclass=Package,
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel, "sdist": Sdist},
    description="LambdaNetworks for Detectron2: backbones, Mask R-CNN and ImageNet pretraining",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # configs/ lies at the top, where users of Detectron2 look for it, and is lambda_det/configs in
    # the wheel.
    packages=[*find_packages(include=["lambda_det", "lambda_det.*"]), "lambda_det.configs"],
    package_dir={"lambda_det.configs": "configs"},
    package_data={
        "lambda_det": ["py.typed"],
        "lambda_det.configs": ["**/*.yaml", "**/*.py"],
        "lambda_det.native": ["*.cpp", "*.cu", "*.h"],
        "lambda_det.weights": ["files/*.pth"],
    },
    # Detectron2 is not listed: it is not on PyPI, and a requirement with a git address would fail
    # wherever only a package registry can be reached. `lambda-det doctor --install` brings it.
    install_requires=[
        "torch>=2.4",
        "torchvision>=0.19",
        "numpy>=1.26",
        # opencv-python would need libGL of the system, which servers lack.
        "opencv-python-headless>=4.8",
        "pillow>=9.4",
        "pycocotools>=2.0.7",
        "safetensors>=0.4",
        # Locks the folder of a run; torch also needs it.
        "filelock>=3.12",
        # Downloads published weights, which the recipes start from.
        "huggingface_hub>=0.17",
        # The fixed-size crop of polygons imports it, and no Detectron2 asks for it.
        "shapely>=2.0",
        # What Detectron2 itself imports, within its bounds. Its SORT tracker also needs scipy.
        "cloudpickle",
        "fvcore>=0.1.5.post20221221,<0.1.6",
        "hydra-core>=1.1",
        "iopath>=0.1.9,<0.1.10",
        "matplotlib>=3.6",
        "omegaconf>=2.1,<2.4",
        "packaging",
        "pyyaml>=5.1",
        "tabulate",
        "tensorboard",
        "termcolor>=1.1",
        "tqdm>4.29.0",
        "yacs>=0.1.8",
    ],
    entry_points={"console_scripts": ["lambda-det = lambda_det.cli:main"]},
    # lambda-det export writes ONNX with these, and compares what it has written; mkdocs.yml needs
    # the last ones
    extras_require={
        # TensorFlow's RMSProp, for MobileNet on ImageNet; teachers for pseudo-labels.
        "pretraining": ["timm>=1.0.12"],
        "onnx": ["onnx>=1.16", "onnxruntime>=1.17", "onnxscript>=0.3"],
        "docs": [
            # Nobody maintains MkDocs 1, and mkdocs-material gets only fixes. Its successor Zensical
            # reads mkdocs.yml, but does not run our hook yet.
            "mkdocs<2",
            "mkdocs-material>=9.5",
            "mkdocstrings>=0.29",
            "mkdocstrings-python",
            "ruff",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
