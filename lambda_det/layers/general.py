"""What plain maps do not need: sequences, volumes, strides, other contexts, given embeddings.

A context that is not the input is that of Section 3.1, contexts of each query are those of Appendix
C.2 and Figure 6, embeddings given with a call those of any relation (Sections 2.1 and 3.1).

Shapes are written for maps, queries [b, H, W, h, k] and values [b, H', W', v, u]. The positions of
a sequence are a map of one row, and those of a volume D, H, W. Phases of a stride and slices of a
volume become intra-depth: all but contexts of each query and given embeddings become the sum of
:func:`lambda_det.layers.local.local_position_output` on one map. So every implementation that takes
an intra-depth above 1 computes them, forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers import options
from lambda_det.layers.local import lambda_first, local_position_output
from lambda_det.layers.tensors import grid_size, hide_padding, spread, without_autocast

if TYPE_CHECKING:
    from lambda_det.layers.lambda_layer import LambdaLayer, RelativePosition


def forward(
    layer: LambdaLayer,
    x: Tensor,
    mask: Tensor | None,
    context: Tensor | None,
    embeddings: Tensor | None,
) -> Tensor:
    """See :meth:`LambdaLayer.forward`; [B, dim, N] to [B, dim_out, ceil(N / stride)] and so on."""
    source = x if context is None else context
    options.check_input(layer, x, source, mask, embeddings)
    position = layer.position
    if embeddings is not None:  # which say where queries and values are

        def position(queries: Tensor, values: Tensor, mask: Tensor | None, *_: object) -> Tensor:
            return pairs_position_output(queries, values, embeddings, mask)

    if layer.stride > 1:
        context = source
        # A convolution would copy the view, too, and of odd sides not see its layout
        x = x[(..., *[slice(None, None, layer.stride)] * (x.dim() - 2))].clone()
    parts = layer.project(_as_map(x), context if context is None else _as_map(context))
    if x.dim() == 5:
        depths = (x, source, source)
        parts = [y.unflatten(1, z.shape[2:4]) for y, z in zip(parts, depths, strict=True)]
    y = layer.apply_lambdas(parts, mask, position).flatten(-2)
    y = y.permute(0, -1, *range(1, y.dim() - 1))
    return y[:, :, 0] if x.dim() == 3 else y


def _as_map(x: Tensor) -> Tensor:
    """[B, C, N] or [B, C, D, H, W] as a map, of one row or of D H rows."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(2, -2)


def content_output(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    normalize: Callable[[Tensor, int, Tensor], Tensor],
) -> Tensor:
    """The content output where each query has its own context (Appendix C.2, Figure 6).

    Keys are normalised over the positions of each query's own context. One (key, intra-depth) pair
    is held as a [b, n, m] map at a time; the paper's form would hold [b, m, k, v].

    Args:
        queries: [b, n, h, k].
        keys: [b, m, k, u], not normalised.
        values: [b, m, v, u].
        mask: bool [n, m], True where query n may look at position m. A query that may look at
            nothing gets a content output of 0.
        normalize: a value of ``KEY_NORMS``.

    Returns:
        [b, n, h, v].
    """
    output = queries.new_zeros((*queries.shape[:3], values.shape[2]))
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    for u in range(keys.shape[3]):
        for k in range(keys.shape[2]):
            weights = keys[:, None, :, k, u].expand(-1, mask.shape[0], -1)  # [b, n, m]
            weights = normalize(weights, 2, mask) * mask
            lambdas = torch.einsum("bnm,bmv->bnv", weights, values[..., u].to(weights.dtype))
            output = output + queries[..., k, None] * lambdas[:, :, None].to(queries.dtype)
    return output


def position_output(
    position: RelativePosition,
    queries: Tensor,
    values: Tensor,
    mask: Tensor | None,
    head: int,
    dilation: int,
    implementation: str,
    stride: int,
) -> Tensor:
    """The position output of queries whose map is not that of the values, or of volumes.

    y[b, n, h, v] = sum over k, u and the offsets r of

        q[b, n, h, k] E[k, u, r] V[b, s n + r, v, u]

    with values of 0 outside their map. Query and value maps may have different sizes; their first
    positions coincide.

    Args:
        position: has E, [k, u, r_y, r_x], of volumes [k, u, r_z, r_y, r_x].
        queries: [b, H, W, h, k].
        values: [b, H', W', v, u].
        mask, head, dilation, implementation: see :meth:`RelativePosition.forward`.
        stride: s, how many positions of the values' map neighbouring queries are apart.

    Returns:
        [b, H, W, h, v].
    """
    size, context = queries.shape[1:-2], values.shape[1:-2]
    reached = [max(stride * (q - 1) + 1, v) for q, v in zip(size, context, strict=True)]
    embedding = position.offsets(*grid_size(reached, dilation), head=head)
    embedding = spread(embedding, dilation, len(size))
    if mask is not None and mask.dim() == 2:
        dense = lambda_first.dense_embedding(embedding, size, context, stride)
        return pairs_position_output(queries, values, dense, mask)
    if mask is not None:
        values = hide_padding(values, mask)
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
    if len(size) == 2:
        y = local_position_output(queries, values, embedding, implementation)
    else:
        values, embedding = _slices_as_depth(values, embedding)
        y = local_position_output(queries.flatten(0, 1), values, embedding, implementation)
        y = y.unflatten(0, (-1, whole[0]))
    return _fit(y, size)


def pairs_position_output(
    queries: Tensor, values: Tensor, embeddings: Tensor, mask: Tensor | None
) -> Tensor:
    """The position output [b, H, W, h, v] of embeddings [n, m, k, u], or one such for each image.

    n and m count the positions of queries and values, rows first. The mask is that of a
    :class:`lambda_det.layers.LambdaLayer`.
    """
    embeddings = embeddings.to(queries.dtype)
    if mask is not None and mask.dim() == 2:
        embeddings = embeddings * mask[:, :, None, None]
    elif mask is not None:
        values = hide_padding(values, mask)
    with without_autocast(queries):
        y = lambda_first.position_output(queries.flatten(1, -3), values.flatten(1, -3), embeddings)
    return y.unflatten(1, queries.shape[1:-2])


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
