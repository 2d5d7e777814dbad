"""The position output with the query contracted first, so that no lambda is ever built.

The definition sums over the scope first, which gives k * v numbers at every position. Here the sum
over k comes first:

    a[n, h, r] = sum_k q[n, h, k] E[k, r]        the score of every offset, for every query
    y[n, h, v] = sum_r a[n, h, r] V[n + r, v]

This takes h r (k + v) multiply-adds per position instead of r k v + h k v. The backward pass needs
only q, V and E. The map is cut into tiles of queries. All queries of a tile see one window of
values, so a tile is two matrix products: the scores, which a strided view puts into their places in
the window, and the scores times the window. One chunk of tiles is in memory at a time, small enough
to stay in the cache.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries per tile, measured on the CPU for scopes from 7x7 to 23x23.
TILE_HEIGHT, TILE_WIDTH = 8, 8
# Numbers of the scores-in-their-window buffer of one chunk on the CPU: 4 MB in float32, which stay
# in the cache.
CHUNK_NUMEL = 2**20
# Elsewhere every chunk costs some twenty kernel launches, so chunks are large: bytes of that buffer
# (the backward pass takes three times as much), by the GPU's memory. Chosen without measurement.
CHUNK_SHARE = 1 / 32
CHUNK_BYTES = 2**27  # where the memory is not known


class Tiling(NamedTuple):
    """How a map of queries is cut into tiles, and how large the window of values of a tile is."""

    rows: int  # of tiles
    columns: int
    height: int  # of a tile, in queries
    width: int
    window_height: int
    window_width: int

    @classmethod
    def of(cls, height: int, width: int, scope_y: int, scope_x: int) -> Tiling:
        y, x = min(TILE_HEIGHT, height), min(TILE_WIDTH, width)
        tiles = math.ceil(height / y), math.ceil(width / x)
        return cls(*tiles, y, x, y + scope_y - 1, x + scope_x - 1)


Chunk = tuple[slice, slice, slice]  # of images, tile rows, tile columns


def chunk_numel(device: torch.device, dtype: torch.dtype) -> int:
    """Numbers of the buffer of one chunk."""
    if device.type == "cpu":
        return CHUNK_NUMEL
    index = device.index if device.type == "cuda" and torch.cuda.is_available() else None
    return (CHUNK_BYTES if index is None else _chunk_bytes(index)) // dtype.itemsize


@functools.cache
def _chunk_bytes(gpu: int) -> int:
    """A share of what is free on a GPU when this is first asked, as a power of two."""
    # Sums follow the order of the chunks, so equal sizes give equal bits: in all steps of a run,
    # and because of the power of two mostly in all runs on such a GPU.
    free, _ = torch.cuda.mem_get_info(gpu)
    free += torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    return 1 << max(int(free * CHUNK_SHARE), 1).bit_length() - 1


def _chunks(batch: int, tiling: Tiling, tiles: int) -> list[Chunk]:
    """Cut the [batch, rows, columns] grid of tiles into boxes of at most ``tiles`` tiles."""
    columns = min(tiling.columns, max(tiles, 1))
    rows = min(tiling.rows, max(tiles // tiling.columns, 1))
    images = max(min(batch, tiles // (tiling.columns * tiling.rows)), 1)
    sides = (batch, images), (tiling.rows, rows), (tiling.columns, columns)
    return list(itertools.product(*(_spans(length, step) for length, step in sides)))


def _spans(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _matrices(x: Tensor, chunk: Chunk) -> Tensor:
    """The tiles of a chunk as [t, (y, x, h), c], or their windows as [t, (u, window), v]."""
    return x[chunk].flatten(0, 2).flatten(1, 3)


def _tiles(x: Tensor, tiling: Tiling) -> Tensor:
    """View or copy [b, H, W, h, c] as tiles [b, rows, columns, tile height, tile width, h, c]."""
    pad_y = tiling.rows * tiling.height - x.shape[1]
    pad_x = tiling.columns * tiling.width - x.shape[2]
    if pad_y or pad_x:
        x = F.pad(x, (0, 0, 0, 0, 0, pad_x, 0, pad_y))
    x = x.unflatten(2, (tiling.columns, tiling.width)).unflatten(1, (tiling.rows, tiling.height))
    return x.transpose(2, 3)


def _untile(tiles: Tensor, target: Tensor) -> None:
    """The inverse of :func:`_tiles`: fill ``target`` [b, H, W, h, c]."""
    x = tiles.transpose(2, 3).flatten(1, 2).flatten(2, 3)
    target.copy_(x[:, : target.shape[1], : target.shape[2]])


def _windows(padded: Tensor, tiling: Tiling) -> Tensor:
    """View padded values [b, u, H', W', v] as windows [b, rows, columns, u, wy, wx, v]."""
    (batch, intra, _, _, depth), (b, u, y, x, v) = padded.shape, padded.stride()
    tiles, window = tiling[:2], tiling[4:]
    strides = (b, y * tiling.height, x * tiling.width, u, y, x, v)
    return padded.as_strided((batch, *tiles, intra, *window, depth), strides)


# The r_y x r_x scores of a query lie at its own place in the window. All other numbers are 0 and
# stay 0, because every chunk writes to the same places.
class _Scores:
    """The buffer of a chunk's scores, [tiles, tile y, tile x, h, u, window y, window x]."""

    def __init__(self, tiles: int, heads: int, tiling: Tiling, embedding: Tensor) -> None:
        _, intra, scope_y, scope_x = embedding.shape
        queries = (tiling.height, tiling.width, heads)
        window = (tiling.window_height, tiling.window_width)
        buffer = embedding.new_zeros((tiles, *queries, intra, *window))
        tile, y, x, h, u, row, column = buffer.stride()
        self.embedding = embedding.flatten(1)  # [k, (u, r)]
        self.matrix = buffer.view(tiles, math.prod(queries), intra * math.prod(window))
        # One step to the next query is also one step in the window.
        self._stride = (tile, y + row, x + column, h, u, row, column)
        self._shape = (*queries, intra, scope_y, scope_x)
        self._scores = buffer.as_strided((tiles, *self._shape), self._stride)

    def fill(self, queries: Tensor) -> Tensor:
        """Write the scores of [tiles, (y, x, h), k]; return [tiles, (y, x, h), (u, window)]."""
        tiles = queries.shape[0]
        scores = queries.flatten(0, 1) @ self.embedding
        self._scores[:tiles].copy_(scores.view(tiles, *self._shape))
        return self.matrix[:tiles]

    def take(self, matrix: Tensor) -> Tensor:
        """Read the scores' places from [tiles, (y, x, h), (u, window)]; return [.., (u, r)]."""
        scores = matrix.as_strided((matrix.shape[0], *self._shape), self._stride)
        return scores.reshape(-1, self.embedding.shape[1])


