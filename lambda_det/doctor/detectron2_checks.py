"""Faults of the copy of Detectron2 that is used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lambda_det.doctor.finding import (
    Finding,
    first_line,
    folder_of,
    import_error,
    is_there,
    version,
)

_INSTALL = (
    "python tools/install_detectron2.py in the lambda_det repository installs it; or, with torch "
    "installed first: pip install --no-build-isolation "
    "git+https://github.com/facebookresearch/detectron2.git"
)
_NEWER = "Install a newer Detectron2 (0.6 as of 2023 or later). " + _INSTALL


def detectron2() -> Iterator[Finding]:
    if not is_there("detectron2"):
        yield Finding("Detectron2 is not installed.", _INSTALL)
        return
    folder = folder_of("detectron2")
    if folder is None:
        places = ", ".join(find_spec("detectron2").submodule_search_locations or ())
        yield Finding(
            f"`import detectron2` finds a folder of that name without code ({places}), and not the "
            "package.",
            "Start from another folder, or rename that one.",
        )
        return
    if import_error("torch") or import_error("torchvision"):
        return  # which Detectron2 imports
    error = import_error("detectron2.modeling")
    if error:
        yield Finding(
            f"Detectron2 in {folder} cannot be imported ({error}).",
            "If a module is missing, install it; else install Detectron2 anew. " + _INSTALL,
        )


def compiled_operators() -> Iterator[Finding]:
    folder = folder_of("detectron2")
    if folder is None or import_error("torch"):
        return
    if not any(folder.glob("_C*.so")) and not any(folder.glob("_C*.pyd")):
        yield Finding(
            "This Detectron2 has no compiled operators: deformable convolutions and rotated boxes "
            "are missing, and COCO evaluation takes the slower way. The lambda networks, Mask "
            "R-CNN, RetinaNet and Panoptic FPN need none of them.",
            "To have them, build upstream's Detectron2 with a C++ compiler (and nvcc for the GPU): "
            "pip install --no-build-isolation "
            "git+https://github.com/facebookresearch/detectron2.git",
            breaks=False,
        )
        return
    try:
        importlib.import_module("detectron2._C")
    except Exception as error:
        yield Finding(
            f"Detectron2's compiled operators in {folder} do not load ({first_line(error)}); they "
            f"were mostly built for another PyTorch than {version('torch')}.",
            "Build it anew: pip install --force-reinstall --no-deps --no-build-isolation "
            "git+https://github.com/facebookresearch/detectron2.git",
        )


def pkg_resources() -> Iterator[Finding]:
    folder = folder_of("detectron2")
    if folder is None or is_there("pkg_resources"):
        return
    if any("import pkg_resources" in text for _, text in _sources(folder / "model_zoo")):
        found = version("setuptools")
        yield Finding(
            f"There is no pkg_resources ({f'setuptools {found}' if found else 'no setuptools'} is "
            "installed), and detectron2.model_zoo cannot be imported without: scripts and configs "
            "that take a base config or weights from it stop. lambda_det does not use it.",
            'pip install "setuptools<81"',
        )


_NAMES = {"numpy": re.compile(r"\bnp\.(\w+)\b"), "PIL.Image": re.compile(r"\bImage\.([A-Z]{2,})\b")}
_GIVEN_UP = {
    "numpy": {"bool", "int", "float", "object", "str", "complex", "long", "unicode"},
    "PIL.Image": {"LINEAR", "CUBIC", "ANTIALIAS"},
}


def outdated_names() -> Iterator[Finding]:
    folder = folder_of("detectron2")
    if folder is None:
        return
    for module, pattern in _NAMES.items():
        if import_error(module):
            continue
        gone = _GIVEN_UP[module] - set(dir(importlib.import_module(module)))
        uses = sorted(
            f"{use[0]} in {path.relative_to(folder)}"
            for path, text in _sources(folder)
            for use in pattern.finditer(text)
            if use[1] in gone
        )
        if uses:
            name = "numpy" if module == "numpy" else "pillow"
            yield Finding(
                f"The Detectron2 in {folder} is too old for {name} {version(name)}, which has no "
                f"{uses[0]}.",
                _NEWER,
            )


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, path.read_text("utf-8", errors="replace")


def skipped_images() -> Iterator[Finding]:
    """``MapDataset`` draws a substitute from a set, which Python 3.11 no longer allows."""
    folder = folder_of("detectron2")
    if folder is None or sys.version_info < (3, 11):
        return
    file = folder / "data" / "common.py"
    if file.is_file() and "_rng.sample(self._fallback_candidates" in file.read_text("utf-8"):
        yield Finding(
            "In this Detectron2 a data mapper that skips an image (returns None) ends the training "
            "with a TypeError, from Python 3.11 on. lambda_det's own loader is not concerned.",
            "If your mapper skips images, install a newer Detectron2 or take Python 3.10.",
            breaks=False,
        )


def lambda_det() -> Iterator[Finding]:
    """Whether all of ours can be imported, where what it needs can be."""
    if any(import_error(name) for name in ("torch", "torchvision", "detectron2.modeling")):
        return
    for module in ("lambda_det.modeling", "lambda_det.detection.data", "lambda_det.detection"):
        error = import_error(module)
        if error:
            yield Finding(
                f"{module} cannot be imported ({error}).",
                "pip install of the lambda_det repository brings what it needs.",
            )
            return
