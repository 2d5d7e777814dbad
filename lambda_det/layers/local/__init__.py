"""The position output over a local scope: implementations of one sum, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.layers.local import compiled, fused
from lambda_det.layers.local.lambda_first import conv_output, dense_output, depthwise_output
from lambda_det.layers.local.query_first import query_first_output
from lambda_det.layers.tensors import crop_offsets, grid_size, without_autocast
from lambda_det.native import is_transformed

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "query_first": query_first_output,
    "compiled": compiled.compiled_output,
    "fused": fused.fused_output,
    "conv": conv_output,
    "depthwise": depthwise_output,
    "dense": dense_output,
}

# Those that cannot run everywhere, with what says why
_UNSUPPORTED: dict[str, Callable[[Tensor, Tensor, Tensor], str | None]] = {
    "compiled": compiled.unsupported,
    "fused": fused.unsupported,
}

# Up to this number of positions the dense einsum is faster than query_first, forward and backward
# together, if the scope reaches across the map; measured on the CPU (docs/performance.md).
DENSE_POSITIONS = 200


def check_implementation(name: str) -> None:
    """Raise ConfigError unless ``name`` is "auto" or the name of an implementation."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ConfigError(
            f"There is no implementation {name!r} of the local position output; "
            f"choose one of auto, {', '.join(IMPLEMENTATIONS)}."
        )


def choose(queries: Tensor, values: Tensor, embedding: Tensor) -> str:
    """The implementation that "auto" takes: a fixed rule, so that a run computes the same twice.

    On a GPU nothing has been measured yet (docs/gpu.md). There it is ``query_first``, which is
    plain PyTorch. A rule by capability, dtype or size belongs here, with its measurement.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u].
        embedding: [k, u, r_y, r_x], cut down to the offsets that occur on the map.
    """
    if queries.device.type == "cuda":
        return "query_first"
    if compiled.unsupported(queries, values, embedding) is None:
        return "compiled"
    height, width = queries.shape[1:3]
    reaches_across = embedding.shape[-2] >= height and embedding.shape[-1] >= width
    return "dense" if height * width <= DENSE_POSITIONS and reaches_across else "query_first"


def unsupported(name: str, queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why an implementation cannot compute this here; None if it can."""
    if is_transformed() and name in ("query_first", *_UNSUPPORTED):
        return "torch.func does not know its derivatives"  # jvp would give wrong ones
    return _UNSUPPORTED[name](queries, values, embedding) if name in _UNSUPPORTED else None


def local_position_output(
    queries: Tensor,
    values: Tensor,
    embedding: Tensor,
    implementation: str = "auto",
    *,
    dilation: int = 1,
) -> Tensor:
    """Apply every position's own position lambda to its queries.

    y[b, n, h, v] = sum over k, u and the offsets r of q[b, n, h, k] E[k, u, r] V[b, n + r, v, u],
    with values of 0 outside the map (Sections 3.3 and 3.4). All implementations compute this sum;
    they differ in the order of the summation, in speed and in memory.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u], of the queries' dtype.
        embedding: [k, u, r_y, r_x] with odd r_y and r_x; it is used in the queries' dtype.
        implementation: "auto" or a key of ``IMPLEMENTATIONS``.
        dilation: distance between neighbouring offsets, in positions.

    Returns:
        [b, H, W, h, v] in the queries' dtype.

    Raises:
        ConfigError: if there is no such implementation, or it cannot run here.
    """
    check_implementation(implementation)
    height, width = queries.shape[1:3]
    embedding = crop_offsets(embedding, *grid_size((height, width), dilation))
    if dilation > 1:
        undilated = partial(
            local_position_output, embedding=embedding, implementation=implementation
        )
        return dilated(undilated, queries, values, dilation)[:, :height, :width]
    embedding = embedding.to(queries.dtype)
    # The dtype was decided by the projections; autocast must not decide again product by product.
    with without_autocast(queries):
        if implementation == "auto":
            name = "depthwise" if is_transformed() else choose(queries, values, embedding)
            return IMPLEMENTATIONS[name](queries, values, embedding)
        why = unsupported(implementation, queries, values, embedding)
        if why is not None:
            raise ConfigError(
                f"The implementation {implementation!r} of the local position output cannot be "
                f"used: {why}; choose another one, or auto."
            )
        return IMPLEMENTATIONS[implementation](queries, values, embedding)


def dilated(
    undilated: Callable[[Tensor, Tensor], Tensor], queries: Tensor, values: Tensor, dilation: int
) -> Tensor:
    """A position output whose offsets are ``dilation`` positions apart, by one without dilation.

    A query meets the values at every ``dilation``-th row and column from its own. On the grid of
    these positions they are neighbours. So each of the dilation^2 grids, filled up with zeros as
    there are beyond a border, goes through ``undilated`` as an image of its own.

    Args:
        undilated: maps queries [b, H, W, h, k] and values [b, H, W, v, u] to [b, H, W, h, v].
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u].
        dilation: 1 or more.

    Returns:
        [b, H', W', h, v], where H' and W' are H and W rounded up to multiples of ``dilation``.
    """
    height, width = queries.shape[1:3]
    pads = 0, 0, 0, 0, 0, -width % dilation, 0, -height % dilation
    grids = []
    for x in (queries, values):
        x = F.pad(x, pads).unflatten(2, (-1, dilation)).unflatten(1, (-1, dilation))
        grids.append(_dense(x.permute(0, 2, 4, 1, 3, 5, 6)).flatten(0, 2))  # [b d d, H', W', ..]
    outputs = undilated(*grids).unflatten(0, (-1, dilation, dilation))
    outputs = _dense(outputs.permute(0, 3, 1, 4, 2, 5, 6))  # [b, H', d, W', d, h, v]
    return outputs.flatten(3, 4).flatten(1, 2)


def _dense(x: Tensor) -> Tensor:
    # Not contiguous(), whose answer for sides of 1 would be part of an exported graph
    return x.clone(memory_format=torch.contiguous_format)
