"""The table of what can be missing or broken, how it is found, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

UPSTREAM = "git+https://github.com/facebookresearch/detectron2.git"
INSTALL_DETECTRON2 = (
    "python tools/install_detectron2.py in the lambda_det repository installs it; or, with torch "
    f"installed first: pip install --no-build-isolation {UPSTREAM}"
)
_SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_SHARED = 2**30  # bytes; a container of Docker has 64 MiB unless told otherwise
_LEAST_FILES, _GOOD_FILES = 4096, 65536


@dataclass(frozen=True)
class Finding:
    """A fault of this installation.

    Attributes:
        problem: what is wrong, and what fails because of it.
        mend: what to do about it.
        breaks: whether something cannot run; False where it is only slower or lacks a part.
    """

    problem: str
    mend: str
    breaks: bool = True


class Fault(Exception):
    """What a probe found: the problem, and what to do unless it is the advice of the row."""


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        name: of the distribution, or of what is looked at.
        probe: returns what works; raises a ``Fault``, or what the broken library raises.
        advice: what to do about it.
        effect: what fails without it.
        needs: names of rows before this one without which it cannot be tried.
        breaks: as in ``Finding``.
    """

    name: str
    probe: Callable[[], str]
    advice: str
    effect: str = ""
    needs: tuple[str, ...] = ()
    breaks: bool = True

    def run(self) -> tuple[str, Finding | None]:
        """What to print of it, and the fault if there is one."""
        try:
            return self.probe(), None
        except Fault as fault:
            problem, mend = (*fault.args, self.advice)[:2]
            text = problem
        except Exception as error:  # broken libraries raise RuntimeError, AttributeError, ...
            text, mend = f"no: {first_line(error)}", self.advice
            found = f"{self.name} {version(self.name) or ''}".strip()
            problem = f"{found} does not work ({first_line(error)})."
        return text, Finding(f"{problem} {self.effect}".strip(), mend, self.breaks)


