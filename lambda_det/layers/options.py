"""Options and inputs of a lambda layer that cannot work are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.layers.local import check_implementation

if TYPE_CHECKING:
    from lambda_det.layers.lambda_layer import LambdaLayer


def by(size: Sequence[int]) -> str:
    """A size as text, such as 3x5."""
    return "x".join(map(str, size))


def check_name(option: str, name: str, names: Collection[str]) -> None:
    """Raise ConfigError where an option has a name that is none of ``names``."""
    if name not in names:
        raise ConfigError(
            f"{option} of a lambda layer is {name!r}, but must be one of {', '.join(names)}."
        )


def check_sizes(dim: int, dim_out: int, query_depth: int, heads: int, intra_depth: int) -> None:
    """Raise ConfigError where no layer has these sizes."""
    sizes = {
        "dim": dim,
        "dim_out": dim_out,
        "query_depth": query_depth,
        "heads": heads,
        "intra_depth": intra_depth,
    }
    for option, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{option} of a lambda layer is {size}, but must be at least 1.")
    if dim_out % heads:
        raise ConfigError(
            f"A lambda layer with {dim_out} output channels cannot have {heads} heads, since the "
            f"heads share the channels equally; choose a number of heads that divides {dim_out}."
        )


def check_scope(scope: Sequence[int] | None, map_size: Sequence[int] | None) -> None:
    """Raise ConfigError where no position embeddings have this scope."""
    if (scope is None) == (map_size is None):
        raise ConfigError(
            "A lambda layer has either a local scope or a global map_size; set scope=None beside a "
            "map_size."
        )
    sides = map_size if scope is None else scope
    if len(sides) not in (2, 3) or min(sides) < 1 or (scope and any(s % 2 == 0 for s in scope)):
        raise ConfigError(
            f"The scope of a lambda layer must have two or three odd sides of at least 1, so that "
            f"the query is at its centre, but it is {by(sides)}; use "
            f"{by([side | 1 for side in sides])}."
        )


def make_norm(norm: str | Callable[[int], nn.Module | None], channels: int) -> nn.Module:
    """The norm of queries or values.

    Raises:
        ConfigError: ``norm`` is the name of none.
    """
    if isinstance(norm, str):
        check_name("norm", norm, ("BN", ""))
        return nn.BatchNorm2d(channels) if norm else nn.Identity()
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


def check_input(
    layer: LambdaLayer, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
) -> None:
    """Raise ConfigError where an input, its context or its mask does not fit a layer."""
    rank = x.dim() - 2
    if rank not in (1, 2, 3):
        raise ConfigError(
            f"A lambda layer got an input of the shape {list(x.shape)}; it takes sequences "
            "[B, C, N], maps [B, C, H, W] and volumes [B, C, D, H, W]."
        )
    if layer.position is not None:
        own = layer.position.embedding.dim() - 2 - layer.multi_head  # 2 for maps and sequences
        if own != max(rank, 2):
            raise ConfigError(
                f"A lambda layer whose scope has {own} sides got an input of the shape "
                f"{list(x.shape)}; maps [B, C, H, W] need a scope of 2 sides, and volumes "
                "[B, C, D, H, W] one of 3, such as (7, 7, 7)."
            )
    context = x if context is None else context
    if context.shape[:2] != x.shape[:2] or context.dim() != x.dim():
        raise ConfigError(
            f"The context of a lambda layer has the shape {list(context.shape)}; it must be that "
            f"of the input, {list(x.shape)}, except for the sizes of the map."
        )
    if mask is None:
        return
    if mask.dim() in (2, x.dim()) and (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        return  # a comparison of sizes would tie a graph to those it is made with
    queries, positions = pairs(layer, x, context)
    padding = [1, *context.shape[2:]]
    # A padding mask of one example serves for all
    if list(mask.shape) not in ([len(x), *padding], [1, *padding], [queries, positions]):
        raise ConfigError(
            f"The mask of a lambda layer has the shape {list(mask.shape)}, but for this input must "
            f"be {[len(x), *padding]} for padding or {[queries, positions]} for a context per "
            "query."
        )


def check_embeddings(layer: LambdaLayer, x: Tensor, context: Tensor, embeddings: Tensor) -> None:
    """Raise ConfigError where the embeddings given with a call do not fit."""
    if layer.position is not None:
        raise ConfigError(
            "This lambda layer has position embeddings of its own; make it with scope=None to give "
            "others with a call."
        )
    expected = (*pairs(layer, x, context), layer.query_depth, layer.intra_depth)
    if tuple(embeddings.shape) not in (expected, (len(x), *expected)):
        raise ConfigError(
            f"The embeddings given to a lambda layer have the shape {list(embeddings.shape)}; for "
            f"this input they must have {list(expected)}, or one such for each of {len(x)} "
            "examples."
        )


def pairs(layer: LambdaLayer, x: Tensor, context: Tensor) -> tuple[int, int]:
    """How many queries and how many positions of the context there are."""
    queries = math.prod(-(-side // layer.stride) for side in x.shape[2:])
    return queries, math.prod(context.shape[2:])
