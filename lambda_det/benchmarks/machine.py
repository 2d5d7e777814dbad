"""What a figure must have beside it: the processor, the GPU and the versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lambda_det


def describe_machine(device: torch.device, libraries: tuple[str, ...] = ()) -> dict[str, Any]:
    """The machine and the versions, for JSON.

    Args:
        device: what is measured; a GPU is described as well.
        libraries: distributions whose versions matter beside torch's.
    """
    machine: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lambda_det": lambda_det.__version__,
        "versions": {name: installed(name) for name in libraries},
    }
    if device.type == "cuda":
        machine["gpu"] = {
            "name": torch.cuda.get_device_name(device),
            "memory": torch.cuda.get_device_properties(device).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32_convolutions": torch.backends.cudnn.allow_tf32,
            "tf32_products": torch.backends.cuda.matmul.allow_tf32,
        }
    return machine


def machine_line(machine: dict[str, Any]) -> str:
    """The same in a line; the load is that of the last minute, ours not yet in it."""
    parts = [
        f"{machine['cpu']} ({machine['instructions']})",
        f"{machine['cores']} cores",
        f"{machine['threads']} threads",
        f"torch {machine['torch']}",
        f"Python {machine['python']}",
        *(f"{name} {number}" for name, number in machine["versions"].items() if number),
    ]
    if "gpu" in machine:
        gpu = machine["gpu"]
        parts.insert(0, f"{gpu['name']}, CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}")
    if machine["load"] is not None:
        parts.append(f"load {machine['load']:.1f} before")
    return ", ".join(parts)


def cpu_name() -> str:
    """The processor's model as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed(name: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