def examine() -> tuple[dict[str, str], list[Finding]]:
    """What each row says, and all faults."""
    lines: dict[str, str] = {}
    findings, failed = [], set()
    for check in CHECKS:
        if missing := failed.intersection(check.needs):
            lines[check.name] = f"not tried without {min(missing)}"
            failed.add(check.name)
            continue
        lines[check.name], finding = check.run()
        if finding is not None:
            findings.append(finding)
            failed.add(check.name)
    return lines, findings


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def folder_of(package: str) -> Path | None:
    """The folder of a package's code, found without importing it; None where there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # in sys.modules without a spec, or as None, which forbids its import
        return None
    if spec is None:
        return None
    if not spec.origin:
        raise Fault(
            f"`import {package}` finds a folder of that name without code "
            f"({next(iter(spec.submodule_search_locations or '?'))}), and not the package.",
            "Start from another folder, or rename that one.",
        )
    return Path(spec.origin).parent


# Packages -----------------------------------------------------------------------------------------


def _package(name: str, *modules: str, works: Callable[[], None] = lambda: None) -> str:
    """Import modules of a distribution, and try one."""
    if folder_of(modules[0].partition(".")[0]) is None:
        raise Fault(f"{name} is not installed.")
    for module in modules:
        importlib.import_module(module)
    works()
    return "works"


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what} {found} instead of {expected}")


def _try_torchvision() -> None:
    torch = importlib.import_module("torch")
    ops = importlib.import_module("torchvision").ops
    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0], [20.0, 20.0, 30.0, 30.0]])
    kept = ops.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist()
    _expect("nms keeps", kept, [1, 2])
    ramp = torch.arange(8.0).repeat(1, 1, 8, 1)  # the value is x, and the mean of a box its middle
    box = torch.tensor([[2.0, 2.0, 6.0, 6.0]])
    mean = ops.roi_align(ramp, [box], 2, aligned=True).mean().item()
    _expect("roi_align has a mean of", round(mean, 4), 3.5)


def _try_pycocotools() -> None:
    numpy = importlib.import_module("numpy")
    mask = importlib.import_module("pycocotools.mask")
    area = int(mask.area(mask.encode(numpy.ones((3, 5), numpy.uint8, order="F"))))
    _expect("a mask has an area of", area, 15)


def _kernels() -> str:
    torch = importlib.import_module("torch")
    compiled = importlib.import_module("lambda_det.layers.local.compiled")
    if reason := compiled.unsupported(*[torch.zeros(1)] * 3):
        raise RuntimeError(reason)
    return "built for this processor"


# Detectron2 ---------------------------------------------------------------------------------------


def _operators() -> str:
    folder = folder_of("detectron2")
    if not [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]:
        return (
            "not built: no deformable convolutions, no rotated boxes, slower COCO evaluation; the "
            "lambda networks, Mask R-CNN, RetinaNet and Panoptic FPN need none of it"
        )
    importlib.import_module("torch")  # whose libraries they need in the process
    importlib.import_module("detectron2._C")
    return "works"


# The machine --------------------------------------------------------------------------------------


def _gpus() -> str:
    torch = importlib.import_module("torch")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        if not (_DRIVER.exists() or shutil.which("nvidia-smi")):
            return "none"
        if hidden in ("", "-1"):
            return f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        raise Fault(
            f"There is an NVIDIA driver, but torch {torch.__version__}, built for {built_for}, "
            "cannot use a GPU.",
            "Where it is built for the CPU only: pip install --force-reinstall torch torchvision "
            "(see https://pytorch.org/get-started/locally). Else nvidia-smi shows whether there is "
            "a GPU (a container needs --gpus all) and the driver's CUDA version, which has to "
            "reach that of torch: update the driver, or install a torch built for an older CUDA.",
        )
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(8, 8, device=f"cuda:{index}")
        _expect(f"on cuda:{index} the sum of 8x8 products is", (ones @ ones).sum().item(), 512)
    return "compute"


def _shared_memory() -> str:
    if _SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(_SHARED_MEMORY)
        if size.free < _LEAST_SHARED:
            raise Fault(
                f"{_SHARED_MEMORY} has {size.free / 2**20:.0f} MiB left of "
                f"{size.total / 2**20:.0f}; the data workers hand over images through it, and die "
                "with a bus error when it is full."
            )
    return "enough"


def _open_files() -> str:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return "no limit"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return "enough"
    wanted = _GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, _GOOD_FILES)
    problem = (
        f"A process may hold {soft} files open. Each tensor that a data worker hands over is one: "
        "many workers with large batches end in 'Too many open files'."
    )
    raise Fault(problem, f"ulimit -n {wanted}") if wanted > soft else Fault(problem)


CHECKS = (
    Check(
        "torch",
        partial(_package, "torch", "torch"),
        "pip install --upgrade --force-reinstall torch torchvision",
    ),
    Check(
        "numpy",
        partial(_package, "numpy", "numpy", works=lambda: sys.modules["torch"].zeros(1).numpy()),
        'Take a PyTorch built for numpy 2 (2.4 or newer), or pip install "numpy<2".',
        "No image reaches the model.",
        needs=("torch",),
    ),
    Check(
        "torchvision",
        partial(_package, "torchvision", "torchvision", works=_try_torchvision),
        "Install the two that belong together, in one command and from one index: pip install "
        "--force-reinstall torch torchvision (for the CPU only, with --index-url "
        "https://download.pytorch.org/whl/cpu).",
        "Detection needs its operators, which have to fit the version of torch.",
        needs=("torch",),
    ),
    Check(
        "shapely",
        partial(_package, "shapely", "shapely"),
        'pip install --force-reinstall "shapely>=2"',
        "The fixed-size crop of large-scale jitter, and any crop of polygons, imports it in the "
        "middle of the training.",
    ),
    Check(
        "pycocotools",
        partial(_package, "pycocotools", "pycocotools", works=_try_pycocotools),
        "pip install --upgrade --force-reinstall --no-cache-dir pycocotools",
        "It has to be built for the version of numpy.",
        needs=("numpy",),
    ),
    Check(
        "OpenCV",
        partial(_package, "OpenCV", "cv2"),
        "pip uninstall -y opencv-python opencv-contrib-python; pip install --force-reinstall "
        "opencv-python-headless",
        "opencv-python needs libraries of a desktop (libGL, libgthread).",
    ),
    Check(
        "detectron2",
        partial(_package, "detectron2", "detectron2.modeling"),
        f"If another module is missing, install that; else: {INSTALL_DETECTRON2}",
        needs=("torch", "torchvision"),
    ),
    Check(
        "lambda_det",
        partial(
            _package,
            "lambda_det",
            *("lambda_det.modeling", "lambda_det.detection.task", "lambda_det.classification.task"),
        ),
        "pip install of the lambda_det repository brings what it needs. If numpy or Pillow lacks a "
        f"name, Detectron2 is older than 2023: {INSTALL_DETECTRON2}",
        needs=("torch", "torchvision", "detectron2"),
    ),
    Check(
        "kernels of the CPU",
        _kernels,
        "Install a compiler (Debian and Ubuntu: apt install g++), or name one in CXX.",
        "On the CPU the layer takes the slower way through PyTorch's own operators.",
        needs=("torch",),
        breaks=False,
    ),
    Check(
        "detectron2._C",
        _operators,
        f"Build it anew: pip install --force-reinstall --no-deps --no-build-isolation {UPSTREAM}",
        "It was probably built for another PyTorch.",
        needs=("detectron2",),
    ),
    Check(
        "GPUs",
        _gpus,
        "If there is no kernel image for the device, install a PyTorch that is built for it; if it "
        "is out of memory, another process holds it (nvidia-smi); else restart the driver.",
        needs=("torch",),
    ),
    Check(
        "shared memory",
        _shared_memory,
        "Give a container more (docker run --shm-size=8g, or --ipc=host), remove what is left "
        "there, or set DATALOADER.NUM_WORKERS 0.",
    ),
    Check(
        "open files",
        _open_files,
        f"Have the hard limit raised to {_GOOD_FILES}: nofile in /etc/security/limits.conf, or "
        f"docker run --ulimit nofile={_GOOD_FILES}",
        breaks=False,
    ),
)
