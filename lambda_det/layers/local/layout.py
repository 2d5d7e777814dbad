"""What the operators share: results laid out in memory as the inputs are, and what is kept.

Nothing that follows has then to be laid out anew.

A layer's input is channels_last or a map per channel, and so are the queries and values that
projections and norms make of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_like_queries(queries: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [b, H, W, h, c] laid out as the queries are, channels last or a map per channel."""
    batch, height, width, heads, _ = queries.shape
    if queries.stride(-1) == 1:
        return queries.new_empty((batch, height, width, heads, channels), dtype=dtype)
    maps = queries.new_empty((batch, heads, channels, height, width), dtype=dtype)
    return maps.permute(0, 3, 4, 1, 2)


def empty_like_values(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [b, H, W, v, u], laid out as the values are."""
    batch, height, width, v, u = values.shape
    if values.stride(-2) == u:
        return values.new_empty(values.shape, dtype=dtype)
    return values.new_empty((batch, v, u, height, width), dtype=dtype).permute(0, 3, 4, 1, 2)


def output_like(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """An empty output [b, H, W, h, v]: what torch.compile has to know of an operator."""
    return empty_like_queries(queries, values.shape[3])


def gradients_like(
    grad: Tensor, queries: Tensor, values: Tensor, embedding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of queries, values and embedding."""
    return (
        empty_like_queries(queries, queries.shape[-1]),
        empty_like_values(values),
        torch.empty_like(embedding, memory_format=torch.contiguous_format),
    )


def save_inputs(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Keep queries, values and embedding for the backward pass, and nothing else."""
    ctx.save_for_backward(*inputs)