def _prepare(queries: Tensor, values: Tensor, embedding: Tensor):
    """Tiling, query tiles, padded values, chunks and scores, for forward and backward alike."""
    batch, height, width, heads, _ = queries.shape
    scope_y, scope_x = embedding.shape[-2:]
    tiling = Tiling.of(height, width, scope_y, scope_x)
    left, top = scope_x // 2, scope_y // 2
    right = tiling.columns * tiling.width - width + left
    bottom = tiling.rows * tiling.height - height + top
    planes = values.permute(0, 4, 1, 2, 3)  # [b, u, H, W, v]
    padded = F.pad(planes, (0, 0, left, right, top, bottom)).contiguous()
    per_tile = heads * embedding.shape[1] * math.prod(tiling[2:])
    limit = chunk_numel(queries.device, queries.dtype) // per_tile
    chunks = _chunks(batch, tiling, limit)
    sizes = [math.prod(span.stop - span.start for span in chunk) for chunk in chunks]
    scores = _Scores(max(sizes, default=0), heads, tiling, embedding)
    return tiling, _tiles(queries, tiling), padded, chunks, scores


def fill_output(output: Tensor, queries: Tensor, values: Tensor, embedding: Tensor) -> None:
    """Compute the output [b, H, W, h, v], see :func:`lambda_det.layers.local_position_output`."""
    tiling, query_tiles, padded, chunks, scores = _prepare(queries, values, embedding)
    windows = _windows(padded, tiling)
    results = queries.new_empty((*query_tiles.shape[:-1], values.shape[3]))
    for chunk in chunks:
        result = scores.fill(_matrices(query_tiles, chunk)) @ _matrices(windows, chunk)
        results[chunk] = result.view_as(results[chunk])
    _untile(results, output)


def fill_gradients(
    grad_queries: Tensor,
    grad_values: Tensor,
    grad_embedding: Tensor,
    grad: Tensor,
    queries: Tensor,
    values: Tensor,
    embedding: Tensor,
) -> None:
    """Compute the three gradients for the gradient [b, H, W, h, v] of the output."""
    tiling, query_tiles, padded, chunks, scores = _prepare(queries, values, embedding)
    windows = _windows(padded, tiling)
    grad_tiles = _tiles(grad, tiling)
    # Sums over many tiles are kept in float32 at least.
    wide = torch.promote_types(queries.dtype, torch.float32)
    of_padded = torch.zeros_like(padded, dtype=wide)
    of_windows = _windows(of_padded, tiling)
    of_queries = queries.new_empty(query_tiles.shape)
    of_embedding = torch.zeros_like(scores.embedding, dtype=wide)
    apart_y = math.ceil(tiling.window_height / tiling.height)
    apart_x = math.ceil(tiling.window_width / tiling.width)
    for chunk in chunks:
        tiles, grad_tile = _matrices(query_tiles, chunk), _matrices(grad_tiles, chunk)
        of_window = scores.fill(tiles).transpose(1, 2) @ grad_tile
        targets = of_windows[chunk]
        of_window = of_window.view(targets.shape)
        # Windows that overlap cannot be added to at once; windows of distant tiles do not overlap
        rows, columns = targets.shape[1:3]
        for row, column in itertools.product(
            range(min(apart_y, rows)), range(min(apart_x, columns))
        ):
            some = (slice(None), slice(row, None, apart_y), slice(column, None, apart_x))
            targets[some].add_(of_window[some])
        window = _matrices(windows, chunk)
        of_scores = scores.take(grad_tile @ window.transpose(1, 2))  # [(t, y, x, h), (u, r)]
        of_queries[chunk] = (of_scores @ scores.embedding.t()).view_as(of_queries[chunk])
        # Tile by tile, because a GPU might sum one product over all queries in 16 bits.
        products = tiles.transpose(1, 2) @ of_scores.unflatten(0, tiles.shape[:2])
        of_embedding += products.sum(0, dtype=wide)
    height, width = queries.shape[1:3]
    top, left = embedding.shape[-2] // 2, embedding.shape[-1] // 2
    of_values = of_padded[:, :, top : top + height, left : left + width]  # [b, u, H, W, v]
    _untile(of_queries, grad_queries)
    grad_values.copy_(of_values.permute(0, 2, 3, 4, 1))
    grad_embedding.copy_(of_embedding.view(embedding.shape))
