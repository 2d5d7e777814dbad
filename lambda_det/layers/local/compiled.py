"""The query-first position output on the CPU, by a kernel in C++.

PyTorch's own operators write the scores of a tile to memory, lay them into their window and read
them again; the kernel (native/position_output.cpp) keeps them in the first-level cache and computes
no offset that leads out of the map. Where there is no g++, ``auto`` takes ``query_first``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers.local.query_first import empty_like_queries, empty_like_values, operator
from lambda_det.native import call, longs, missing

_SHORT = 32  # bytes of the shorter vectors of multiply.h
_LONG = 64  # of the longer ones, which may be as short as the others


class _Sizes(ctypes.Structure):
    """`Sizes` of position_output.cpp."""

    _names = "batch height width heads k v u scope_y scope_x rp kp vp wp"
    _fields_ = [(name, ctypes.c_long) for name in _names.split()]


def unsupported(queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if queries.device.type != "cpu":
        return f"it runs on the CPU, but the queries are on {queries.device.type}"
    return missing()


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


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy [b, H, W, g, c] into another layout, in a fraction of the time PyTorch takes."""
    source = source.to(target.dtype)
    strides = [longs(x.stride()) for x in (source, target)]
    call("lay_out", target.dtype, longs(source.shape), source, strides[0], target, strides[1])


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


def _output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """See :func:`lambda_det.layers.local.local_position_output`.

    16-bit inputs are computed in float32. The output is laid out as the queries are.
    """
    sizes, dtype = _sizes(queries, values, embedding), _work_dtype(queries)
    planes = values.permute(0, 4, 1, 2, 3)  # [b, u, H, W, v], often what is needed already
    if values.dtype != dtype or sizes.vp != sizes.v or not planes.is_contiguous():
        planes = torch.zeros((*planes.shape[:-1], sizes.vp), dtype=dtype)
        _windows(planes[..., : sizes.v], values)
    dense_queries = _dense(queries, sizes.k, dtype)
    rows = _pad_last(embedding.to(dtype).permute(1, 2, 0, 3), sizes.rp)
    output = empty_like_queries(queries, sizes.v, dtype)
    strides = longs(output.stride())
    call("forward", dtype, sizes, dense_queries, planes, rows, output, strides)
    return output.to(queries.dtype)


def _gradients(
    grad: Tensor, queries: Tensor, values: Tensor, embedding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, values and embedding for the gradient [b, H, W, h, v] of the output."""
    sizes, dtype = _sizes(queries, values, embedding), _work_dtype(queries)
    grad, dense_queries = _dense(grad, sizes.vp, dtype), _dense(queries, sizes.k, dtype)
    rows = embedding.to(dtype).permute(1, 2, 0, 3)  # [u, r_y, k, r_x]

    planes = torch.empty((sizes.batch, sizes.u, sizes.height, sizes.width, sizes.vp), dtype=dtype)
    call("values_gradient", dtype, sizes, grad, dense_queries, _pad_last(rows, sizes.rp), planes)
    grad_values = empty_like_values(values, dtype)
    _copy(grad_values.transpose(3, 4), planes[..., : sizes.v].permute(0, 2, 3, 1, 4))

    left = sizes.scope_x // 2
    transposed = torch.zeros((sizes.batch, sizes.u, sizes.height, sizes.vp, sizes.wp), dtype=dtype)
    inside = transposed[:, :, :, : sizes.v, left : left + sizes.width]
    _windows(inside.transpose(3, 4), values)
    dense_grad_queries = torch.empty((*queries.shape[:-1], sizes.kp), dtype=dtype)
    shares = (torch.get_num_threads(), sizes.u, sizes.scope_y, sizes.k, sizes.rp)
    grad_embedding = torch.zeros(shares, dtype=dtype)
    rows = _pad_last(rows.transpose(2, 3), sizes.kp)
    written = dense_grad_queries, grad_embedding
    call("queries_gradient", dtype, sizes, grad, dense_queries, transposed, rows, *written)
    grad_queries = empty_like_queries(queries, sizes.k, dtype)
    _copy(grad_queries, dense_grad_queries[..., : sizes.k])
    grad_embedding = grad_embedding.sum(0)[..., : sizes.scope_x].permute(2, 0, 1, 3)
    return (
        grad_queries.to(queries.dtype),
        grad_values.to(values.dtype),
        grad_embedding.to(embedding.dtype).contiguous(),
    )


compiled_output, compiled_gradients = operator("compiled", _output, _gradients)
