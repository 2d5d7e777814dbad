"""Kernels in C++ for the CPU, from the wheel, or compiled by g++ when the first of them is used.

One library holds all of them. A kernel is a C function for each dtype, with the pointers of tensors
and structures first and the number of threads last.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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

from lambda_det.native import cache, compiling

_logger = logging.getLogger(__name__)


def _build(compiler: list[str]) -> Path:
    """A library for this processor: compiled, or that of an earlier process of this user."""
    native = ["-march=native"]
    # the compiler's macros show its version and every instruction set that it would use here
    macros = compiling.run([*compiler, *native, "-dM", "-E", "-x", "c++", os.devnull])
    files = (*compiling.files(".cpp"), *compiling.files(".h"))
    texts = [file.read_text("utf-8") for file in files]
    key = cache.digest("\0".join([*compiling.FLAGS, macros, *texts]).encode())
    folder, name = cache.private_folder(), f"kernels_{key}"
    if library := cache.find(folder, name, ".so"):
        return library
    _logger.info("Compiling the CPU's kernels for this processor, once: %s", folder)
    with tempfile.TemporaryDirectory(dir=folder) as objects:
        compiled = compiling.compile_kernels(compiler, native, Path(objects))
        return cache.keep(folder, name, ".so", compiled.read_bytes())


def _brought() -> ctypes.CDLL | None:
    """The best library of the wheel whose instructions this processor has, or None."""
    for file in reversed(compiling.files(".so")):
        with contextlib.suppress(OSError):  # it is made for another system
            library = ctypes.CDLL(str(file))
            if library.suits_this_processor():
                return library
    return None


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
        file = _build(compiler)
        library = ctypes.CDLL(str(file))
        if file.parent != cache.cache_folder():
            shutil.rmtree(file.parent)  # a loaded library no longer needs its file
        return library
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        # RuntimeError: there is no home; ValueError: CXX has an open quote
        details = getattr(error, "stderr", None) or error
        _logger.warning("No kernels for this processor: %s", details)
        return f"{named} made no kernels that can be loaded here"


@torch.compiler.assume_constant_result  # so torch.compile does not trace the compilation
def missing() -> str | None:
    """Why there are no kernels; None if there are."""
    library = _library()
    return library if isinstance(library, str) else None


def has(name: str, dtype: torch.dtype) -> bool:
    """Whether there is this kernel for this dtype; bfloat16 needs its instructions."""
    return hasattr(_library(), f"{name}_{str(dtype).removeprefix('torch.')}")


def vector_bytes() -> int:
    """Bytes of the vectors of multiply.h, to which rows are padded."""
    return _library().vector_bytes()


def is_recorded() -> bool:
    """Whether a graph is made of what is called, perhaps for other sizes and processors."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Whether torch.func transforms the call; PyTorch 2.4 does not know while it compiles."""
    is_asked = not (torch.__version__.startswith("2.4.") and torch.compiler.is_compiling())
    return is_asked and torch._C._are_functorch_transforms_active()


def readable(*tensors: Tensor) -> bool:
    """Whether a kernel can be given the addresses of tensors; for other tensors it would read
    anywhere.
    """
    if is_transformed():  # such tensors have no addresses
        return False
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)


def pixels(x: Tensor) -> Tensor:
    """[N, C, H, W] as kernels take maps: dense [N, H, W, C], no copy if it is channels last."""
    return x.permute(0, 2, 3, 1).contiguous()


def layout_of(x: Tensor) -> torch.memory_format:
    """Whether maps are channels last, or contiguous."""
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def new_map(like: Tensor, *shape: int) -> Tensor:
    """An empty [N, C, H, W], channels last.

    The result of a function of autograd must be no view, or it could not be changed in place.
    """
    last = torch.channels_last
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=last)


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
