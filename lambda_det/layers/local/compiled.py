"""The query-first position output on the CPU, by a kernel that g++ compiles when it is first used.

PyTorch's own operators write the scores of a tile to memory, lay them into their window and read
them again; the kernel (compiled.cpp) keeps them in the first-level cache and computes no offset
that leads out of the map. Where there is no g++, ``auto`` takes ``query_first``.
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
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers.local.query_first import connect, empty_like_queries, empty_like_values

_logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("compiled.cpp")
# The objects are linked without libgomp: the process must not hold a second pool of threads beside
# the one of PyTorch, which has its OpenMP library in the global scope.
_COMPILE = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-std=c++17", "-c"]
_SHORT = 32  # bytes of the shorter vectors of compiled.cpp
_LONG = 64  # of the longer ones, which may be as short as the others


class _Sizes(ctypes.Structure):
    """`Sizes` of compiled.cpp."""

    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            *("batch", "height", "width", "heads", "k", "v", "u", "scope_y", "scope_x"),
            *("rp", "kp", "vp", "wp"),
        )
    ]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lambda_det"


def _run(command: list[str]) -> str:
    return subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        stdin=subprocess.DEVNULL,
    ).stdout


def _build(compiler: list[str]) -> Path:
    """Compile for this processor, or take what an earlier process has compiled."""
    # The compiler's macros tell its version and every instruction set it would use here
    macros = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256("\0".join([*_COMPILE, macros, _SOURCE.read_text("utf-8")]).encode())
    library = cache_folder() / f"position_output_{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    _logger.info("Compiling the lambda layer's kernel for this processor, once: %s", library)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        parts = [str(Path(folder, name)) for name in ("kernel.o", "kernel.so")]
        _run([*compiler, *_COMPILE, str(_SOURCE), "-o", parts[0]])
        _run([*compiler, "-shared", parts[0], "-o", parts[1]])
        with open(parts[1], "rb") as file:
            os.fsync(file.fileno())  # half a library would end every process that loads it
        os.replace(parts[1], library)  # other processes see all of it or nothing
    return library


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernel, or the reason why there is none."""
    if sys.platform == "win32":
        return "its kernel is compiled on Linux and macOS alone"
    named = os.environ.get("CXX") or "g++"
    try:
        compiler = shlex.split(named)  # perhaps "ccache g++"
        if shutil.which(compiler[0]) is None:
            return "there is no g++ to compile its kernel (CXX names another compiler)"
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        # RuntimeError: there is no home; ValueError: CXX has an open quote
        details = getattr(error, "stderr", None) or error
        _logger.warning("No kernel of the lambda layer for this processor: %s", details)
        return f"{named} made no kernel that can be loaded here"


@torch.compiler.assume_constant_result  # so that torch.compile does not look into the building
def _missing() -> str | None:
    library = _library()
    return library if isinstance(library, str) else None


