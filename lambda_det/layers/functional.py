"""The lambda layer's mathematics on plain tensors, in the paper's letters.

b: batch, n: query positions, m: context positions, h: heads, k: query and key depth, v: value
depth, u: intra-depth, r: offsets of a scope. Shapes are written [b, n, h, k]. Everything here
follows Figures 3, 6 and 8 of "LambdaNetworks: Modeling Long-Range Interactions Without Attention"
(Bello, ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

KeyNorm = Literal["softmax", "l2", "none"]
KEY_NORMS: tuple[str, ...] = ("softmax", "l2", "none")


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast leaves the dtypes on the device of ``x`` alone."""
    # On meta there is no autocast, not even to switch off
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def normalize_keys(keys: Tensor, kind: KeyNorm = "softmax", valid: Tensor | None = None) -> Tensor:
    """Normalise the keys over the context positions (Table 11), in float32 at least.

    In float16 the mean softmax weight over a 256x336 map is subnormal.

    Args:
        keys: [b, m, k, u].
        kind: "softmax" (the paper's choice), "l2", or "none".
        valid: bool [b, m]; positions that are False get the weight 0.

    Returns:
        [b, m, k, u] in float32, or in float64 if the keys are.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if valid is not None:
        # The lowest finite number and not -inf: an image without a valid position must not be NaN
        fill = torch.finfo(keys.dtype).min if kind == "softmax" else 0.0
        keys = keys.masked_fill(~valid[:, :, None, None], fill)
    if kind == "softmax":
        return keys.softmax(dim=1)
    if kind == "l2":
        return F.normalize(keys, dim=1)
    return keys


def content_lambda(normalized_keys: Tensor, values: Tensor) -> Tensor:
    """Sum the context into the one linear function that all queries share (Equation 1).

    Args:
        normalized_keys: [b, m, k, u].
        values: [b, m, v, u].

    Returns:
        [b, k, v] in the dtype of the keys.
    """
    # In this order the gradient of values that are a map per channel comes out as such
    lambdas = torch.einsum("bmvu,bmku->bvk", values.to(normalized_keys.dtype), normalized_keys)
    return lambdas.mT


def apply_lambda(queries: Tensor, lambdas: Tensor) -> Tensor:
    """Apply lambdas [b, k, v] to queries [b, n, h, k]; returns [b, n, h, v] (Equation 2).

    The output is laid out as the queries are, channels last or a map per channel, without a copy.
    """
    lambdas = lambdas.to(queries.dtype)
    if queries.stride(-1) == 1:
        return torch.einsum("bnhk,bkv->bnhv", queries, lambdas)
    maps = torch.matmul(lambdas.mT[:, None], queries.permute(0, 2, 3, 1))  # [b, h, v, n]
    return maps.permute(0, 3, 1, 2)


def masked_content_output(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: KeyNorm = "softmax"
) -> Tensor:
    """Content output where each query has its own context (Appendix C.2, Figure 6).

    Keys are normalised over the positions of each query's own context. One (key, intra-depth) pair
    is held as a [b, n, m] map at a time; the paper's form would hold [b, m, k, v].

    Args:
        queries: [b, n, h, k].
        keys: [b, m, k, u], not normalised.
        values: [b, m, v, u].
        mask: bool [n, m], True where query n may look at position m. A query that may look at
            nothing gets a content output of 0.
        kind: as of :func:`normalize_keys`.

    Returns:
        [b, n, h, v].
    """
    output = queries.new_zeros((*queries.shape[:3], values.shape[2]))
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    for u in range(keys.shape[3]):
        for k in range(keys.shape[2]):
            weights = keys[:, None, :, k, u].expand(-1, mask.shape[0], -1)  # [b, n, m]
            if kind == "softmax":
                weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min).softmax(dim=2)
            weights = weights * mask
            if kind == "l2":
                weights = F.normalize(weights, dim=2)
            lambdas = torch.einsum("bnm,bmv->bnv", weights, values[..., u].to(weights.dtype))
            output = output + queries[..., k, None] * lambdas[:, :, None].to(queries.dtype)
    return output


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

    ``dims`` of the last dimensions are offsets.
    """
    if dilation == 1:
        return embedding
    leading, sides = embedding.shape[:-dims], embedding.shape[-dims:]
    wide = embedding.new_zeros(*leading, *(dilation * (side - 1) + 1 for side in sides))
    wide[(..., *[slice(None, None, dilation)] * dims)] = embedding
    return wide


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
