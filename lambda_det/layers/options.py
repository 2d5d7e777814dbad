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


def check_sizes(layer: LambdaLayer, **sizes: int) -> None:
    """Raise ConfigError where a size is below 1, or heads cannot share the channels."""
    for name in ("query_depth", "heads", "intra_depth", "dilation", "stride"):
        sizes[name] = getattr(layer, name)
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} of a lambda layer is {value}, but must be at least 1.")
    dim_out, heads = sizes["dim_out"], layer.heads
    if dim_out % heads:
        raise ConfigError(
            f"A lambda layer with {dim_out} output channels cannot have {heads} heads, since "
            f"heads share the channels equally; choose a number that divides {dim_out}."
        )


def check_name(option: str, name: str, names: Collection[str]) -> None:
    """Raise ConfigError where an option has a name that is none of ``names``."""
    if name not in names:
        raise ConfigError(
            f"{option} of a lambda layer is {name!r}, but must be one of {list(names)}."
        )


def scope_sides(scope: Sequence[int] | None, map_size: Sequence[int] | None) -> Sequence[int]:
    """The sides of a local scope, or of that which spans a whole map.

    Raises:
        ConfigError: no position embeddings have this scope.
    """
    if (scope is None) == (map_size is None):
        raise ConfigError(
            "A lambda layer has either a local scope or a global map_size; set scope=None beside a "
            "map_size."
        )
    sides = [2 * side - 1 for side in map_size] if scope is None else scope
    if len(sides) not in (2, 3) or any(side < 1 or side % 2 == 0 for side in sides):
        raise ConfigError(
            "The scope of a lambda layer must have two or three odd sides of at least 1, so that "
            f"the query is at its centre, but it is {by(sides)}; use "
            f"{by([side | 1 for side in sides])}."
        )
    return sides


def make_norm(norm: str | Callable[[int], nn.Module | None], channels: int) -> nn.Module:
    """The norm of queries or values.

    Raises:
        ConfigError: ``norm`` is the name of none.
    """
    if not isinstance(norm, str):
        return norm(channels) or nn.Identity()
    check_name("norm", norm, ("BN", ""))
    return nn.BatchNorm2d(channels) if norm else nn.Identity()


def check_layer(layer: LambdaLayer) -> None:
    """Raise ConfigError where the options of a layer contradict each other."""
    check_implementation(layer.implementation)
    position = layer.position
    if position is None and layer.content is None:
        raise ConfigError(
            "A lambda layer without content and without position lambda has no output; give it a "
            "scope or set content=True."
        )
    if position is None:
        return
    if layer.dilation > 1 and position.map_size is not None:
        raise ConfigError(
            f"The dilation of a lambda layer is {layer.dilation}; it must be 1 for a global map, "
            "which has every offset already."
        )
    expected = [layer.heads] * layer.multi_head + [layer.query_depth, layer.intra_depth]
    found = list(position.embedding.shape[: len(expected)])
    if found != expected:
        raise ConfigError(
            f"The shared position embedding has the leading sizes {found}, but this lambda layer "
            f"needs {expected}; share only between layers of equal query_depth, intra_depth and "
            "heads."
        )


def check_input(
    layer: LambdaLayer, x: Tensor, context: Tensor, mask: Tensor | None, embeddings: Tensor | None
) -> None:
    """Raise ConfigError where the arguments of a call do not fit a layer or each other."""
    own = found = max(x.dim() - 2, 2)  # 2 for maps and sequences
    if layer.position is not None:
        own = layer.position.embedding.dim() - 2 - layer.multi_head
    if x.dim() not in (3, 4, 5) or found != own:
        raise ConfigError(
            f"A lambda layer got an input of the shape {list(x.shape)}; sequences [B, C, N] and "
            "maps [B, C, H, W] need a scope of 2 sides, and volumes [B, C, D, H, W] one of 3, such "
            "as (7, 7, 7), or no scope."
        )
    if context.shape[:2] != x.shape[:2] or context.dim() != x.dim():
        raise ConfigError(
            f"The context of a lambda layer has the shape {list(context.shape)}; it must be that "
            f"of the input, {list(x.shape)}, except for the sizes of the map."
        )
    if embeddings is not None and layer.position is not None:
        raise ConfigError(
            "This lambda layer has position embeddings of its own; make it with scope=None to give "
            "others with a call."
        )
    # Where a comparison of sizes would tie a graph to those it is made with
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        mask = None if mask is None or mask.dim() in (2, x.dim()) else mask
    if mask is None and embeddings is None:
        return
    # The numbers of queries and of positions of the context
    pairs = [
        math.prod(-(-side // layer.stride) for side in x.shape[2:]),
        math.prod(context.shape[2:]),
    ]
    if embeddings is not None:
        one = [*pairs, layer.query_depth, layer.intra_depth]
        _check_shape("embeddings", embeddings, one, [len(x), *one])
    if mask is not None:
        padding = [1, *context.shape[2:]]
        # A padding mask of one example serves for all
        _check_shape("mask", mask, [len(x), *padding], [1, *padding], pairs)


def _check_shape(what: str, x: Tensor, *shapes: list[int]) -> None:
    if list(x.shape) not in shapes:
        raise ConfigError(
            f"The {what} of a lambda layer has the shape {list(x.shape)}, but for this input must "
            f"have one of {', '.join(map(str, shapes))}."
        )
