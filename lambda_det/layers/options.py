"""Options of a lambda layer that cannot work are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.layers.local import check_implementation

if TYPE_CHECKING:
    from lambda_det.layers.lambda_layer import LambdaLayer


def check_sizes(dim: int, dim_out: int, query_depth: int, heads: int, intra_depth: int) -> None:
    """Raise ConfigError where no layer has these sizes."""
    if min(dim, dim_out, query_depth, heads, intra_depth) < 1:
        raise ConfigError(
            "dim, dim_out, query_depth, heads and intra_depth of a lambda layer must be at "
            f"least 1, but they are {dim}, {dim_out}, {query_depth}, {heads} and {intra_depth}."
        )
    if dim_out % heads:
        raise ConfigError(
            f"A lambda layer with {dim_out} output channels cannot have {heads} heads, since the "
            f"heads share the channels equally; choose a number of heads that divides {dim_out}."
        )


def make_norm(norm: str | Callable[[int], nn.Module | None], channels: int) -> nn.Module:
    """The norm of queries or values.

    Raises:
        ConfigError: ``norm`` is the name of none.
    """
    if norm == "":
        return nn.Identity()
    if norm == "BN":
        return nn.BatchNorm2d(channels)
    if isinstance(norm, str):
        raise ConfigError(
            f"norm of a lambda layer is {norm!r}, but must be 'BN', '' or a function from a "
            "number of channels to a module."
        )
    return norm(channels) or nn.Identity()


def check_lambdas(layer: LambdaLayer) -> None:
    """Raise ConfigError where the lambdas of a layer contradict its other options."""
    check_implementation(layer.implementation)
    position = layer.position
    if layer.content is None and position is None:
        raise ConfigError(
            "A lambda layer without content and without position lambda has no output; give it a "
            "scope or set content=True."
        )
    is_global = position is not None and position.map_size is not None
    if layer.dilation < 1 or (layer.dilation > 1 and is_global):
        raise ConfigError(
            f"The dilation of a lambda layer is {layer.dilation}; it must be at least 1, and 1 for "
            "a global map, which has every offset already."
        )
    if layer.stride < 1:
        raise ConfigError(f"The stride of a lambda layer is {layer.stride}; it must be at least 1.")
    if position is None:
        return
    expected = [layer.heads] * layer.multi_head + [layer.query_depth, layer.intra_depth]
    found = list(position.embedding.shape[: len(expected)])
    if found != expected:
        raise ConfigError(
            f"The shared position embedding has the leading sizes {found}, but this lambda layer "
            f"needs {expected}; share only between layers of equal query_depth, intra_depth and "
            "heads."
        )


def check_inputs(
    layer: LambdaLayer,
    x: Tensor,
    mask: Tensor | None,
    context: Tensor | None,
    embeddings: Tensor | None,
) -> None:
    """Raise ConfigError where the arguments of a layer's call do not fit it or each other."""
    rank = x.dim() - 2
    if layer.position is not None:
        own = layer.position.embedding.dim() - 2 - layer.multi_head  # 2 for maps and sequences
        if own != max(rank, 2):
            raise ConfigError(
                f"A lambda layer whose scope has {own} sides got an input of the shape "
                f"{list(x.shape)}; maps [B, C, H, W] need a scope of 2 sides, and volumes "
                "[B, C, D, H, W] one of 3, such as (7, 7, 7)."
            )
    if rank not in (1, 2, 3):
        raise ConfigError(
            f"A lambda layer got an input of the shape {list(x.shape)}; it takes sequences "
            "[B, C, N], maps [B, C, H, W] and volumes [B, C, D, H, W]."
        )
    if x.shape[1] != layer.qkv.in_channels:
        raise ConfigError(
            f"A lambda layer for {layer.qkv.in_channels} channels got an input of the shape "
            f"{list(x.shape)}, whose second size is the number of channels."
        )
    if context is not None and (context.shape[:2] != x.shape[:2] or context.dim() != x.dim()):
        raise ConfigError(
            f"The context of a lambda layer has the shape {list(context.shape)}; it must be that "
            f"of the input, {list(x.shape)}, but for the sizes of the map."
        )
    if mask is not None:
        _check_mask(layer, x, mask, x if context is None else context)
    if embeddings is None:
        return
    if layer.position is not None:
        raise ConfigError(
            "This lambda layer has position embeddings of its own; make it with scope=None to give "
            "others with a call."
        )
    queries = math.prod(-(-side // layer.stride) for side in x.shape[2:])
    positions = math.prod((x if context is None else context).shape[2:])
    expected = (queries, positions, layer.query_depth, layer.intra_depth)
    if tuple(embeddings.shape) not in (expected, (x.shape[0], *expected)):
        raise ConfigError(
            f"The embeddings given to a lambda layer have the shape {list(embeddings.shape)}; for "
            f"this input they must have {list(expected)}, or one such for each of {x.shape[0]} "
            "examples."
        )


def _check_mask(layer: LambdaLayer, x: Tensor, mask: Tensor, context: Tensor) -> None:
    if mask.dim() in (2, x.dim()) and (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        return  # a comparison of sizes would tie a graph to those it is made with
    queries = math.prod(-(-side // layer.stride) for side in x.shape[2:])
    padding, pairs = [x.shape[0], 1, *context.shape[2:]], [queries, math.prod(context.shape[2:])]
    # A padding mask of one example serves for all
    if list(mask.shape) not in (padding, [1, *padding[1:]], pairs):
        raise ConfigError(
            f"The mask of a lambda layer has the shape {list(mask.shape)}, but for this input must "
            f"be {padding} for padding or {pairs} for a context per query."
        )
