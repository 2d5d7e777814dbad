"""Kernels in C++ for the CPU, from the wheel, or compiled by g++ when the first of them is used.

One library holds all of them. A kernel is a C function for each dtype, with the pointers of tensors
and structures first and the number of threads last.
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
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from lambda_det.native import compiling

_logger = logging.getLogger(__name__)


_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where compiled kernels are kept, for this user alone."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.path.abspath(base)) / "lambda_det"


def exposed(folder: Path) -> Path | None:
    """The path by which another user than root could put a library into ``folder``, or None.

    It is the folder itself, one of its parents, or a link on the way to it. In a folder with the
    sticky bit, such as /tmp, nobody can replace files of others.
    """
    for path in dict.fromkeys((folder, folder.resolve())):
        for place in (path, *path.parents):
            about = place.lstat()
            is_own, is_link = about.st_uid == os.geteuid(), stat.S_ISLNK(about.st_mode)
            is_safe = is_link or not about.st_mode & _BY_OTHERS
            if place == path:
                is_safe &= is_own
            elif about.st_mode & stat.S_ISVTX:
                is_safe = True
            if not is_safe or not (is_own or about.st_uid == 0):
                return place
    return None


def _private_folder() -> Path:
    """The cache, or a new folder where others could put something into the cache."""
    folder = cache_folder()
    for place in reversed((folder, *folder.parents)):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
    if (place := exposed(folder)) is None:
        return folder
    _logger.warning(
        f"Other users can change {place}, so no kernels are taken from {folder}; they are compiled "
        "for this process alone. Take that right away (chmod go-w), or name another folder by "
        "XDG_CACHE_HOME."
    )
    private = Path(tempfile.mkdtemp())
    if (place := exposed(private)) is not None:
        private.rmdir()
        raise OSError(f"other users can change {place}; name another folder by TMPDIR")
    return private


def _build(compiler: list[str]) -> Path:
    """Compile for this processor, or take the library that an earlier process of this user
    compiled.
    """
    native = ["-march=native"]
    # the compiler's macros show its version and every instruction set that it would use here
    macros = compiling.run([*compiler, *native, "-dM", "-E", "-x", "c++", os.devnull])
    files = (*compiling.files(".cpp"), *compiling.files(".h"))
    texts = [file.read_text("utf-8") for file in files]
    key = _digest("\0".join([*compiling.FLAGS, macros, *texts]).encode())
    kept = _private_folder()
    # The name has a digest of the content: half a library would end every process that loads it
    for library in kept.glob(f"kernels_{key}_*.so"):
        if _is_of_this_user(library) and library.stem.endswith(_digest(library.read_bytes())):
            return library
    _logger.info("Compiling the CPU's kernels for this processor, once: %s", kept)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        compiled = compiling.compile_kernels(compiler, native, Path(folder))
        compiled.chmod(0o600)
        library = kept / f"kernels_{key}_{_digest(compiled.read_bytes())}.so"
        os.replace(compiled, library)  # other processes see all of it or nothing
    return library


def _is_of_this_user(file: Path) -> bool:
    """Whether a file belongs to this user, and no one else can write it."""
    about = file.lstat()
    is_private = about.st_uid == os.geteuid() and not about.st_mode & _BY_OTHERS
    return is_private and stat.S_ISREG(about.st_mode)


def _brought() -> ctypes.CDLL | None:
    """The best library of the wheel whose instructions this processor has, or None."""
    for file in reversed(compiling.files(".so")):
        with contextlib.suppress(OSError):  # it is made for another system
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
        file = _build(compiler)
        library = ctypes.CDLL(str(file))
        if file.parent != cache_folder():
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
