"""``lambda-det doctor``, also ``python -m lambda_det.doctor``: what is installed, and what works.

This file imports neither PyTorch nor Detectron2 at its top, nor a part of lambda_det that does: it
has to work where those are missing or broken.
"""

from __future__ import annotations

import importlib
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import NamedTuple

from lambda_det.errors import UserError, command_parser, first_line
from lambda_det.install_detectron2 import add_source, install

DESCRIPTION = """\
Print what is installed here, what of it works, and how to fix what does not. It also works where
PyTorch or Detectron2 are missing.
"""
EXAMPLES = """examples:
  %(prog)s
  %(prog)s --install       # first installs Detectron2, which is not on PyPI, where it is missing

status: 0 if nothing was found that breaks; 1 otherwise
"""
UPSTREAM = "git+https://github.com/facebookresearch/detectron2.git"
INSTALL_DETECTRON2 = (
    "lambda-det doctor --install installs it; or, with torch installed first: "
    f"pip install --no-build-isolation {UPSTREAM}"
)
_DISTRIBUTIONS = (
    "lambda_det",
    "detectron2",
    "torch",
    "torchvision",
    "cuda-bindings",
    "numpy",
    "pycocotools",
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python",
    "shapely",
    "timm",
    "setuptools",
    "onnx",
    "onnxruntime",
)


