"""Faults of Python, PyTorch and the other packages."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from lambda_det.doctor.finding import Finding, first_line, import_error, is_there, release
from lambda_det.doctor.finding import version as version_of

_PYTHON = (3, 10)
_TORCH = (2, 4)
_SAME_INDEX = (
    "Install the two that belong together, in one command and from one index: pip install "
    "--force-reinstall torch torchvision (for the CPU only, with --index-url "
    "https://download.pytorch.org/whl/cpu)."
)


def python() -> Iterator[Finding]:
    if tuple(sys.version_info[:2]) < _PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        yield Finding(
            f"This is Python {found}, and lambda_det needs 3.10 or newer.",
            "Make an environment with a newer one: python3.12 -m venv .venv (or 3.10 to 3.13).",
        )


def torch() -> Iterator[Finding]:
    if not is_there("torch"):
        yield Finding("PyTorch is not installed.", "pip install torch torchvision")
        return
    error = import_error("torch")
    if error:
        yield Finding(
            f"PyTorch cannot be imported ({error}).",
            "Install it anew: pip install --force-reinstall torch torchvision",
        )
        return
    found = importlib.import_module("torch").__version__
    if release(found) < _TORCH:
        yield Finding(
            f"PyTorch {found} is too old: lambda_det needs 2.4 or newer.",
            "pip install --upgrade torch torchvision, and build Detectron2 anew if it has compiled "
            "operators.",
        )


def torch_and_numpy() -> Iterator[Finding]:
    if import_error("torch"):
        return
    if not is_there("numpy"):
        yield Finding("numpy is not installed.", "pip install numpy")
        return
    try:
        importlib.import_module("torch").zeros(1).numpy()
    except Exception as error:
        yield Finding(
            f"PyTorch {version_of('torch')} does not work with numpy {version_of('numpy')} "
            f"({first_line(error)}): no image reaches the model.",
            'Take a PyTorch built for numpy 2 (2.4 or newer), or pip install "numpy<2".',
        )


def torchvision() -> Iterator[Finding]:
    if import_error("torch"):
        return
    if not is_there("torchvision"):
        yield Finding("torchvision is not installed.", "pip install torchvision")
        return
    try:
        torch = importlib.import_module("torch")
        nms = importlib.import_module("torchvision").ops.nms
        nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
    except Exception as error:
        yield Finding(
            f"torchvision {version_of('torchvision')} comes without working operators for torch "
            f"{version_of('torch')} ({first_line(error)}); detection needs them.",
            _SAME_INDEX,
        )


def shapely() -> Iterator[Finding]:
    if not is_there("shapely"):
        yield Finding(
            "shapely is not installed. The fixed-size crop of large-scale jitter, and any crop of "
            "polygons, imports it in the middle of the training.",
            'pip install "shapely>=2"',
        )
        return
    error = import_error("shapely")
    if error:
        yield Finding(
            f"shapely cannot be imported ({error}).", 'pip install --force-reinstall "shapely>=2"'
        )
        return
    found, fvcore = version_of("shapely"), version_of("fvcore") or ""
    post = re.fullmatch(r"0\.1\.5\.post(\d+)", fvcore)
    if found and release(found) >= (2,) and post and int(post[1]) < 20221221:
        yield Finding(
            f"fvcore {fvcore} cuts polygons with calls that shapely {found} no longer has.",
            'pip install "fvcore>=0.1.5.post20221221"',
        )


def pycocotools() -> Iterator[Finding]:
    if not is_there("pycocotools"):
        yield Finding("pycocotools is not installed.", "pip install pycocotools")
        return
    try:
        numpy = importlib.import_module("numpy")
        mask = importlib.import_module("pycocotools.mask")
        mask.area(mask.encode(numpy.ones((2, 2), numpy.uint8, order="F")))
    except Exception as error:
        yield Finding(
            f"pycocotools {version_of('pycocotools')} does not work with numpy "
            f"{version_of('numpy')} ({first_line(error)}).",
            "pip install --upgrade --force-reinstall --no-cache-dir pycocotools",
        )


def opencv() -> Iterator[Finding]:
    if not is_there("cv2"):
        yield Finding("OpenCV is not installed.", "pip install opencv-python-headless")
        return
    error = import_error("cv2")
    if error is None:
        return
    library = re.search(r"lib(GL|gthread|glib|SM|Xext|Xrender)\b[\w.-]*", error)
    why = "opencv-python needs libraries of a desktop" if library else "it is broken"
    yield Finding(
        f"OpenCV cannot be imported ({error}): {why}.",
        "pip uninstall -y opencv-python opencv-contrib-python; pip install --force-reinstall "
        "opencv-python-headless",
    )


# With checks of their own, which say more
_CHECKED = {"torch", "torchvision", "shapely", "pycocotools", "opencv-python-headless"}


def requirements() -> Iterator[Finding]:
    """What lambda_det's distribution asks for; nothing where it runs without being installed."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("packaging is not installed.", "pip install packaging")
        return
    if version_of("lambda_det") is None:
        return
    lacking = []
    for line in metadata.requires("lambda_det") or ():
        wanted = Requirement(line)
        if wanted.name in _CHECKED or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found = version_of(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            lacking.append((wanted, found))
    if lacking:
        held = ", ".join(f"{wanted} ({found or 'not installed'})" for wanted, found in lacking)
        names = " ".join(f'"{wanted.name}{wanted.specifier}"' for wanted, _ in lacking)
        yield Finding(f"lambda_det needs {held}.", f"pip install {names}")
