"""Options of a lambda layer that cannot work are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

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
    if position is None:
        return
    expected = [layer.heads] * layer.multi_head + [layer.query_depth, layer.intra_depth]
    found = list(position.embedding.shape[:-2])
    if found != expected:
        raise ConfigError(
            f"The shared position embedding has the leading sizes {found}, but this lambda layer "
            f"needs {expected}; share only between layers of equal query_depth, intra_depth and "
            "heads."
        )
