"""Known faults of versions, of the machine and of how a process was started."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from lambda_det.doctor.parts import (
    INSTALL_DETECTRON2,
    UPSTREAM,
    Finding,
    error_of_import,
    first_line,
    folder_of,
    is_there,
    version,
)

_SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_SHARED = 2**30  # bytes; a container of Docker has 64 MiB unless told otherwise
_LEAST_FILES, _GOOD_FILES = 4096, 65536


@dataclass(frozen=True)
class Condition:
    """A row of the table.

    Attributes:
        look: returns None where all is well; otherwise what was found, which is put in place of
            {0}, {1}, ... in the texts.
        problem, mend, breaks: as in ``Finding``.
    """

    look: Callable[[], tuple[object, ...] | None]
    problem: str
    mend: str
    breaks: bool = True

    def examine(self) -> Finding | None:
        """The fault, if there is one; a look that fails is a fault, too."""
        try:
            found = self.look()
        except Exception as error:  # it examines broken installations
            name = self.look.__name__.strip("_").replace("_", " ")
            problem = f"The check for {name} failed ({first_line(error)})."
            return Finding(problem, "Mend what else is found here, and look again.")
        if found is None:
            return None
        return Finding(self.problem.format(*found), self.mend.format(*found), self.breaks)


def _old_python() -> tuple | None:
    found = sys.version_info[:2]
    return (".".join(map(str, found)),) if tuple(found) < (3, 10) else None


# Where these are missing, the table of packages says more
_TOLD_IF_MISSING = {"torch", "torchvision", "shapely", "pycocotools", "opencv-python-headless"}


def _unmet_requirements() -> tuple | None:
    """What the distribution lambda_det asks for; None where it runs without being installed."""
    if version("lambda_det") is None:
        return None
    requirement = importlib.import_module("packaging.requirements").Requirement
    unmet = []
    for wanted in map(requirement, metadata.requires("lambda_det") or ()):
        is_extra = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        found = version(wanted.name)
        is_met = wanted.specifier.contains(found, prereleases=True) if found else False
        if not (is_met or is_extra or (found is None and wanted.name in _TOLD_IF_MISSING)):
            unmet.append((wanted, found))
    if not unmet:
        return None
    described = ", ".join(f"{wanted} ({found or 'not installed'})" for wanted, found in unmet)
    return described, " ".join(f'"{wanted.name}{wanted.specifier}"' for wanted, _ in unmet)


def _folder_without_code() -> tuple | None:
    if not is_there("detectron2") or folder_of("detectron2"):
        return None
    return tuple(find_spec("detectron2").submodule_search_locations or ("?",))[:1]


def _compiled_operators() -> list[Path] | None:
    folder = folder_of("detectron2")
    return None if folder is None else [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]


def _no_compiled_operators() -> tuple | None:
    return () if _compiled_operators() == [] else None


def _broken_compiled_operators() -> tuple | None:
    # Detectron2's libraries need torch in the process
    if not _compiled_operators() or error_of_import("torch"):
        return None
    error = error_of_import("detectron2._C")
    return (error, version("torch")) if error else None


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder), path.read_text("utf-8", errors="replace")


def _missing_pkg_resources() -> tuple | None:
    folder = folder_of("detectron2")
    if folder is None or is_there("pkg_resources"):
        return None
    if not any("import pkg_resources" in text for _, text in _sources(folder / "model_zoo")):
        return None
    found = version("setuptools")
    return (f"setuptools {found}" if found else "no setuptools",)


_REMOVED_NAMES = {  # by module: how Detectron2 writes them
    "numpy": r"\bnp\.(bool|int|float|object|str|complex|long|unicode)\b",
    "PIL.Image": r"\bImage\.(LINEAR|CUBIC|ANTIALIAS)\b",
}


def _removed_names() -> tuple | None:
    """Names that Detectron2 uses and that numpy or Pillow no longer have."""
    folder, found = folder_of("detectron2"), []
    for module, pattern in _REMOVED_NAMES.items() if folder else ():
        if error_of_import(module):
            continue
        uses = (
            f"{use[0]} in {path}"
            for path, text in _sources(folder)
            for use in re.finditer(pattern, text)
            if not hasattr(importlib.import_module(module), use[1])
        )
        found += list(uses)[:1]
    return (folder, " and no ".join(found)) if found else None


def _sampled_set() -> tuple | None:
    """``MapDataset`` draws a substitute from a set, which Python 3.11 no longer allows."""
    folder = folder_of("detectron2")
    file = folder / "data" / "common.py" if folder else None
    if file is None or sys.version_info < (3, 11) or not file.is_file():
        return None
    return () if "_rng.sample(self._fallback_candidates" in file.read_text("utf-8") else None


def _sees_no_gpu() -> bool:
    """Whether there is a driver for a GPU that PyTorch does not see."""
    if error_of_import("torch") or importlib.import_module("torch").cuda.is_available():
        return False
    return _DRIVER.exists() or shutil.which("nvidia-smi") is not None


def _hidden_gpus() -> tuple | None:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (repr(hidden),) if hidden in ("", "-1") and _sees_no_gpu() else None


def _unusable_gpus() -> tuple | None:
    if not _sees_no_gpu() or _hidden_gpus():
        return None
    torch = importlib.import_module("torch")
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    return torch.__version__, getattr(torch.version, "hip", None) or built_for


def _gpus_that_do_not_compute() -> tuple | None:
    if error_of_import("torch"):
        return None
    torch, errors = importlib.import_module("torch"), []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            ones = torch.ones(8, 8, device=f"cuda:{index}")
            if (ones @ ones).sum().item() != 512:
                raise RuntimeError("8x8 ones times 8x8 ones is not 8 everywhere")
        except Exception as error:
            errors.append(f"cuda:{index} ({first_line(error)})")
    return (", ".join(errors),) if errors else None


def _torchrun() -> tuple | None:
    count = os.environ.get("WORLD_SIZE", "1")
    return (count,) if os.environ.get("RANK") == "0" and count != "1" else None  # said once


def _little_shared_memory() -> tuple | None:
    size = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    if size is None or size.free >= _LEAST_SHARED:
        return None
    return _SHARED_MEMORY, f"{size.free / 2**20:.0f}", f"{size.total / 2**20:.0f}"


def _few_open_files() -> tuple | None:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return None
    wanted = _GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, _GOOD_FILES)
    if wanted > soft:
        return soft, f"ulimit -n {wanted}"
    return soft, (
        f"Have the hard limit raised to {_GOOD_FILES}: nofile in /etc/security/limits.conf, or "
        f"docker run --ulimit nofile={_GOOD_FILES}"
    )


CONDITIONS = (
    Condition(
        _old_python,
        "This is Python {0}, and lambda_det needs 3.10 or newer.",
        "Make an environment with a newer one: python3.12 -m venv .venv (or 3.10 to 3.13).",
    ),
    Condition(_unmet_requirements, "lambda_det needs {0}.", "pip install {1}"),
    Condition(
        _folder_without_code,
        "`import detectron2` finds a folder of that name without code ({0}), and not the package.",
        "Start from another folder, or rename that one.",
    ),
    Condition(
        _no_compiled_operators,
        "This Detectron2 has no compiled operators: deformable convolutions and rotated boxes are "
        "missing, and COCO evaluation takes the slower way. The lambda networks, Mask R-CNN, "
        "RetinaNet and Panoptic FPN need none of them.",
        "To have them, build upstream's Detectron2 with a C++ compiler (and nvcc for the GPU): pip "
        f"install --no-build-isolation {UPSTREAM}",
        breaks=False,
    ),
    Condition(
        _broken_compiled_operators,
        "Detectron2's compiled operators do not load ({0}); they were probably built for another "
        "PyTorch than {1}.",
        f"Build it anew: pip install --force-reinstall --no-deps --no-build-isolation {UPSTREAM}",
    ),
    Condition(
        _missing_pkg_resources,
        "There is no pkg_resources ({0} is installed), and detectron2.model_zoo cannot be imported "
        "without: scripts and configs that take a base config or weights from it stop. lambda_det "
        "does not use it.",
        'pip install "setuptools<81"',
    ),
    Condition(
        _removed_names,
        "The Detectron2 in {0} is too old for numpy and Pillow, which have no {1}.",
        f"Install a newer Detectron2 (0.6 as of 2023 or later). {INSTALL_DETECTRON2}",
    ),
    Condition(
        _sampled_set,
        "In this Detectron2 a data mapper that skips an image (returns None) ends the training "
        "with a TypeError, from Python 3.11 on. lambda_det's own loader is not concerned.",
        "If your mapper skips images, install a newer Detectron2 or take Python 3.10.",
        breaks=False,
    ),
    Condition(
        _hidden_gpus,
        "CUDA_VISIBLE_DEVICES={0} hides the GPUs.",
        "unset CUDA_VISIBLE_DEVICES, unless the CPU is meant",
        breaks=False,
    ),
    Condition(
        _unusable_gpus,
        "There is an NVIDIA driver, but torch {0}, built for {1}, cannot use a GPU.",
        "Where it is built for the CPU only: pip install --force-reinstall torch torchvision (see "
        "https://pytorch.org/get-started/locally). Else nvidia-smi shows whether there is a GPU (a "
        "container needs --gpus all) and the driver's CUDA version, which has to reach that of "
        "torch: update the driver, or install a torch built for an older CUDA.",
    ),
    Condition(
        _gpus_that_do_not_compute,
        "A GPU is there, but does not compute: {0}.",
        "If it has no kernel image for the device, install a PyTorch that is built for it; if it "
        "is out of memory, another process holds it (nvidia-smi); else restart the driver.",
    ),
    Condition(
        _torchrun,
        "This process is one of {0} that torchrun (or the like) has started: RANK and WORLD_SIZE "
        "are set. Detectron2's launch() does not notice: a script that calls it is {0} unconnected "
        "trainings that write into one folder.",
        "Start such a script without torchrun, with --num-gpus {0}. lambda_det's own "
        "tools/train_net.py works both ways. If no torchrun is running: unset RANK WORLD_SIZE",
        breaks=False,  # only for such scripts
    ),
    Condition(
        _little_shared_memory,
        "{0} has {1} MiB left of {2}; the data workers hand over images through it, and die with a "
        "bus error when it is full.",
        "Give a container more (docker run --shm-size=8g, or --ipc=host), remove what is left "
        "there, or set DATALOADER.NUM_WORKERS 0.",
    ),
    Condition(
        _few_open_files,
        "A process may hold {0} files open. Each tensor that a data worker hands over is one: many "
        "workers with large batches end in 'Too many open files' or 'received 0 items of ancdata'.",
        "{1}",
        breaks=False,
    ),
)
