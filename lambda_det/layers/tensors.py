"""How the tensors of a layer are laid out in memory, and cut to the offsets of a map.

PyTorch's softmax and cat lay their results out by shape. Here queries, values and outputs, and
their gradients, stay as the parts of a projection are, dense in the channels (channels last) or a
map per channel, so that no later operation copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lambda_det.native import is_transformed


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast leaves the dtypes on the device of ``x`` as they are."""
    # On meta there is no autocast, not even to switch off
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def split(x: Tensor, depth: int) -> Tensor:
    """View [b, (c, depth), H, W] as [b, H, W, c, depth]."""
    return x.permute(0, 2, 3, 1).unflatten(-1, (x.shape[1] // depth, depth))


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm of a part [b, c, H, W] of a projection.

    On a CPU PyTorch's batch norm takes three to six times as long for a view as for a dense tensor,
    and returns a map per channel, which slows down what follows.
    """
    # What a graph asks of a layout would bind its sizes; torch.func knows no memory formats
    eager = not (torch.compiler.is_compiling() or is_transformed())
    if eager and x.device.type == "cpu" and type(norm) is not nn.Identity:
        layout = torch.channels_last if x.stride(1) == 1 else torch.contiguous_format
        x = x.contiguous(memory_format=layout)
    return norm(x)


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


def hide_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Values [b, .., v, u] of 0 where a padding mask [b, 1, ..] is False."""
    return values * mask.reshape(-1, *values.shape[1:-2], 1, 1).to(values.dtype)


def grid_size(size: Sequence[int], dilation: int) -> tuple[int, ...]:
    """The size of the largest grid of every ``dilation``-th position of a map."""
    return tuple(-(-side // dilation) for side in size)


def crop_offsets(embedding: Tensor, *size: int) -> Tensor:
    """Cut [.., r_y, r_x] down to the offsets that occur on a map of this size."""
    for dim, side in zip(range(-len(size), 0), size, strict=True):
        cut = max(embedding.shape[dim] // 2 - max(side - 1, 0), 0)  # a map may have no columns
        if cut:
            embedding = embedding.narrow(dim, cut, embedding.shape[dim] - 2 * cut)
    return embedding


def spread(embedding: Tensor, dilation: int, dims: int = 2) -> Tensor:
    """Write a dilated scope out, with zeros between its offsets: [.., d (r - 1) + 1, ..].

    The last ``dims`` dimensions are offsets.
    """
    if dilation == 1:
        return embedding
    leading, sides = embedding.shape[:-dims], embedding.shape[-dims:]
    wide = embedding.new_zeros(*leading, *(dilation * (side - 1) + 1 for side in sides))
    wide[(..., *[slice(None, None, dilation)] * dims)] = embedding
    return wide
