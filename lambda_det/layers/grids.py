"""Position outputs on other grids than one map: strides, other contexts, volumes, given relations.

Shapes are written for maps, queries [b, H, W, h, k] and values [b, H', W', v, u]. The positions of
a sequence are a map of one row, and those of a volume D, H, W. All but given relations become the
sum of :func:`lambda_det.layers.local.local_position_output` on one map. Phases of a stride and
slices of a volume become intra-depth. So every implementation that takes an intra-depth above 1
computes them, forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers.functional import position_output, spread, without_autocast
from lambda_det.layers.local import local_position_output

__all__ = [
    "as_map",
    "cut_heads",
    "depth_softmax",
    "given_position_output",
    "grid_position_output",
    "hide_padding",
    "join_heads",
    "split",
    "strided",
]


def as_map(x: Tensor) -> Tensor:
    """[B, C, N] or [B, C, D, H, W] as a map, of one row or of D H rows."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(2, -2)


def split(x: Tensor, depth: int, size: Sequence[int]) -> Tensor:
    """View [b, (c, depth), H, W] as [b, H, W, c, depth], dense where it is channels_last.

    The map of a volume of ``size`` (D, H, W) gives [b, D, H, W, c, depth].
    """
    x = x.permute(0, 2, 3, 1).unflatten(-1, (x.shape[1] // depth, depth))
    return x.unflatten(1, size[:2]) if len(size) == 3 else x


# PyTorch's softmax and cat lay their results out by shape. In these three, results and gradients
# stay as the parts of a projection are: dense, or a map per channel.


def depth_softmax(queries: Tensor) -> Tensor:
    """The softmax of queries [b, H, W, h, k] over their depth."""
    if queries.stride(-1) == 1:
        return queries.softmax(dim=-1)
    return _as_last(_as_first(queries).softmax(dim=2))


def cut_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[b, H, W, (heads, c), depth] as a [b, H, W, c, depth] of each head."""
    if x.stride(-1) == 1:
        return x.chunk(heads, dim=-2)
    return tuple(map(_as_last, _as_first(x).chunk(heads, dim=1)))


def join_heads(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of :func:`cut_heads`."""
    if parts[0].stride(-1) == 1:
        return torch.cat(parts, dim=-2)
    return _as_last(torch.cat([_as_first(part) for part in parts], dim=1))


def _as_first(x: Tensor) -> Tensor:
    """View [b, H, W, c, depth] as [b, c, depth, H, W]."""
    return x.movedim((-2, -1), (1, 2))


def _as_last(x: Tensor) -> Tensor:
    return x.movedim((1, 2), (-2, -1))


def strided(x: Tensor, stride: int) -> Tensor:
    """Every ``stride``-th position of [B, C, ..] in each direction."""
    if stride == 1:
        return x
    # A convolution would copy the view, too, and of odd sides not see its layout
    return x[(..., *[slice(None, None, stride)] * (x.dim() - 2))].clone()


def hide_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values of 0 where a padding mask [b, 1, H', W'] is False; of a sequence [b, 1, N]."""
    if mask is None:
        return values
    return values * mask.reshape(-1, *values.shape[1:-2], 1, 1).to(values.dtype)


def given_position_output(
    queries: Tensor, values: Tensor, embeddings: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The position output [b, H, W, h, v] of embeddings [n, m, k, u], or one such for each image.

    n and m count the positions of queries and values, rows first. The mask is that of a
    :class:`lambda_det.layers.LambdaLayer`.
    """
    embeddings = embeddings.to(queries.dtype)
    if mask is not None and mask.dim() == 2:
        embeddings = embeddings * mask[:, :, None, None]
    else:
        values = hide_padding(values, mask)
    with without_autocast(queries):
        y = position_output(queries.flatten(1, -3), values.flatten(1, -3), embeddings)
    return y.unflatten(1, queries.shape[1:-2])


def grid_position_output(
    queries: Tensor,
    values: Tensor,
    embedding: Tensor,
    implementation: str = "auto",
    *,
    dilation: int = 1,
    stride: int = 1,
) -> Tensor:
    """The local position output of queries whose map is not that of the values, or of volumes.

    y[b, n, h, v] = sum over k, u and the offsets r of

        q[b, n, h, k] E[k, u, r] V[b, s n + d r, v, u]

    with values of 0 outside their map. Query and value maps may have different sizes; their first
    positions coincide.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H', W', v, u].
        embedding: [k, u, r_y, r_x], of volumes [k, u, r_z, r_y, r_x].
        implementation: see :func:`lambda_det.layers.local.local_position_output`.
        dilation: d, how many positions of the values' map neighbouring offsets are apart.
        stride: s, and neighbouring queries.

    Returns:
        [b, H, W, h, v].
    """
    size, context = queries.shape[1:-2], values.shape[1:-2]
    if len(size) == 2 and stride == 1 and size == context:
        return local_position_output(queries, values, embedding, implementation, dilation=dilation)
    embedding = spread(embedding, dilation, len(size))
    if stride > 1:
        # A sequence is a single row
        steps = [stride if max(sides) > 1 else 1 for sides in zip(size, context, strict=True)]
        values, embedding = _phases_as_depth(values, embedding, steps)
    # One map for both, with the values that a query reaches
    whole = [
        max(own, min(other, own + reach // 2))
        for own, other, reach in zip(size, values.shape[1:-2], embedding.shape[2:], strict=True)
    ]
    queries, values = _fit(queries, whole), _fit(values, whole)
    if len(size) == 3:
        values, embedding = _slices_as_depth(values, embedding)
        y = local_position_output(queries.flatten(0, 1), values, embedding, implementation)
        y = y.unflatten(0, (-1, whole[0]))
    else:
        y = local_position_output(queries, values, embedding, implementation)
    return _fit(y, size)


def _fit(x: Tensor, size: Sequence[int]) -> Tensor:
    """[b, H, W, ..] of another size, cut off or filled up with zeros at the end of each side."""
    missing = [new - old for new, old in zip(size, x.shape[1:-2], strict=True)]
    pads = itertools.chain.from_iterable((0, number) for number in reversed(missing))
    return F.pad(x, (0, 0, 0, 0, *pads)) if any(missing) else x


def _phases_as_depth(
    values: Tensor, embedding: Tensor, steps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Values and embedding on the queries' map: position s n + p is intra-depth p of position n.

    Args:
        values: [b, H', W', v, u].
        embedding: [k, u, r_y, r_x].
        steps: (s_y, s_x).

    Returns:
        [b, ceil(H' / s_y), ceil(W' / s_x), v, u s_y s_x], and [k, u s_y s_x, ..] with odd sides.
    """
    dims, pads = len(steps), []
    values = _fit(values, [s * -(-n // s) for n, s in zip(values.shape[1:-2], steps, strict=True)])
    for side, step in zip(embedding.shape[2:], steps, strict=True):
        reach, reached = side // 2, -(-(side // 2) // step)  # in positions, and in queries
        # From -step reached to step reached + step - 1: whole groups of phases
        pads = [step * reached - reach, step * reached + step - 1 - reach, *pads]
    embedding = F.pad(embedding, pads)
    for dim, step in reversed(list(enumerate(steps))):
        values = values.unflatten(1 + dim, (-1, step)).movedim(2 + dim, -1)
        embedding = embedding.unflatten(2 + dim, (-1, step)).movedim(3 + dim, -1)
    # Phases come last, the last direction's first
    embedding = embedding.movedim(tuple(range(-dims, 0)), tuple(range(2, 2 + dims)))
    return values.flatten(2 + dims), embedding.flatten(1, 1 + dims)


def _slices_as_depth(values: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """A volume as a batch of slices, each with its neighbours within the scope as intra-depth.

    Args:
        values: [b, D, H, W, v, u].
        embedding: [k, u, r_z, r_y, r_x].

    Returns:
        [b D, H, W, v, u r_z] and [k, u r_z, r_y, r_x]; the values are copied r_z times.
    """
    reach = embedding.shape[2] // 2
    padded = F.pad(values, (0, 0, 0, 0, 0, 0, 0, 0, reach, reach))
    around = padded.unfold(1, embedding.shape[2], 1)  # [b, D, H, W, v, u, r_z]
    return around.flatten(-2).flatten(0, 1), embedding.flatten(1, 2)
