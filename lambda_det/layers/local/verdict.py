"""Whether ``auto`` may take the fused kernels on a GPU: only where they were proved on that GPU.

``lambda-det doctor --gpu`` holds them against plain PyTorch and writes a verdict, a JSON file in
the user's cache folder. It counts for the GPU, the driver, the PyTorch, the Triton and the sources
of the kernels that it was made with, and for nothing else. Where there is none, ``auto`` takes
``query_first``. A run never measures by itself: what it takes is known before it starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambda_det.errors import reason
from lambda_det.files import replace_text
from lambda_det.layers.local.fused import allows_tf32
from lambda_det.native import cache_folder

SWITCH = "LAMBDA_DET_GPU_VERDICT"  # an environment variable; 0: no verdict is read
FALLBACK = "query_first"
DEVICES = {"cuda"}  # types of devices that verdicts are for

_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCES = ("tensors.py", "local/fused.py", "local/fused_kernels.py", "local/query_first.py")
_logger = logging.getLogger(__name__)
_allowed: dict[str, frozenset[str]] = {}  # by device: the kinds that are taken in this process


def kind_of(queries: Tensor) -> str:
    """Dtype and layout of a call, for which a proof is.

    Args:
        queries: [b, H, W, h, k].
    """
    dtype = str(queries.dtype).removeprefix("torch.")
    if dtype == "float32" and allows_tf32():
        dtype = "tf32"  # which is never proved: plain PyTorch is more exact
    return f"{dtype} {'channels_last' if queries.stride(-1) == 1 else 'contiguous'}"


def key_of(device: torch.device) -> dict[str, str]:
    """All that a proof on a device depends on, as text."""
    name, capability = device.type, ""
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    driver = str(getattr(torch._C, "_cuda_getDriverVersion", int)())  # of CUDA, in every system
    with contextlib.suppress(OSError):  # not there, or not to be read
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER.read_text(errors="replace"))
        driver = f"{found[1]}, {driver}" if found else driver
    sources = [(Path(__file__).parents[1] / name).read_bytes() for name in _SOURCES]
    return {
        "device": name,
        "compute capability": capability,
        "driver": driver,
        "PyTorch": str(torch.__version__),
        "Triton": triton,
        "kernels": _digest(b"\0".join(sources)),
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _path(key: Mapping[str, str]) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "_", key["device"])
    digest = _digest(json.dumps(key, sort_keys=True).encode())
    return cache_folder() / f"verdict_{name}_{digest}.json"


def write(key: Mapping[str, str], kinds: Iterable[str]) -> Path:
    """Write for which kinds the kernels were right and faster, in place of what was written before.

    Raises:
        OSError, RuntimeError: there is no such folder, or it cannot be written to.
    """
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"key": dict(key), "fused": sorted(kinds)}, indent=1) + "\n")
    return path


def read(device: torch.device) -> tuple[frozenset[str], str]:
    """The kinds that were proved on a device, and where that is from or why there are none."""
    if os.environ.get(SWITCH) == "0":
        return frozenset(), f"{SWITCH}=0 switches the verdict off"
    key = key_of(device)
    try:
        path = _path(key)
        content = json.loads(path.read_text("utf-8"))
        if content["key"] != key:
            raise ValueError("it is for another GPU or other versions")
        return frozenset(map(str, content["fused"])), f"verdict {path}"
    except FileNotFoundError:
        about = f"there is no verdict for this {key['device']} and these versions"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        about = f"the cache folder cannot be read ({reason(error)})"
    except (ValueError, KeyError, TypeError) as error:
        about = f"{path} was not written by the doctor ({reason(error)})"
    return frozenset(), f"{about}; lambda-det doctor --gpu makes one"


def allow(device: torch.device | str, kinds: Iterable[str], about: str) -> None:
    """Let ``auto`` take the kernels for these kinds on a device, from now on, in this process."""
    _allowed[str(device)] = kinds = frozenset(kinds)
    taken = f"fused for {', '.join(sorted(kinds))}, else {FALLBACK}" if kinds else FALLBACK
    _logger.info(f"Local position output on {device}: {taken}; {about}")


def allowed(device: torch.device | str) -> frozenset[str]:
    """The kinds for which ``auto`` takes the kernels on a device; its verdict is read once."""
    if str(device) not in _allowed:
        allow(device, *read(torch.device(device)))
    return _allowed[str(device)]


@torch.compiler.assume_constant_result  # torch.compile has no look at files and the log
def allows(device: str, kind: str) -> bool:
    """Whether ``auto`` takes the kernels for a kind on a device."""
    return kind in allowed(device)


def continue_with(device: str, recorded: Mapping[str, Any]) -> None:
    """Keep what a run took before it was resumed, where that is still proved.

    Args:
        device: of the run.
        recorded: "fused", the kinds that were allowed before; empty in files of earlier versions.
    """
    before, now = set(recorded.get("fused", allowed(device))), allowed(device)
    if lost := before - now:
        _logger.warning(
            f"The run took the fused kernels for {', '.join(sorted(lost))}, which is proved no "
            f"longer here: it goes on with {FALLBACK}, whose results differ in their last digits"
        )
    if now - before:
        allow(device, now & before, "for more, but this run began without")
