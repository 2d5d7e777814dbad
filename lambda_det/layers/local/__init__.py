"""The position output over a local scope: implementations of one sum, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from lambda_det.errors import ConfigError
from lambda_det.layers.exporting import is_exporting
from lambda_det.layers.functional import without_autocast
from lambda_det.layers.local import compiled, fused
from lambda_det.layers.local.convolution import conv_output, depthwise_output
from lambda_det.layers.local.dense import dense_output
from lambda_det.layers.local.dilation import dilated, grid_size
from lambda_det.layers.local.portable import portable_output
from lambda_det.layers.local.query_first import query_first_output
from lambda_det.layers.position import crop_offsets

__all__ = ["IMPLEMENTATIONS", "check_implementation", "choose", "local_position_output"]

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "query_first": query_first_output,
    "compiled": compiled.compiled_output,
    "fused": fused.fused_output,
    "conv": conv_output,
    "depthwise": depthwise_output,
    "dense": dense_output,
    "portable": portable_output,
}


def check_implementation(name: str) -> None:
    """Raise ConfigError unless ``name`` is "auto" or the name of an implementation."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ConfigError(
            f"There is no implementation {name!r} of the local position output; "
            f"choose one of auto, {', '.join(IMPLEMENTATIONS)}."
        )


# Those that cannot run everywhere, with what says why
_UNSUPPORTED: dict[str, Callable[[Tensor, Tensor, Tensor], str | None]] = {
    "compiled": compiled.unsupported,
    "fused": fused.unsupported,
}

# Up to so many positions the dense einsum is faster than query_first, forward and backward
# together, if the scope reaches across the map; measured on the CPU (docs/performance.md).
DENSE_POSITIONS = 200


def choose(queries: Tensor, values: Tensor, embedding: Tensor) -> str:
    """The implementation that "auto" takes: a fixed rule, so that a run computes the same twice.

    The fused kernels are never taken: they have not run on a GPU yet.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u].
        embedding: [k, u, r_y, r_x], cut down to the offsets that occur on the map.
    """
    if is_exporting():
        return "portable"
    if compiled.unsupported(queries, values, embedding) is None:
        return "compiled"
    height, width = queries.shape[1:3]
    reaches_across = embedding.shape[-2] >= height and embedding.shape[-1] >= width
    if height * width <= DENSE_POSITIONS and reaches_across:
        return "dense"
    return "query_first"


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
    with values of 0 outside the map (Sections 3.3 and 3.4); neighbouring offsets are ``dilation``
    positions apart. All implementations compute this sum;
    they differ in the order of the summation, in speed and in memory.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u], of the queries' dtype.
        embedding: [k, u, r_y, r_x] with odd r_y and r_x; it is used in the queries' dtype.
        implementation: "auto" or a key of ``IMPLEMENTATIONS``.
        dilation: as of a convolution.

    Returns:
        [b, H, W, h, v] in the queries' dtype.

    Raises:
        ConfigError: if there is no such implementation, or it cannot run here.
    """
    check_implementation(implementation)
    height, width = queries.shape[1:3]
    if dilation > 1:
        embedding = crop_offsets(embedding, *grid_size(height, width, dilation))
        undilated = partial(
            local_position_output, embedding=embedding, implementation=implementation
        )
        return dilated(undilated, queries, values, dilation)
    embedding = crop_offsets(embedding, height, width).to(queries.dtype)
    if implementation == "auto" or is_exporting():
        implementation = choose(queries, values, embedding)
    elif implementation in _UNSUPPORTED:
        reason = _UNSUPPORTED[implementation](queries, values, embedding)
        if reason is not None:
            raise ConfigError(
                f"The implementation {implementation!r} of the local position output cannot be "
                f"used: {reason}; choose another one, or auto."
            )
    # The dtype was decided by the projections; autocast must not decide again product by product.
    with without_autocast(queries):
        return IMPLEMENTATIONS[implementation](queries, values, embedding)
