"""The paper's own forms, which build every position's lambda and then apply it (Figures 3 and 5).

See :func:`lambda_det.layers.local.local_position_output` for arguments and result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def position_output(queries: Tensor, values: Tensor, embeddings: Tensor) -> Tensor:
    """Position output from one embedding per pair of positions: the einsum form of Figure 5.

    Args:
        queries: [b, n, h, k].
        values: [b, m, v, u].
        embeddings: [n, m, k, u], or [b, n, m, k, u] for relations that differ between examples.

    Returns:
        [b, n, h, v].
    """
    pairs = "bnmku" if embeddings.dim() == 5 else "nmku"
    lambdas = torch.einsum(f"{pairs},bmvu->bnkv", embeddings, values)
    return torch.einsum("bnhk,bnkv->bnhv", queries, lambdas)


def dense_embedding(
    embedding: Tensor, size: Sequence[int], context: Sequence[int] | None = None, stride: int = 1
) -> Tensor:
    """Lay out one embedding per pair of positions, zero outside the scope (Section 3.4).

    Args:
        embedding: [k, u, r_y, r_x]; of volumes [k, u, r_z, r_y, r_x].
        size: of the map of queries.
        context: of the map of values, as ``size`` if None.
        stride: a query's place on the map of values is its own times this.

    Returns:
        [n, m, k, u], rows first.
    """
    context = size if context is None else context
    dims, pads, offsets = len(size), [], []
    for dim, (queries, values) in enumerate(zip(size, context, strict=True)):
        reach = embedding.shape[2 + dim] // 2
        before = max(stride * (queries - 1) - reach, 0)
        pads = [before, max(values - 1 - reach, 0), *pads]  # F.pad takes the last dimension first
        # Made where they are used: a copy from the host would be waited for
        to, of = (torch.arange(n, device=embedding.device) for n in (values, queries))
        offset = to - stride * of[:, None] + reach + before
        shape = [1] * 2 * dims  # of all queries' and then all values' sides
        shape[dim], shape[dims + dim] = queries, values
        offsets.append(offset.view(shape))
    pairs = F.pad(embedding, pads)[(slice(None), slice(None), *offsets)]
    return pairs.flatten(2 + dims).flatten(2, 1 + dims).permute(2, 3, 0, 1)


def dense_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """The einsum with an embedding for every pair of positions, 0 outside the scope."""
    size = queries.shape[1:3]
    dense = dense_embedding(embedding, size)  # [n, m, k, u]
    return position_output(queries.flatten(1, 2), values.flatten(1, 2), dense).unflatten(1, size)


def conv_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """The (n+1)-d convolution, in which the value depth is one more spatial dimension."""
    lambdas = F.conv3d(
        values.permute(0, 4, 3, 1, 2),  # [b, u, v, H, W]
        embedding[:, :, None],  # [k, u, 1, r_y, r_x]
        padding=(0, embedding.shape[-2] // 2, embedding.shape[-1] // 2),
    )
    return torch.einsum("byxhk,bkvyx->byxhv", queries, lambdas)


def depthwise_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """The n-d depthwise convolution with k outputs per value channel."""
    value_depth = values.shape[3]
    lambdas = F.conv2d(
        values.flatten(3).permute(0, 3, 1, 2),  # [b, (v, u), H, W]
        embedding.repeat(value_depth, 1, 1, 1),  # [(v, k), u, r_y, r_x]
        padding=(embedding.shape[-2] // 2, embedding.shape[-1] // 2),
        groups=value_depth,
    )
    lambdas = lambdas.unflatten(1, (value_depth, -1))
    return torch.einsum("byxhk,bvkyx->byxhv", queries, lambdas)
