"""Versions, devices and operators, as lines of (name, what is there)."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable

from lambda_det.doctor.finding import first_line, folder_of, is_there, version

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "torchvision": ("torchvision",),
    "triton": ("triton",),
    "numpy": ("numpy",),
    "detectron2": ("detectron2",),
    "fvcore": ("fvcore",),
    "iopath": ("iopath",),
    "omegaconf": ("omegaconf",),
    "pycocotools": ("pycocotools",),
    "cv2": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
    "PIL": ("pillow",),
    "timm": ("timm",),
    "shapely": ("shapely",),
    "setuptools": ("setuptools",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}


def versions() -> list[tuple[str, str]]:
    """Python and the packages that count here, with the copy of Detectron2 that is used."""
    lines = [("python", f"{platform.python_version()}, {sys.executable}")]
    lines.append(("system", platform.platform()))
    for module, distributions in _DISTRIBUTIONS.items():
        held = [f"{name} {version(name)}" for name in distributions if version(name)]
        if len(distributions) == 1:
            held = [line.split()[-1] for line in held]
        where = folder_of(module) if module == "detectron2" else None
        if held:
            text = ", ".join(held)
        else:
            text = "of unknown version" if is_there(module) else "not installed"
        lines.append((module, f"{text}, {where}" if where else text))
    where = folder_of("lambda_det")
    lines.append(("lambda_det", f"{version('lambda_det') or 'not installed, run'} from {where}"))
    return lines


def devices() -> list[tuple[str, str]]:
    """Processor, memory, and the GPUs that PyTorch sees."""
    lines = [("processor", f"{_usable_cores()} cores of {platform.machine()}")]
    try:
        import torch
    except Exception as error:
        return [*lines, ("GPU", f"not known without torch ({first_line(error)})")]
    lines[0] = ("processor", f"{lines[0][1]}, {torch.get_num_threads()} threads in PyTorch")
    lines.append(("torch built", f"for {_built_for(torch)}"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            size = f"{gpu.total_memory / 2**30:.0f} GiB"
            lines.append((f"cuda:{index}", f"{gpu.name}, {size}, compute {gpu.major}.{gpu.minor}"))
    else:
        lines.append(("cuda", "none that PyTorch sees"))
    if torch.backends.mps.is_available():
        lines.append(("mps", "there; Detectron2 is not made for it"))
    return lines


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _built_for(torch) -> str:
    if getattr(torch.version, "hip", None):
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"


def _runs_nms() -> str:
    import torch
    from torchvision.ops import nms

    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0], [20.0, 20.0, 30.0, 30.0]])
    kept = nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist()
    return "runs" if kept == [1, 2] else f"WRONG: keeps {kept} instead of [1, 2]"


def _runs_roi_align() -> str:
    import torch
    from torchvision.ops import roi_align

    ramp = torch.arange(8.0).repeat(
        1, 1, 8, 1
    )  # its value is x, so that a box's mean is its middle
    mean = roi_align(ramp, [torch.tensor([[2.0, 2.0, 6.0, 6.0]])], 2, aligned=True).mean().item()
    return "runs" if abs(mean - 3.5) < 1e-4 else f"WRONG: mean {mean} instead of 3.5"


def _detectron2_operators() -> str:
    # Detectron2's libraries need torch in the process
    importlib.import_module("torch")
    compiled = importlib.import_module("detectron2._C")
    wanted = {"deform_conv_forward": "deformable", "box_iou_rotated": "rotated"}
    import torch

    registered = getattr(torch.ops, "detectron2", None)
    held = [
        text
        for name, text in wanted.items()
        if hasattr(compiled, name) or hasattr(registered, name)
    ]
    if hasattr(compiled, "COCOevalEvaluateImages"):
        held.append("COCOeval_opt")
    return f"loads: {', '.join(held) or 'none of those known'}"


def _masks() -> str:
    import numpy
    from pycocotools import mask

    area = int(mask.area(mask.encode(numpy.asfortranarray(numpy.ones((3, 5), numpy.uint8)))))
    return "run" if area == 15 else f"WRONG: an area of {area} instead of 15"


def _compiled_kernel() -> str:
    torch = importlib.import_module("torch")
    from lambda_det.layers.local import compiled

    reason = compiled.unsupported(*[torch.zeros(1)] * 3)
    return f"no: {reason}" if reason else "built for this processor, and loads"


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    return shutil.which(name.split()[0]) or f"no {name}"


def _triton() -> str:
    importlib.import_module("triton")
    import torch

    return "there" if torch.cuda.is_available() else "there, but no GPU to use it on"


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "none in this PyTorch"
    held = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available()}
    return ", ".join(name for name, there in held.items() if there) or "none"


_OPERATORS: dict[str, Callable[[], str]] = {
    "torchvision nms": _runs_nms,
    "torchvision roi_align": _runs_roi_align,
    "detectron2._C": _detectron2_operators,
    "pycocotools masks": _masks,
    "C++ compiler": _compiler,
    "lambda kernel, CPU": _compiled_kernel,
    "Triton": _triton,
    "torch.distributed": _backends,
}


def operators() -> list[tuple[str, str]]:
    """Each operator is really run, or its library loaded."""
    lines = []
    for name, probe in _OPERATORS.items():
        try:
            text = probe()
        except Exception as error:  # whatever a broken library raises is what is to be told
            text = f"no: {first_line(error)}"
        lines.append((name, text))
    return lines
