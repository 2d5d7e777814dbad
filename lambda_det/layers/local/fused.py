"""The position output with the query contracted first, in one GPU kernel for each direction.

The same sums in the same order as query_first.py,

    a[n, h, r] = sum_k q[n, h, k] E[k, r]        the score of every offset, for every query
    y[n, h, v] = sum_r a[n, h, r] V[n + r, v]

As in flash attention, the scores of a tile of queries stay on the chip: neither scores nor lambdas
reach the GPU's memory, and the backward pass computes the scores again. Nothing is added atomically
and every sum has a fixed order, so equal inputs give equal outputs and gradients, to the bit.
Products accumulate in float32. Scores, and in the backward pass their gradients, are rounded to the
inputs' dtype before a second product.

Triton compiles the kernels at their first use (fused_kernels.py); without a GPU its interpreter can
run them.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERY_DEPTHS = (8, 16, 32)
# Programs that keep a large GPU busy, about two for each multiprocessor. A map of fewer tiles is
# cut into smaller ones. It is a constant, so that no result depends on the GPU.
PROGRAMS = 256
# Limit on the numbers in all programs' parts of the embedding's gradient: 128 MB in float32. For
# k=16 and a scope of 23x23, 256 programs take 12 MB.
SHARES_NUMEL = 2**25


def unsupported(queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why the kernels cannot run on these tensors here; None if they can."""
    k, u = embedding.shape[:2]
    if u != 1:
        return f"the intra-depth is {u}, and the kernels know no other than 1"
    if k not in QUERY_DEPTHS:
        return f"the query depth is {k}, and the kernels know only {QUERY_DEPTHS}"
    dtypes = {queries.dtype, values.dtype, embedding.dtype}
    if len(dtypes) > 1 or queries.dtype not in DTYPES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"the dtype is {names}, and the kernels know only bfloat16, float16 and float32"
    kernels = _kernels()
    if isinstance(kernels, str):
        return kernels
    if kernels.INTERPRETED:
        return None
    if not queries.is_cuda or torch.version.hip:
        return "the tensors are not on an NVIDIA GPU, and Triton is not in interpreter mode"
    if torch.cuda.get_device_capability(queries.device) < (8, 0):
        return "the GPU is older than Ampere (compute capability 8.0)"
    return None


def _kernels() -> ModuleType | str:
    """The module of kernels, or the reason why there is none. Only this imports Triton."""
    try:
        import triton.language
    except ImportError:
        return "Triton is not installed"
    if not hasattr(triton.language, "gather"):
        return "this Triton is too old: it has no triton.language.gather"
    from lambda_det.layers.local import fused_kernels

    return fused_kernels


class _Plan(NamedTuple):
    """Sizes that the kernels are compiled for. Only they decide the order of the sums."""

    span: int  # R, offsets dx that are taken at a time
    blocks: int  # of R offsets in a row of the scope
    depth: int  # value channels that are taken at a time
    rows: int  # (x, h) pairs of a tile of queries
    warps: int  # that work on it
    stages: int  # of loads ahead
    value_rows: int  # (x, h) pairs at a time for the gradient of the values
    value_height: int  # rows of values in a tile of that gradient

    @classmethod
    def of(cls, queries: Tensor, values: Tensor, embedding: Tensor) -> _Plan:
        """Choose by what the compiler reports for k=16, h=4, r=23 and v of 64 and 128.

        This was not measured on a GPU. In channels_last a thread spills at most 76 bytes, mostly
        none. Other layouts need more addresses, and a thread spills up to 780 bytes
        (tests/layers/test_fused.py). A program takes at most 97 KB of shared memory where GPUs have
        99. Products of float32 numbers run outside the matrix units and need small tiles.
        """
        batch, height, width, heads, _ = queries.shape
        v, scope_x = values.shape[3], embedding.shape[3]
        wide = queries.dtype == torch.float32
        span = 16 if scope_x <= 16 else 32
        depth = min(max(_power_of_2(v), 16), 64 if wide else 128)

        rows, most = 16, 32 if wide else 128
        while (
            rows < min(width * heads, most)
            and _last_query(2 * rows, heads) <= span
            and (rows < 32 or batch * height * math.ceil(width * heads / (2 * rows)) >= PROGRAMS)
        ):
            rows *= 2

        most = 32 if wide else 64 if depth > 64 else 128
        value_rows = min(max(_power_of_2((2 * span - 1) * heads), 16), most)
        value_height = 1 if wide else 4
        columns = math.ceil(width / span)
        while value_height > 1 and batch * math.ceil(height / value_height) * columns < PROGRAMS:
            value_height //= 2
        return cls(
            span=span,
            blocks=math.ceil(scope_x / span),
            depth=depth,
            rows=rows,
            warps=8 if wide or rows > 64 else 4,
            stages=2 if wide else 3,
            value_rows=value_rows,
            value_height=value_height,
        )


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _last_query(rows: int, heads: int) -> int:
    """The most queries that may follow the first one in a tile of (x, h) pairs."""
    begins = 0 if rows % heads == 0 else heads - 1  # a tile may begin at a later head
    return (begins + rows - 1) // heads


