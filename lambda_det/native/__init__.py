"""Kernels in C++ for the CPU, which g++ compiles when the first of them is used.

One library holds them all. A kernel is a function of C for each dtype, with the pointers of
tensors and structures first and the number of threads last.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["cache_folder", "call", "has", "longs", "missing", "new_map", "pixels", "readable"]

_logger = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
# The objects are linked without libgomp: the process must not hold a second pool of threads beside
# the one of PyTorch, which has its OpenMP library in the global scope.
_COMPILE = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-std=c++17", "-c"]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lambda_det"


def _run(command: list[str]) -> str:
    text = {"capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL, **text).stdout


def _build(compiler: list[str]) -> Path:
    """Compile for this processor, or take what an earlier process has compiled."""
    # The compiler's macros tell its version and every instruction set it would use here
    macros = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    sources = sorted(_FOLDER.glob("*.cpp"))
    texts = [file.read_text("utf-8") for file in (*sources, *sorted(_FOLDER.glob("*.h")))]
    key = _digest("\0".join([*_COMPILE, macros, *texts]).encode())
    # The name has a digest of the content: half a library would end every process that loads it
    for library in cache_folder().glob(f"kernels_{key}_*.so"):
        if library.stem.endswith(_digest(library.read_bytes())):
            return library
    _logger.info("Compiling the CPU's kernels for this processor, once: %s", cache_folder())
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        for source, compiled in zip(sources, objects, strict=True):
            _run([*compiler, *_COMPILE, str(source), "-o", compiled])
        linked = str(Path(folder, "kernels.so"))
        _run([*compiler, "-shared", *objects, "-o", linked])
        digest = _digest(Path(linked).read_bytes())
        library = cache_folder() / f"kernels_{key}_{digest}.so"
        os.replace(linked, library)  # other processes see all of it or nothing
    return library


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernels, or the reason why there are none."""
    if sys.platform == "win32":
        return "kernels are compiled on Linux and macOS only"
    named = os.environ.get("CXX") or "g++"
    try:
        compiler = shlex.split(named)  # perhaps "ccache g++"
        if shutil.which(compiler[0]) is None:
            return "there is no g++ to compile kernels (CXX names another compiler)"
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        # RuntimeError: there is no home; ValueError: CXX has an open quote
        details = getattr(error, "stderr", None) or error
        _logger.warning("No kernels for this processor: %s", details)
        return f"{named} made no kernels that can be loaded here"


@torch.compiler.assume_constant_result  # so that torch.compile does not look into the building
def missing() -> str | None:
    """Why there are no kernels; None if there are."""
    library = _library()
    return library if isinstance(library, str) else None


def has(name: str, dtype: torch.dtype) -> bool:
    """Whether there is this kernel for this dtype; bfloat16 needs its instructions."""
    return hasattr(_library(), f"{name}_{str(dtype).removeprefix('torch.')}")


def readable(*tensors: Tensor) -> bool:
    """Whether a kernel can be given their addresses; it would read anywhere for other tensors."""
    if torch._C._are_functorch_transforms_active():  # by torch.func, whose tensors have none
        return False
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)


def pixels(x: Tensor) -> Tensor:
    """[N, C, H, W] as kernels take maps: dense [N, H, W, C], no copy if it is channels last."""
    return x.permute(0, 2, 3, 1).contiguous()


def new_map(like: Tensor, *shape: int) -> Tensor:
    """An empty [N, C, H, W], channels last.

    The result of a function of autograd must be no view, or it could not be changed in place.
    """
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def longs(numbers: Iterable[int]) -> ctypes.Array:
    """An argument of whole numbers."""
    numbers = tuple(numbers)
    return (ctypes.c_long * len(numbers))(*numbers)


def call(
    name: str,
    dtype: torch.dtype,
    *arguments: Tensor | ctypes.Structure | ctypes.Array,
    threads: int | None = None,
) -> None:
    """Run a kernel for this dtype, on PyTorch's number of threads if there is no other.

    Raises:
        ValueError: a tensor is not on the CPU.
    """
    for x in arguments:
        if isinstance(x, Tensor) and x.device.type != "cpu":
            raise ValueError(f"The kernel {name} takes tensors on the CPU; one is on {x.device}.")
    function = getattr(_library(), f"{name}_{str(dtype).removeprefix('torch.')}")
    pointers = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.byref(x)
        for x in arguments
    ]
    function(*pointers, ctypes.c_int(threads or torch.get_num_threads()))
