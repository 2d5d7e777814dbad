"""Kernels in C++ for the CPU, from the wheel, or compiled by g++ when the first of them is used.

One library holds them all. A kernel is a function of C for each dtype, with the pointers of
tensors and structures first and the number of threads last.
"""

from __future__ import annotations

import contextlib
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

from lambda_det.native import compiling

_logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lambda_det"


def _build(compiler: list[str]) -> Path:
    """Compile for this processor, or take what an earlier process has compiled."""
    native = ["-march=native"]
    # The compiler's macros tell its version and every instruction set it would use here
    macros = compiling.run([*compiler, *native, "-dM", "-E", "-x", "c++", os.devnull])
    files = (*compiling.files(".cpp"), *compiling.files(".h"))
    texts = [file.read_text("utf-8") for file in files]
    key = _digest("\0".join([*compiling.FLAGS, macros, *texts]).encode())
    # The name has a digest of the content: half a library would end every process that loads it
    for library in cache_folder().glob(f"kernels_{key}_*.so"):
        if library.stem.endswith(_digest(library.read_bytes())):
            return library
    _logger.info("Compiling the CPU's kernels for this processor, once: %s", cache_folder())
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        compiled = compiling.compile_kernels(compiler, native, Path(folder))
        library = cache_folder() / f"kernels_{key}_{_digest(compiled.read_bytes())}.so"
        os.replace(compiled, library)  # other processes see all of it or nothing
    return library


def _brought() -> ctypes.CDLL | None:
    """The best of the libraries that came with the wheel, if this processor has what it needs."""
    for file in reversed(compiling.files(".so")):
        with contextlib.suppress(OSError):  # made for another system than this
            library = ctypes.CDLL(str(file))
            if library.suits_this_processor():
                return library
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernels, or the reason why there are none."""
    if sys.platform == "win32":
        return "kernels are compiled on Linux and macOS only"
    named = os.environ.get("CXX")
    if not named and (library := _brought()):
        return library
    named = named or "g++"
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


def vector_bytes() -> int:
    """Of the vectors of multiply.h, which rows are padded to."""
    return _library().vector_bytes()


def is_transformed() -> bool:
    """Whether torch.func is at work. PyTorch 2.4 cannot ask that while it compiles."""
    is_asked = not (torch.__version__.startswith("2.4.") and torch.compiler.is_compiling())
    return is_asked and torch._C._are_functorch_transforms_active()


def readable(*tensors: Tensor) -> bool:
    """Whether a kernel can be given their addresses; it would read anywhere for other tensors."""
    if is_transformed():  # such tensors have none
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
    name: str, dtype: torch.dtype, *arguments: Tensor | ctypes.Structure | ctypes.Array
) -> None:
    """Run a kernel for this dtype, on PyTorch's number of threads.

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
    function(*pointers, ctypes.c_int(torch.get_num_threads()))


def lay_out(target: Tensor, source: Tensor) -> None:
    """Copy [b, H, W, g, c] into another layout, in a fraction of the time PyTorch takes."""
    source = source.to(target.dtype)
    strides = [longs(x.stride()) for x in (source, target)]
    call("lay_out", target.dtype, longs(source.shape), source, strides[0], target, strides[1])