def _lay_out(embedding: Tensor, plan: _Plan) -> Tensor:
    """Fill [k, 1, r_y, r_x] up with zeros and lay it out as [r_y, blocks, K, R]."""
    k, _, _, scope_x = embedding.shape
    padded = F.pad(embedding[:, 0], (0, plan.blocks * plan.span - scope_x, 0, 0, 0, max(16 - k, 0)))
    return padded.unflatten(2, (plan.blocks, plan.span)).permute(1, 2, 0, 3).contiguous()


def _constants(queries: Tensor, embedding: Tensor, plan: _Plan) -> dict[str, int | str | bool]:
    """The compile-time arguments that all kernels share."""
    return {
        "HEADS": queries.shape[3],
        "QUERY_DEPTH": queries.shape[4],
        "K": max(queries.shape[4], 16),
        "R": plan.span,
        "BLOCKS": plan.blocks,
        "DEPTH": plan.depth,
        "PRECISION": "tf32" if allows_tf32() else "ieee",
        "WIDEN": _kernels().INTERPRETED,
    }


@torch.compiler.assume_constant_result
def allows_tf32() -> bool:
    """Whether products of float32 numbers may be made of shorter ones on a GPU."""
    matmul = torch.backends.cuda.matmul
    # From PyTorch 2.9 on, allow_tf32 may not be read where the new setting was made.
    new = hasattr(matmul, "fp32_precision")
    return matmul.fp32_precision == "tf32" if new else matmul.allow_tf32


def fill_output(output: Tensor, queries: Tensor, values: Tensor, embedding: Tensor) -> None:
    """Compute the output, see :func:`lambda_det.layers.local_position_output`.

    Deterministic, forward and backward. Strides are free; the kernels read fastest what is dense in
    the channels (channels_last).

    Args:
        output: [b, H, W, h, v] in the queries' dtype.
        queries: [b, H, W, h, k] with k of 8, 16 or 32.
        values: [b, H, W, v, 1].
        embedding: [k, 1, r_y, r_x] with odd r_y and r_x.
    """
    if output.numel() == 0:
        return
    batch, height, width, heads, _ = queries.shape
    depth = values.shape[3]
    plan = _Plan.of(queries, values, embedding)
    tiles = batch * height * math.ceil(width * heads / plan.rows)
    with torch.cuda.device_of(queries):
        _kernels().output_kernel[(tiles * math.ceil(depth / plan.depth),)](
            queries,
            *queries.stride(),
            values,
            *values.stride()[:4],
            _lay_out(embedding, plan),
            embedding.shape[2],
            embedding.shape[3] // 2,
            output,
            *output.stride(),
            height,
            width,
            depth,
            ROWS=plan.rows,
            num_warps=plan.warps,
            num_stages=plan.stages,
            **_constants(queries, embedding, plan),
        )


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
    if grad.numel() == 0:
        grad_embedding.zero_()
        return
    _fill_queries(grad_queries, grad_embedding, grad, queries, values, embedding)
    _fill_values(grad_values, grad, queries, values, embedding)


def _fill_queries(
    grad_queries: Tensor,
    grad_embedding: Tensor,
    grad: Tensor,
    queries: Tensor,
    values: Tensor,
    embedding: Tensor,
) -> None:
    """Compute the gradients of queries and embedding."""
    batch, height, width, heads, _ = queries.shape
    depth = values.shape[3]
    plan = _Plan.of(queries, values, embedding)
    laid_out = _lay_out(embedding, plan)
    tiles = batch * height * math.ceil(width * heads / plan.rows)
    programs = max(min(tiles, PROGRAMS, SHARES_NUMEL // laid_out.numel()), 1)
    shares = torch.zeros(
        (programs, *laid_out.shape), dtype=torch.float32, device=embedding.device
    )  # [programs, r_y, blocks, K, R]
    with torch.cuda.device_of(queries):
        _kernels().query_kernel[(programs,)](
            grad,
            *grad.stride(),
            queries,
            *queries.stride(),
            values,
            *values.stride()[:4],
            laid_out,
            embedding.shape[2],
            embedding.shape[3] // 2,
            grad_queries,
            *grad_queries.stride(),
            shares,
            batch,
            height,
            width,
            depth,
            ROWS=plan.rows,
            SLICES=math.ceil(depth / plan.depth),
            num_warps=plan.warps,
            num_stages=plan.stages,
            **_constants(queries, embedding, plan),
        )
    k, _, _, scope_x = embedding.shape
    of_embedding = shares.sum(0).permute(2, 0, 1, 3).flatten(2)[:k, :, :scope_x]  # [k, r_y, r_x]
    grad_embedding.copy_(of_embedding[:, None])


def _fill_values(
    grad_values: Tensor, grad: Tensor, queries: Tensor, values: Tensor, embedding: Tensor
) -> None:
    """Compute the gradient of the values."""
    batch, height, width, depth, _ = values.shape
    plan = _Plan.of(queries, values, embedding)
    tiles = batch * math.ceil(height / plan.value_height) * math.ceil(width / plan.span)
    with torch.cuda.device_of(queries):
        _kernels().value_kernel[(tiles * math.ceil(depth / plan.depth),)](
            grad,
            *grad.stride(),
            queries,
            *queries.stride(),
            _lay_out(embedding, plan),
            embedding.shape[2],
            embedding.shape[3] // 2,
            grad_values,
            *grad_values.stride()[:4],
            height,
            width,
            depth,
            ROWS=plan.value_rows,
            TALL=plan.value_height,
            num_warps=8,
            num_stages=2,
            **_constants(queries, embedding, plan),
        )