class Check(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the distribution, or of what is looked at.
        probe: returns what works; raises a ``UserError`` whose text says all, or what the broken
            library raises.
        advice: what to do about a fault.
        effect: what fails without it.
        needs: names of earlier rows that must work before this one can be tried.
        breaks: whether something cannot run; False where it is only slower or lacks a part.
    """

    name: str
    probe: Callable[[], str]
    advice: str = ""
    effect: str = ""
    needs: tuple[str, ...] = ()
    breaks: bool = True


def examine(checks: Sequence[Check]) -> tuple[dict[str, str], dict[str, str]]:
    """The result of each row by its name, and the problems of rows with a fault."""
    lines: dict[str, str] = {}
    problems: dict[str, str] = {}
    works: set[str] = set()
    for check in checks:
        if missing := [name for name in check.needs if name not in works]:
            lines[check.name] = f"not tried without {missing[0]}"
            continue
        try:
            lines[check.name] = check.probe()
            works.add(check.name)
        except UserError as fault:
            lines[check.name] = problems[check.name] = str(fault)
        except Exception as error:  # broken libraries raise RuntimeError, AttributeError, ...
            lines[check.name] = f"no: {first_line(error)}"
            problems[check.name] = f"{check.name} does not work ({first_line(error)})."
    return lines, problems


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


# Operators ----------------------------------------------------------------------------------------


def _package(*modules: str, works: Callable[[], None] = lambda: None) -> str:
    """Import modules of a distribution, and try one."""
    for name in modules:
        module = importlib.import_module(name)
        if module.__spec__.origin is None:
            raise UserError(
                f"`import {name}` finds a folder of that name without code "
                f"({next(iter(module.__path__))}), and not the package: start from another folder, "
                "or rename that one."
            )
    works()
    return "works"


def _expect(what: str, result: object, expected: object) -> None:
    if result != expected:
        raise RuntimeError(f"{what} {result} instead of {expected}")


def _try_torchvision() -> None:
    import torch
    from torchvision import ops

    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0], [20.0, 20.0, 30.0, 30.0]])
    kept = ops.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist()
    _expect("nms keeps", kept, [1, 2])


def _kernels() -> str:
    from lambda_det.native import missing

    if reason := missing():
        raise RuntimeError(reason)
    return "built for this processor"


def _gpu_kernels() -> str:
    """Compile, prove and load the kernels of a small layer on each GPU."""
    import torch

    from lambda_det.layers.local import fused

    if not torch.cuda.is_available():
        return "no GPU"
    for index in range(torch.cuda.device_count()):
        if why := fused.try_out(index):
            raise UserError(f"On cuda:{index} plain PyTorch computes lambda layers: {why}.")
    return "compute lambda layers"


def _operators() -> str:
    import torch  # noqa: F401  (its libraries must be in the process)

    try:
        importlib.import_module("detectron2._C")
    except ModuleNotFoundError:
        return (
            "not built: no deformable convolutions, no rotated boxes, slower COCO evaluation; the "
            "lambda networks, Mask R-CNN, RetinaNet and Panoptic FPN need none of it"
        )
    return "works"


def _torch_files() -> str:
    from lambda_det.weights.formats import is_torch_load_unsafe

    if is_torch_load_unsafe():
        raise UserError("This PyTorch cannot read a .pth from strangers safely (CVE-2026-24747).")
    return "are read without running what is in them"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that PyTorch can use"
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(8, 8, device=f"cuda:{index}")
        _expect(f"on cuda:{index} the sum of 8x8 products is", (ones @ ones).sum().item(), 512)
    return "compute"


# The machine --------------------------------------------------------------------------------------


def _processor() -> str:
    """Whether the processor computes in bfloat16, and what that means for a training on it."""
    from lambda_det.training.precision import has_bfloat16

    if has_bfloat16("cpu"):
        return "bfloat16: a small detector of 200 photographs takes some 4 minutes on two cores"
    return "no bfloat16: a training takes some four times as long as where the processor has it"


CHECKS = (
    Check(
        "torch",
        partial(_package, "torch"),
        "pip install --upgrade --force-reinstall torch torchvision",
    ),
    Check(
        "numpy",
        partial(_package, "numpy", works=lambda: sys.modules["torch"].zeros(1).numpy()),
        'Take a PyTorch built for numpy 2 (2.4 or newer), or pip install "numpy<2".',
        "No image reaches the model.",
        needs=("torch",),
    ),
    Check(
        "torchvision",
        partial(_package, "torchvision", works=_try_torchvision),
        "Install the two that belong together, in one command and from one index: pip install "
        "--force-reinstall torch torchvision (for the CPU only, with --index-url "
        "https://download.pytorch.org/whl/cpu).",
        "Detection needs its operators, which have to fit the version of torch.",
        needs=("torch",),
    ),
    Check(
        "pycocotools",
        partial(_package, "pycocotools", "pycocotools.mask"),
        "pip install --upgrade --force-reinstall --no-cache-dir pycocotools",
        "It has to be built for the version of numpy.",
        needs=("numpy",),
    ),
    Check(
        "OpenCV",
        partial(_package, "cv2"),
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
        partial(_package, "lambda_det.modeling", "lambda_det.detection.task"),
        "An installation from the lambda_det repository brings what it needs. If numpy or Pillow "
        f"lacks a name, Detectron2 is older than 2023: {INSTALL_DETECTRON2}",
        needs=("torch", "torchvision", "detectron2"),
    ),
    Check(
        ".pth files",
        _torch_files,
        'pip install --upgrade "torch>=2.10" torchvision, or take .safetensors files.',
        "From an address they are refused.",
        needs=("torch",),
        breaks=False,
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
        "kernels of the GPU",
        _gpu_kernels,
        "Update the GPU's driver, and install PyTorch for CUDA anew, which brings NVRTC; of older "
        "versions install cuda-bindings as well (docs/gpu.md); kernels need compute capability 8.0 "
        "and a home that can be written.",
        "Lambda layers take several times as long there.",
        needs=("torch", "lambda_det", "GPUs"),
        breaks=False,
    ),
    Check("processor", _processor, needs=("torch",)),
)


# The command --------------------------------------------------------------------------------------


def _print_section(title: str, lines: dict[str, str]) -> None:
    print(title)
    for label, text in lines.items():
        print(f"  {label:<30}{text}")
    print(flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("doctor", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--install", action="store_true", help="install Detectron2, if it is missing"
    )
    add_source(parser)
    args = parser.parse_args(argv)
    if (args.install or args.source) and not install(args.source):
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings say it more clearly
        lines, problems = examine(CHECKS)
        python = {
            "python": f"{platform.python_version()}, {sys.executable}",
            "system": platform.platform(),
        }
        _print_section("Versions", python | {name: _version(name) for name in _DISTRIBUTIONS})
        _print_section("Tried", lines)
    print("Found:" if problems else "Found: none")
    faulty = [check for check in CHECKS if check.name in problems]
    for check in sorted(faulty, key=lambda check: not check.breaks):
        mark = "BREAKS" if check.breaks else "note"
        print(f"\n  {mark}: {problems[check.name]} {check.effect}\n    fix: {check.advice}")
    return int(any(check.breaks for check in faulty))


if __name__ == "__main__":
    sys.exit(main())
