"""Options and inputs of a lambda layer that cannot work are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lambda_det.config import POSITIVE, check, one_of
from lambda_det.errors import ConfigError
from lambda_det.native import is_recorded


def by(size: Sequence[int]) -> str:
    """A size as text, such as 3x5."""
    return "x".join(map(str, size))


def check_sizes(*, dim_out: int, heads: int, **sizes: int) -> None:
    """Raise ConfigError where a size is below 1, or heads cannot share the channels."""
    for name, size in {"dim_out": dim_out, "heads": heads, **sizes}.items():
        check(name, size, POSITIVE)
    if dim_out % heads:
        raise ConfigError(
            f"A lambda layer with {dim_out} output channels cannot have {heads} heads, since "
            f"heads share the channels equally; choose a number that divides {dim_out}."
        )


def scope_sides(
    scope: Sequence[int] | None, map_size: Sequence[int] | None, dimensions: Sequence[int]
) -> Sequence[int]:
    """The sides of a local scope, or of the scope that spans a whole map.

    Args:
        scope: odd sides, or None.
        map_size: of the largest map, or None.
        dimensions: the numbers of sides that a scope may have.

    Raises:
        ConfigError: no position embeddings have this scope.
    """
    if (scope is None) == (map_size is None):
        raise ConfigError(
            "A lambda layer has either a local scope or a global map_size; set scope=None beside a "
            "map_size."
        )
    sides = [2 * side - 1 for side in map_size] if scope is None else scope
    if len(sides) not in dimensions:
        raise ConfigError(
            f"The scope of a lambda layer must have {' or '.join(map(str, dimensions))} sides, but "
            f"it is {by(sides)}."
        )
    if any(side < 1 or side % 2 == 0 for side in sides):
        raise ConfigError(
            f"The scope of a lambda layer is {by(sides)}, but must have odd sides of at least 1, "
            "so that the query is at its centre."
        )
    return sides


def make_norm(norm: str | Callable[[int], nn.Module | None], channels: int) -> nn.Module:
    """The norm of queries or values.

    Raises:
        ConfigError: ``norm`` is not the name of a norm.
    """
    if not isinstance(norm, str):
        return norm(channels) or nn.Identity()
    check("norm", norm, one_of("BN", ""))
    return nn.BatchNorm2d(channels) if norm else nn.Identity()


def check_position(
    own: list[int | None],
    wanted: list[int | None],
    map_size: Sequence[int] | None,
    dilation: int,
) -> None:
    """Raise ConfigError where position embeddings do not fit a layer.

    Args:
        own: query depth, intra-depth and heads of the embeddings; None for one table of all heads.
        wanted: those that the layer needs.
        map_size: of the largest map of a global embedding, or None.
        dilation: of the layer.
    """
    if dilation > 1 and map_size is not None:
        raise ConfigError(
            f"The dilation of a lambda layer is {dilation}; it must be 1 for a global map, which "
            "has every offset already."
        )
    if own != wanted:
        raise ConfigError(
            f"The shared position embedding has the query_depth, intra_depth and heads {own}, but "
            f"this lambda layer needs {wanted}; share only between layers where they are equal."
        )


def check_map(size: Sequence[int], map_size: Sequence[int]) -> None:
    """Raise ConfigError where a map is larger than a global embedding was made for."""
    if any(side > most for side, most in zip(size, map_size, strict=True)):
        raise ConfigError(
            f"A global position embedding for maps of up to {by(map_size)} positions got a map of "
            f"{by(size)}; make it with a larger map_size, or use a local scope, which takes maps "
            "of any size."
        )


def check_mask(mask: Tensor, shape: Sequence[int]) -> None:
    """Raise ConfigError where a mask is not of bool, or does not fit an input of this shape.

    Numbers such as 255 would multiply the values. Another mask with as many positions, such as a
    transposed one, would be used without an error.
    """
    if mask.dtype != torch.bool:
        raise ConfigError(
            f"The mask of a lambda layer is of {mask.dtype}; it must be of torch.bool, such as "
            "mask > 0."
        )
    # A comparison of sizes would bind a graph to the sizes that it is made with.
    if is_recorded():
        return
    batch, _, *size = shape
    positions = math.prod(size)
    shapes = [[batch, 1, *size], [1, 1, *size], [positions, positions]]
    if list(mask.shape) not in shapes:
        raise ConfigError(
            f"The mask of a lambda layer has the shape {list(mask.shape)}, but for this input must "
            f"have one of {', '.join(map(str, shapes))}."
        )
