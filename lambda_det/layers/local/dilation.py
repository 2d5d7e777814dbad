"""A dilated local scope: interleaved grids of positions that do not see each other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lambda_det.layers.exporting import first_of, is_exporting, plain

__all__ = ["dilated", "grid_size", "spread"]


def grid_size(height: int, width: int, dilation: int) -> tuple[int, int]:
    """Rows and columns of the largest grid of every ``dilation``-th position."""
    return -(-height // dilation), -(-width // dilation)


def dilated(
    position_output: Callable[[Tensor, Tensor], Tensor],
    queries: Tensor,
    values: Tensor,
    dilation: int,
) -> Tensor:
    """Apply a local position output whose offsets are ``dilation`` positions apart.

    A query meets only values of its own grid then, and on it neighbours. So the grids, filled up
    with zeros, which are what lies beyond a border, go through the undilated sum as images.

    Args:
        position_output: maps queries [b, H, W, h, k] and values [b, H, W, v, u] to [b, H, W, h, v].
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u].
        dilation: 1 or more.

    Returns:
        [b, H, W, h, v].
    """
    height, width = queries.shape[1:3]
    steps = dilation, dilation
    if not is_exporting():  # no more grids than rows or columns: the others would be empty
        steps = min(dilation, height), min(dilation, width)
    outputs = position_output(_grids(queries, steps), _grids(values, steps))
    outputs = outputs.unflatten(0, (-1, *steps)).permute(0, 3, 1, 4, 2, 5, 6)
    outputs = plain(outputs).flatten(3, 4).flatten(1, 2)  # of [b, H', d, W', d, ..]
    return first_of(outputs, height, width)


def _grids(x: Tensor, steps: tuple[int, int]) -> Tensor:
    """[b, H, W, ..] as [b d_y d_x, ceil(H / d_y), ceil(W / d_x), ..], padded with zeros."""
    (height, width), (step_y, step_x) = x.shape[1:3], steps
    padding = (0, 0, 0, 0, 0, -width % step_x, 0, -height % step_y)
    x = nn.functional.pad(x, padding)
    x = x.unflatten(2, (-1, step_x)).unflatten(1, (-1, step_y))  # [b, H', d_y, W', d_x, ..]
    return plain(x.permute(0, 2, 4, 1, 3, 5, 6)).flatten(0, 2)


def spread(embedding: Tensor, dilation: int) -> Tensor:
    """The same scope written out, with zeros at the offsets between: [.., d (r - 1) + 1, ..]."""
    *leading, size_y, size_x = embedding.shape
    wide = embedding.new_zeros(*leading, dilation * (size_y - 1) + 1, dilation * (size_x - 1) + 1)
    wide[..., ::dilation, ::dilation] = embedding
    return wide
