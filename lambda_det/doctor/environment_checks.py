"""Faults of the machine and of how the process was started."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lambda_det.doctor.finding import Finding, first_line, import_error

_SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_SHARED = 2**30  # bytes; a container of Docker has 64 MiB unless told otherwise
_LEAST_FILES, _GOOD_FILES = 4096, 65536


def cuda() -> Iterator[Finding]:
    if import_error("torch"):
        return
    torch = importlib.import_module("torch")
    has_driver = _DRIVER.exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        if has_driver:
            yield Finding(
                f"This machine has an NVIDIA driver, and PyTorch {torch.__version__} is built for "
                "the CPU only.",
                "Install one with CUDA: pip install --force-reinstall torch torchvision (see "
                "https://pytorch.org/get-started/locally)",
            )
        return
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if has_driver and hidden in ("", "-1"):
            yield Finding(
                f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs.",
                "unset CUDA_VISIBLE_DEVICES, unless the CPU is meant",
                breaks=False,
            )
        elif has_driver:
            yield Finding(
                f"There is an NVIDIA driver, but PyTorch {torch.__version__} cannot use a GPU.",
                f"nvidia-smi shows whether there is one (a container needs --gpus all) and the "
                f"driver's CUDA version, which has to reach {torch.version.cuda}: update the "
                "driver, or install a PyTorch built for an older CUDA.",
            )
        return
    for index in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(8, 8, device=f"cuda:{index}")
            if (ones @ ones).sum().item() != 512:
                raise RuntimeError("8x8 ones times 8x8 ones is not 8 everywhere")
        except Exception as error:
            yield Finding(
                f"cuda:{index} is there, but does not compute ({first_line(error)}).",
                "If it has no kernel image for the device, install a PyTorch that is built for it; "
                "if it is out of memory, another process holds it (nvidia-smi); else restart the "
                "driver.",
            )


def torchrun() -> Iterator[Finding]:
    count = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("RANK") == "0" and count != "1":  # said once
        yield Finding(
            f"This process is one of {count} that torchrun (or the like) has started: RANK and "
            "WORLD_SIZE are set. Detectron2's launch() does not notice: a script that calls it is "
            f"{count} unconnected trainings that write into one folder.",
            f"Start such a script without torchrun, with --num-gpus {count}. lambda_det's own "
            "tools/train_net.py works both ways. If no torchrun is running: unset RANK WORLD_SIZE",
            breaks=False,  # only for such scripts
        )


def shared_memory() -> Iterator[Finding]:
    if not _SHARED_MEMORY.is_dir():
        return
    size = shutil.disk_usage(_SHARED_MEMORY)
    if size.free < _LEAST_SHARED:
        yield Finding(
            f"{_SHARED_MEMORY} has {size.free / 2**20:.0f} MiB left of "
            f"{size.total / 2**20:.0f}; the data workers hand over images through it, and die with "
            "a bus error when it is full.",
            "Give a container more (docker run --shm-size=8g, or --ipc=host), remove what is left "
            "there, or set DATALOADER.NUM_WORKERS 0.",
        )


def open_files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        wanted = _GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, _GOOD_FILES)
        if wanted > soft:
            mend = f"ulimit -n {wanted}"
        else:
            mend = (
                f"Have the hard limit raised to {_GOOD_FILES}: nofile in "
                f"/etc/security/limits.conf, or docker run --ulimit nofile={_GOOD_FILES}"
            )
        yield Finding(
            f"A process may hold {soft} files open. Each tensor that a data worker hands over is "
            "one: many workers with large batches end in 'Too many open files' or 'received 0 "
            "items of ancdata'.",
            mend,
            breaks=False,
        )


def compiler() -> Iterator[Finding]:
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name.split()[0]) is None:
        yield Finding(
            f"There is no {name} to compile the lambda layer's CPU kernel with; on the CPU the "
            "layer takes the slower way through PyTorch's own operators.",
            "Install a compiler (Debian and Ubuntu: apt install g++), or name one in CXX.",
            breaks=False,
        )