def unsupported(queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if queries.device.type != "cpu":
        return f"it runs on the CPU, but the queries are on {queries.device.type}"
    return _missing()


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _work_dtype(queries: Tensor) -> torch.dtype:
    return torch.promote_types(queries.dtype, torch.float32)


def _sizes(queries: Tensor, values: Tensor, embedding: Tensor) -> _Sizes:
    batch, height, width, heads, k = queries.shape
    v, u = values.shape[3:]
    scope_y, scope_x = embedding.shape[2:]
    # The kernel gets pointers: what does not fit together would be read beyond its end
    if (
        values.shape[:3] != queries.shape[:3]
        or embedding.shape[:2] != (k, u)
        or scope_y % 2 + scope_x % 2 != 2
        or min(height, width, heads, v) < 1
    ):
        raise ValueError(
            f"Queries {list(queries.shape)}, values {list(values.shape)} and embedding "
            f"{list(embedding.shape)} do not fit together; they must be [b, H, W, h, k], "
            "[b, H, W, v, u] and [k, u, r_y, r_x] with odd r_y and r_x."
        )
    itemsize = torch.finfo(_work_dtype(queries)).bits // 8
    short, long = _SHORT // itemsize, _LONG // itemsize
    rp = _padded(scope_x, short)
    return _Sizes(
        *(batch, height, width, heads, k, v, u, scope_y, scope_x),
        rp=rp,
        kp=_padded(k, long),
        vp=_padded(v, long),
        wp=width - 1 + rp,  # of the window that the last query's vectors reach
    )


def _longs(numbers: Iterable[int]) -> ctypes.Array:
    numbers = tuple(numbers)
    return (ctypes.c_long * len(numbers))(*numbers)


def _call(name: str, dtype: torch.dtype, *arguments: Tensor | ctypes.Structure | ctypes.Array):
    function = getattr(_library(), f"{name}_{str(dtype).removeprefix('torch.')}")
    pointers = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.byref(x)
        for x in arguments
    ]
    function(*pointers, ctypes.c_int(torch.get_num_threads()))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy [b, H, W, g, c] into another layout, in a fraction of the time PyTorch takes."""
    source = source.to(target.dtype)
    strides = [_longs(x.stride()) for x in (source, target)]
    _call("lay_out", target.dtype, _longs(source.shape), source, strides[0], target, strides[1])


def _dense(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """[b, H, W, g, c] as a dense tensor with c padded to ``channels`` by zeros."""
    if x.dtype == dtype and x.is_contiguous() and x.shape[-1] == channels:
        return x
    make = torch.empty if x.shape[-1] == channels else torch.zeros
    dense = make((*x.shape[:-1], channels), dtype=dtype)
    _copy(dense[..., : x.shape[-1]], x)
    return dense


def _windows(planes: Tensor, values: Tensor) -> None:
    """Write values [b, H, W, v, u] into [b, u, H, W, v], a view into larger planes."""
    _copy(planes.permute(0, 2, 3, 1, 4), values.transpose(3, 4))


def _pad_last(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1])).contiguous()


# The schemas are spelled out because PyTorch 2.4 doesn't read them from annotations kept as text.
@torch.library.custom_op(
    "lambda_det::compiled",
    mutates_args=(),
    schema="(Tensor queries, Tensor values, Tensor embedding) -> Tensor",
)
def compiled_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """See :func:`lambda_det.layers.local.local_position_output`.

    16-bit inputs are computed in float32. The output is laid out as the queries are. The backward
    pass cannot itself be differentiated.
    """
    sizes, dtype = _sizes(queries, values, embedding), _work_dtype(queries)
    planes = values.permute(0, 4, 1, 2, 3)  # [b, u, H, W, v], often what is needed already
    if values.dtype != dtype or sizes.vp != sizes.v or not planes.is_contiguous():
        planes = torch.zeros((*planes.shape[:-1], sizes.vp), dtype=dtype)
        _windows(planes[..., : sizes.v], values)
    output = empty_like_queries(queries, sizes.v, dtype)
    _call(
        "forward",
        dtype,
        sizes,
        _dense(queries, sizes.k, dtype),
        planes,
        _pad_last(embedding.to(dtype).permute(1, 2, 0, 3), sizes.rp),
        output,
        _longs(output.stride()),
    )
    return output.to(queries.dtype)


@torch.library.custom_op(
    "lambda_det::compiled_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor queries, Tensor values, Tensor embedding)"
    " -> (Tensor, Tensor, Tensor)",
)
def _compiled_backward(
    grad: Tensor, queries: Tensor, values: Tensor, embedding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, values and embedding for the gradient [b, H, W, h, v] of the output."""
    sizes, dtype = _sizes(queries, values, embedding), _work_dtype(queries)
    grad, dense_queries = _dense(grad, sizes.vp, dtype), _dense(queries, sizes.k, dtype)
    rows = embedding.to(dtype).permute(1, 2, 0, 3)  # [u, r_y, k, r_x]

    planes = torch.empty((sizes.batch, sizes.u, sizes.height, sizes.width, sizes.vp), dtype=dtype)
    _call("values_gradient", dtype, sizes, grad, dense_queries, _pad_last(rows, sizes.rp), planes)
    grad_values = empty_like_values(values, dtype)
    _copy(grad_values.transpose(3, 4), planes[..., : sizes.v].permute(0, 2, 3, 1, 4))

    left = sizes.scope_x // 2
    transposed = torch.zeros((sizes.batch, sizes.u, sizes.height, sizes.vp, sizes.wp), dtype=dtype)
    inside = transposed[:, :, :, : sizes.v, left : left + sizes.width]
    _windows(inside.transpose(3, 4), values)
    dense_grad_queries = torch.empty((*queries.shape[:-1], sizes.kp), dtype=dtype)
    grad_embedding = torch.zeros(
        (torch.get_num_threads(), sizes.u, sizes.scope_y, sizes.k, sizes.rp), dtype=dtype
    )
    _call(
        "queries_gradient",
        dtype,
        sizes,
        grad,
        dense_queries,
        transposed,
        _pad_last(rows.transpose(2, 3), sizes.kp),
        dense_grad_queries,
        grad_embedding,
    )
    grad_queries = empty_like_queries(queries, sizes.k, dtype)
    _copy(grad_queries, dense_grad_queries[..., : sizes.k])
    grad_embedding = grad_embedding.sum(0)[..., : sizes.scope_x].permute(2, 0, 1, 3)
    return (
        grad_queries.to(queries.dtype),
        grad_values.to(values.dtype),
        grad_embedding.to(embedding.dtype).contiguous(),
    )


connect(compiled_output, _compiled_backward)
