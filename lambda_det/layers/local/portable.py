"""The query-first position output in standard operators, as one graph for maps of every size.

The tiles and windows are those of :mod:`lambda_det.layers.local.query_first`. Their sizes do not
depend on the map, only their number does, and offsets that lead out of the map meet values of 0.
All windows are in memory at once, since a graph has no loop over chunks whose number it learns when
it runs: for a scope of 23x23 that is 3600 scores per position with 4 heads, 59 MB on a 64x64 map.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers.exporting import first_of, plain
from lambda_det.layers.saturation import saturate

TILE = 8  # queries along each side of a tile


def portable_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """See :func:`lambda_det.layers.local.local_position_output`; the embedding may be uncropped."""
    height, width, heads = queries.shape[1:4]
    scope_y, scope_x = embedding.shape[-2:]
    tiles = F.pad(queries, (0, 0, 0, 0, 0, TILE - 1, 0, TILE - 1))
    tiles = tiles.unfold(1, TILE, TILE).unfold(2, TILE, TILE)  # [b, rows, columns, h, k, y, x]
    grid = tiles.shape[:3]
    tiles = plain(tiles.permute(0, 1, 2, 3, 6, 5, 4)).flatten(3, 5).flatten(0, 2)
    scores = _scores_in_windows(tiles, embedding)

    edges = (scope_x // 2, scope_x // 2 + TILE - 1, scope_y // 2, scope_y // 2 + TILE - 1)
    windows = F.pad(values.permute(0, 3, 4, 1, 2), edges)  # [b, v, u, H', W']
    windows = windows.unfold(3, scope_y + TILE - 1, TILE).unfold(4, scope_x + TILE - 1, TILE)
    windows = plain(windows.permute(0, 3, 4, 2, 5, 6, 1))  # [b, rows, columns, u, wy, wx, v]

    output = saturate(torch.bmm(scores, windows.flatten(3, 5).flatten(0, 2)))
    # [tiles, (h, x, y), v]
    output = output.reshape(*grid, heads, TILE, TILE, values.shape[3]).permute(0, 1, 5, 2, 4, 3, 6)
    output = output.flatten(3, 4).flatten(1, 2)  # [b, rows * TILE, columns * TILE, h, v]
    return first_of(output, height, width)


def _scores_in_windows(tiles: Tensor, embedding: Tensor) -> Tensor:
    """Scores of [tiles, (h, x, y), k], each query's in its own place in its tile's window.

    A query's place lies ``y`` rows and ``x`` numbers after that of the tile's first query. Rows of
    scores with so many zeros between them come to lie there when they are cut anew.

    Returns:
        [tiles, (h, x, y), (u, window)].
    """
    scope_y, scope_x = embedding.shape[-2:]
    window_x = scope_x + TILE - 1
    window = (scope_y + TILE - 1) * window_x
    spaced = F.pad(embedding, (0, TILE - 1, 0, TILE)).flatten(2)  # [k, u, window + window_x]
    outputs = []
    for matrix in spaced.unbind(1):
        scores = saturate(F.linear(tiles, matrix.T)).unflatten(1, (-1, TILE, TILE))
        scores = scores.flatten(3)[..., : TILE * window + 1]  # [tiles, h, x, (y, window) and a 0]
        scores = scores.flatten(2)[..., : TILE * TILE * window]
        outputs.append(scores.reshape(tiles.shape[0], tiles.shape[1], window))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
