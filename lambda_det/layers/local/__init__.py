"""The position output over a local scope: implementations of one sum, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.layers.local import compiled, fused, lambda_first, query_first
from lambda_det.native import gpu, is_transformed


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
    height, width = queries.shape[1:3]
    embedding = crop_offsets(embedding, *grid_size((height, width), dilation))
    undilated = partial(_compute, embedding=embedding, implementation=implementation)
    # The dtype was decided by the projections; autocast must not decide again product by product.
    with without_autocast(queries):
        if dilation == 1:
            return undilated(queries, values)
        return dilated(undilated, queries, values, dilation)[:, :height, :width]


def _compute(queries: Tensor, values: Tensor, embedding: Tensor, implementation: str) -> Tensor:
    name = choose(queries, values, embedding, implementation)
    if name != "fused":  # which rounds the embedding where it reads it
        embedding = embedding.to(queries.dtype)
    return IMPLEMENTATIONS[name](queries, values, embedding)


# Up to this number of positions the dense einsum is faster than query_first, forward and backward
# together, if the scope reaches across the map; measured on the CPU (docs/performance.md).
DENSE_POSITIONS = 200


def choose(queries: Tensor, values: Tensor, embedding: Tensor, name: str = "auto") -> str:
    """The implementation that computes this. It is chosen here and nowhere else.

    "auto" is a fixed rule, so that a run computes the same twice: on a CPU ``compiled`` where there
    are its kernels; on a GPU ``fused`` where its kernels can run and enough of their work is left
    when inputs are filled up. Else it is plain PyTorch, which torch.func, too, can differentiate by
    ``depthwise`` alone.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u].
        embedding: [k, u, r_y, r_x], cut down to the offsets that occur on the map.
        name: "auto" or a key of ``IMPLEMENTATIONS``.

    Raises:
        ConfigError: there is no implementation of this name, or it cannot run here.
    """
    inputs = queries, values, embedding
    if name != "auto":
        if why := unsupported(name, *inputs):
            raise ConfigError(
                f"The implementation {name!r} of the local position output cannot be used: {why}; "
                "choose another one, or auto."
            )
        return name
    if is_transformed():
        return "depthwise"
    if compiled.unsupported(*inputs) is None:
        return "compiled"
    if gpu.index_of(queries) is not None:
        is_fused = fused.pays(queries, embedding) and fused.unsupported(*inputs) is None
        return "fused" if is_fused else "query_first"
    height, width = queries.shape[1:3]
    reaches_across = embedding.shape[-2] >= height and embedding.shape[-1] >= width
    return "dense" if height * width <= DENSE_POSITIONS and reaches_across else "query_first"


def unsupported(name: str, queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why a named implementation cannot compute this here; None if it can."""
    if name not in IMPLEMENTATIONS:
        return f"there are {', '.join(IMPLEMENTATIONS)}"
    if name in OPERATORS and is_transformed():
        return "torch.func does not know its derivatives"  # jvp would give wrong ones
    module = _MODULES.get(name)
    if hasattr(module, "unsupported"):
        return module.unsupported(queries, values, embedding)
    return None


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast leaves the dtypes on the device of ``x`` as they are."""
    # On meta there is no autocast, not even to switch off
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


# Offsets and dilation -----------------------------------------------------------------------------


def grid_size(size: tuple[int, ...], dilation: int) -> tuple[int, ...]:
    """The size of the largest grid of every ``dilation``-th position of a map."""
    return tuple(-(-side // dilation) for side in size)


def crop_offsets(embedding: Tensor, *size: int) -> Tensor:
    """Cut [.., r_y, r_x] down to the offsets that occur on a map of this size."""
    for dim, side in zip(range(-len(size), 0), size, strict=True):
        cut = max(embedding.shape[dim] // 2 - max(side - 1, 0), 0)  # a map may have no columns
        if cut:
            embedding = embedding.narrow(dim, cut, embedding.shape[dim] - 2 * cut)
    return embedding


def dilated(
    undilated: Callable[[Tensor, Tensor], Tensor], queries: Tensor, values: Tensor, dilation: int
) -> Tensor:
    """The position output with offsets ``dilation`` positions apart, by means of one without
    dilation.

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


# Operators ----------------------------------------------------------------------------------------
# Results and gradients have the memory layout of queries and values, channels last or one map per
# channel, so that no later operation copies them.


def _like_queries(queries: Tensor, channels: int) -> Tensor:
    """An empty [b, H, W, h, c] laid out as the queries are, channels last or a map per channel."""
    batch, height, width, heads, _ = queries.shape
    if queries.stride(-1) == 1:
        return queries.new_empty((batch, height, width, heads, channels))
    maps = queries.new_empty((batch, heads, channels, height, width))
    return maps.permute(0, 3, 4, 1, 2)


def _like_values(values: Tensor) -> Tensor:
    """An empty [b, H, W, v, u], laid out as the values are."""
    batch, height, width, v, u = values.shape
    if values.stride(-2) == u:
        return values.new_empty(values.shape)
    return values.new_empty((batch, v, u, height, width)).permute(0, 3, 4, 1, 2)


def _empty_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    return _like_queries(queries, values.shape[3])


def _empty_gradients(
    grad: Tensor, queries: Tensor, values: Tensor, embedding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _like_queries(queries, queries.shape[-1]),
        _like_values(values),
        torch.empty_like(embedding, memory_format=torch.contiguous_format),
    )


# The schemas are spelled out because PyTorch 2.4 doesn't read them from annotations kept as text.
_INPUTS = "Tensor queries, Tensor values, Tensor embedding"


def _operator(name: str, module: ModuleType) -> tuple[CustomOpDef, CustomOpDef]:
    """Operators of a module's ``fill_output`` and ``fill_gradients``, in torch.ops.lambda_det."""
    # torch.compile keeps both whole. Only the inputs are kept for the backward pass, which cannot
    # itself be differentiated.

    def compute(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
        output = _empty_output(queries, values, embedding)
        with without_autocast(queries):
            module.fill_output(output, queries, values, embedding)
        return output

    def differentiate(
        grad: Tensor, queries: Tensor, values: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _empty_gradients(grad, queries, values, embedding)
        with without_autocast(queries):
            module.fill_gradients(*gradients, grad, queries, values, embedding)
        return gradients

    output = torch.library.custom_op(
        f"lambda_det::{name}", compute, mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
    )
    backward = torch.library.custom_op(
        f"lambda_det::{name}_backward",
        differentiate,
        mutates_args=(),
        schema=f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    )
    # the shapes of the results, for torch.compile
    output.register_fake(_empty_output)
    backward.register_fake(_empty_gradients)
    output.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return output, backward


_MODULES = {"query_first": query_first, "compiled": compiled, "fused": fused}
# for each name the operators of the output and of the gradients
OPERATORS = {name: _operator(name, module) for name, module in _MODULES.items()}
IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{name: output for name, (output, _) in OPERATORS.items()},
    "depthwise": lambda_first.depthwise_output,
    "dense": lambda_first.dense_output,
}
