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

from lambda_det.native import call, has, lay_out, longs, missing, vector_bytes


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
    return queries.dtype if has("forward", queries.dtype) else torch.float32


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernel adds up products of numbers of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _sizes(queries: Tensor, values: Tensor, embedding: Tensor) -> _Sizes:
    k, (v, u), (scope_y, scope_x) = queries.shape[4], values.shape[3:], embedding.shape[2:]
    # The kernel gets pointers: tensors that do not fit together would be read beyond their ends.
    if (
        values.shape[:3] != queries.shape[:3]
        or embedding.shape[:2] != (k, u)
        or scope_y % 2 + scope_x % 2 != 2
        or min(*queries.shape[1:4], v) < 1
    ):
        raise ValueError(
            f"Queries {list(queries.shape)}, values {list(values.shape)} and embedding "
            f"{list(embedding.shape)} do not fit together; they must be [b, H, W, h, k], "
            "[b, H, W, v, u] and [k, u, r_y, r_x] with odd r_y and r_x."
        )
    lanes = vector_bytes() // _sum_dtype(queries.dtype).itemsize
    rp, kp, vp = (_padded(size, lanes) for size in (scope_x, k, v))
    wp = queries.shape[2] - 1 + rp  # width of the window that the last query's vectors reach
    return _Sizes(*queries.shape, v, u, scope_y, scope_x, rp, kp, vp, wp)


def _dense(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """[b, H, W, g, c] as a dense tensor with c padded to ``channels`` by zeros."""
    if x.dtype == dtype and x.is_contiguous() and x.shape[-1] == channels:
        return x
    make = torch.empty if x.shape[-1] == channels else torch.zeros
    dense = make((*x.shape[:-1], channels), dtype=dtype)
    lay_out(dense[..., : x.shape[-1]], x)
    return dense


def _pair(dtype: torch.dtype) -> int:
    """The number of values that the kernel takes in one step of a product."""
    return _sum_dtype(dtype).itemsize // dtype.itemsize


def _planes(values: Tensor, sizes: _Sizes, dtype: torch.dtype) -> Tensor:
    """Values [b, H, W, v, u] as [b, u, H, W / pair, vp, pair]."""
    planes, pair = values.permute(0, 4, 1, 2, 3), _pair(dtype)
    if pair == 1 and values.dtype == dtype and sizes.vp == sizes.v and planes.is_contiguous():
        return planes  # often
    columns = _padded(sizes.width, pair)
    shape = (sizes.batch, sizes.u, sizes.height, columns // pair, sizes.vp, pair)
    planes = torch.zeros(shape, dtype=dtype)
    for place in range(min(pair, sizes.width)):
        strip = values[:, :, place::pair].transpose(3, 4)  # [b, H, W / pair, u, v]
        target = planes[:, :, :, : strip.shape[2], : sizes.v, place]
        lay_out(target.permute(0, 2, 3, 1, 4), strip)
    return planes


def _transposed_planes(values: Tensor, sizes: _Sizes, dtype: torch.dtype) -> Tensor:
    """Values [b, H, W, v, u] as [b, u, H, vp / pair, wp, pair]."""
    left, pair = sizes.scope_x // 2, _pair(dtype)
    shape = (sizes.batch, sizes.u, sizes.height, sizes.vp // pair, sizes.wp, pair)
    planes = torch.zeros(shape, dtype=dtype)
    for place in range(min(pair, sizes.v)):
        strip = values[..., place::pair, :].transpose(3, 4)  # [b, H, W, u, v / pair]
        target = planes[:, :, :, : strip.shape[4], left : left + sizes.width, place]
        lay_out(target.permute(0, 2, 4, 1, 3), strip)
    return planes


def _rows(x: Tensor) -> Tensor:
    """Dense [b, H, W, h, c] as [b, H, (W h) / pair, c, pair]."""
    pair = _pair(x.dtype)
    if pair == 1:
        return x
    rows = x.flatten(2, 3)
    rows = F.pad(rows, (0, 0, 0, rows.shape[2] % pair)).unflatten(2, (-1, pair))
    paired = torch.empty_like(rows.transpose(3, 4), memory_format=torch.contiguous_format)
    lay_out(paired.transpose(3, 4), rows)
    return paired


def _steps(matrices: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Matrices [.., r, c], padded with zeros, as [.., r / pair, columns, pair]."""
    rows, pair = matrices.shape[-2], _pair(dtype)
    padded = F.pad(matrices.to(dtype), (0, columns - matrices.shape[-1], 0, rows % pair))
    return padded.unflatten(-2, (-1, pair)).transpose(-2, -1).contiguous()


def _lay_out(target: Tensor, source: Tensor, dtype: torch.dtype) -> None:
    """Copy a result of the kernel to its place, by way of the kernel's dtype."""
    result = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
    lay_out(result, source)
    if result is not target:
        target.copy_(result)


def fill_output(output: Tensor, queries: Tensor, values: Tensor, embedding: Tensor) -> None:
    """Compute the output [b, H, W, h, v], see :func:`lambda_det.layers.local_position_output`.

    16-bit inputs are computed in float32 where the kernel does not take them; where it does, scores
    are rounded to bfloat16 as query_first does.
    """
    sizes, dtype = _sizes(queries, values, embedding), _work_dtype(queries)
    dense_queries = _dense(queries, _padded(sizes.k, _pair(dtype)), dtype)
    planes = _planes(values, sizes, dtype)
    rows = _steps(embedding.permute(1, 2, 0, 3), sizes.rp, dtype)
    result = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
    call("forward", dtype, sizes, dense_queries, planes, rows, result, longs(result.stride()))
    if result is not output:
        output.copy_(result)


def fill_gradients(
    grad_queries: Tensor,
    grad_values: Tensor,
    grad_embedding: Tensor,
    grad: Tensor,
    queries: Tensor,
    values: Tensor,
    embedding: Tensor,
) -> None:
    """Compute the three gradients for the gradient [b, H, W, h, v] of the output."""
    sizes, dtype = _sizes(queries, values, embedding), _work_dtype(queries)
    wide = _sum_dtype(dtype)
    grad = _dense(grad, sizes.vp, dtype)
    dense_queries = _dense(queries, _padded(sizes.k, _pair(dtype)), dtype)
    rows = embedding.permute(1, 2, 0, 3)  # [u, r_y, k, r_x]

    planes = torch.empty((sizes.batch, sizes.u, sizes.height, sizes.width, sizes.vp), dtype=wide)
    factors = _rows(grad), dense_queries, _steps(rows, sizes.rp, dtype)
    call("values_gradient", dtype, sizes, *factors, planes)
    of_values = planes[..., : sizes.v].permute(0, 2, 3, 1, 4)  # [b, H, W, u, v]
    _lay_out(grad_values.transpose(3, 4), of_values, dtype)

    of_queries = torch.empty((*queries.shape[:-1], sizes.kp), dtype=wide)
    shares = (torch.get_num_threads(), sizes.u, sizes.scope_y, sizes.k, sizes.rp)
    of_embedding = torch.zeros(shares, dtype=wide)
    factors = grad, _rows(dense_queries[..., : sizes.k]), _transposed_planes(values, sizes, dtype)
    rows = _steps(rows.transpose(2, 3), sizes.kp, dtype)
    call("queries_gradient", dtype, sizes, *factors, rows, of_queries, of_embedding)
    _lay_out(grad_queries, of_queries[..., : sizes.k], dtype)
    of_embedding = of_embedding.sum(0)[..., : sizes.scope_x]  # [u, r_y, k, r_x]
    grad_embedding.copy_(of_embedding.permute(2, 0, 1, 3))
