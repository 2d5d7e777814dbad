"""The paper's own forms, which build every position's lambda and then apply it (Figures 3 and 5).

See :func:`lambda_det.layers.local.local_position_output` for arguments and result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dense_embedding(embedding: Tensor, size: tuple[int, int]) -> Tensor:
    """Lay out one embedding per pair of positions, zero outside the scope (Section 3.4).

    Args:
        embedding: [k, u, r_y, r_x].
        size: (H, W) of the map.

    Returns:
        [n, m, k, u], n of the queries and m of the values, rows first.
    """
    pads, offsets = [], []
    for side, scope in zip(size, embedding.shape[2:], strict=True):
        missing = max(side - 1 - scope // 2, 0)  # offsets beyond the scope, on each side
        pads = [missing, missing, *pads]  # F.pad takes the last dimension first
        # It is made on the device, because the host would wait for a copy.
        place = torch.arange(side, device=embedding.device)
        offsets.append(place - place[:, None] + scope // 2 + missing)  # [of a query, of a value]
    rows, columns = offsets
    pairs = F.pad(embedding, pads)[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    return pairs.flatten(4).flatten(2, 3).permute(2, 3, 0, 1)  # from [k, u, y, x, Y, X]


def dense_output(
    queries: Tensor, values: Tensor, embedding: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The einsum with an embedding for every pair of positions, 0 outside the scope (Figure 5).

    With a mask, bool [n, m], each query n has the context of its own that is True.
    """
    size = queries.shape[1:-2]
    pairs = dense_embedding(embedding, size).to(queries.dtype)  # [n, m, k, u]
    if mask is not None:
        pairs = pairs * mask[:, :, None, None]
    lambdas = torch.einsum("nmku,bmvu->bnkv", pairs, values.flatten(1, -3))
    return torch.einsum("bnhk,bnkv->bnhv", queries.flatten(1, -3), lambdas).unflatten(1, size)


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
