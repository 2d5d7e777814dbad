"""Results laid out in memory as the inputs are, so that nothing after them has to lay out anew.

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
