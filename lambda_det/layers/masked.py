"""Lambdas of a part of the context: without padding, or with a separate context for each query.

The latter is the form of Appendix C.2 and Figure 6. Each query then has its own content lambda, so
sums are over pairs of positions, and the position output is ``dense_output``, whatever the layer's
implementation is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def hide_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Values [b, .., v, u] of 0 where a padding mask [b, 1, ..] is False."""
    return values * mask[:, 0, ..., None, None].to(values.dtype)


def content_output(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    normalize: Callable[[Tensor, int, Tensor], Tensor],
) -> Tensor:
    """The content output where each query has its own context.

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
            weights = normalize(weights, 2, mask)
            lambdas = torch.einsum("bnm,bmv->bnv", weights, values[..., u].to(weights.dtype))
            output = output + queries[..., k, None] * lambdas[:, :, None].to(queries.dtype)
    return output


def spread(embedding: Tensor, dilation: int) -> Tensor:
    """Expand the scope of [k, u, r_y, r_x] by zeros between its offsets, to d (r - 1) + 1."""
    if dilation == 1:
        return embedding
    k, u, *sides = embedding.shape
    wide = embedding.new_zeros(k, u, *(dilation * (side - 1) + 1 for side in sides))
    every = slice(None, None, dilation)
    wide[(..., *[every] * len(sides))] = embedding
    return wide
