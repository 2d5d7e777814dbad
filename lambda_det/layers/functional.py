"""The lambda layer's mathematics on plain tensors, in the paper's letters.

b: batch, n: query positions, m: context positions, h: heads, k: query and key depth, v: value
depth, u: intra-depth. Shapes are written [b, n, h, k]. Everything here follows Figures 3, 6 and 8
of "LambdaNetworks: Modeling Long-Range Interactions Without Attention" (Bello, ICLR 2021).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from lambda_det.layers.exporting import is_exporting, plain
from lambda_det.layers.saturation import saturate, saturated

KeyNorm = Literal["softmax", "l2", "none"]
KEY_NORMS: tuple[str, ...] = ("softmax", "l2", "none")


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast leaves the dtypes on the device of ``x`` alone."""
    # On meta there is no autocast, not even to switch off; other runtimes have none either
    if x.is_meta or is_exporting():
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def normalize_keys(keys: Tensor, kind: KeyNorm = "softmax", valid: Tensor | None = None) -> Tensor:
    """Normalise the keys over the context positions (Table 12), in float32 at least.

    In float16 the mean softmax weight over a 256x336 map is subnormal, hence the float32.

    Args:
        keys: [b, m, k, u].
        kind: "softmax" (the paper's choice), "l2", or "none".
        valid: bool [b, m]; positions that are False get the weight 0.

    Returns:
        [b, m, k, u] in float32, or in float64 if the keys are.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if valid is not None:
        # The lowest finite number rather than -inf: an image without a valid position must not be
        # NaN.
        fill = torch.finfo(keys.dtype).min if kind == "softmax" else 0.0
        keys = keys.masked_fill(~valid[:, :, None, None], fill)
    if kind == "softmax":
        return keys.softmax(dim=1)
    if kind == "l2":
        return torch.nn.functional.normalize(keys, dim=1)
    return keys


def content_lambda(normalized_keys: Tensor, values: Tensor) -> Tensor:
    """Sum the context into the one linear function that all queries share (Equation 1).

    Args:
        normalized_keys: [b, m, k, u].
        values: [b, m, v, u].

    Returns:
        [b, k, v] in the dtype of the keys.
    """
    values = values.to(normalized_keys.dtype)
    if is_exporting():  # einsum treats a map of one position in a way of its own
        keys = plain(normalized_keys.permute(0, 2, 1, 3)).flatten(2)  # [b, k, (m, u)]
        return torch.bmm(keys, plain(values.permute(0, 1, 3, 2)).flatten(1, 2))
    # In this order the gradient of values that are a map per channel comes out as such
    return torch.einsum("bmvu,bmku->bvk", values, normalized_keys).mT


def apply_lambda(queries: Tensor, lambdas: Tensor) -> Tensor:
    """Apply lambdas [b, k, v] to queries [b, n, h, k]; returns [b, n, h, v] (Equation 2).

    The output is laid out as the queries are, channels last or a map per channel, without a copy.
    """
    lambdas = saturated(lambdas, queries.dtype)
    if is_exporting():
        outputs = torch.bmm(queries.flatten(1, 2), lambdas)
        return saturate(outputs).unflatten(1, (-1, queries.shape[2]))
    if queries.stride(-1) == 1:
        return saturate(torch.einsum("bnhk,bkv->bnhv", queries, lambdas))
    maps = torch.matmul(lambdas.mT[:, None], queries.permute(0, 2, 3, 1))  # [b, h, v, n]
    return saturate(maps).permute(0, 3, 1, 2)


def masked_content_output(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: KeyNorm = "softmax"
) -> Tensor:
    """Content output where each query has its own context (Appendix B.2, Figure 6).

    Keys are normalised over the positions of each query's own context. One (key, intra-depth) pair
    is held as a [b, n, m] map at a time; the paper's form would hold [b, m, k, v].

    Args:
        queries: [b, n, h, k].
        keys: [b, m, k, u], not normalised.
        values: [b, m, v, u].
        mask: bool [n, m], True where query n may look at position m. A query that may look at
            nothing gets a content output of 0.

    Returns:
        [b, n, h, v].
    """
    output = torch.zeros(
        (*queries.shape[:3], values.shape[2]), dtype=queries.dtype, device=queries.device
    )
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    for u in range(keys.shape[3]):
        for k in range(keys.shape[2]):
            weights = keys[:, None, :, k, u].expand(-1, mask.shape[0], -1)  # [b, n, m]
            if kind == "softmax":
                weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min).softmax(dim=2)
            weights = weights * mask
            if kind == "l2":
                weights = torch.nn.functional.normalize(weights, dim=2)
            lambdas = torch.einsum("bnm,bmv->bnv", weights, values[..., u].to(weights.dtype))
            product = queries[..., k, None] * saturated(lambdas[:, :, None], queries.dtype)
            output = saturate(output + saturate(product))
    return output


def position_output(queries: Tensor, values: Tensor, embeddings: Tensor) -> Tensor:
    """Position output from one embedding per pair of positions: the einsum form of Figure 5.

    Args:
        queries: [b, n, h, k].
        values: [b, m, v, u].
        embeddings: [n, m, k, u].

    Returns:
        [b, n, h, v].
    """
    lambdas = saturate(torch.einsum("nmku,bmvu->bnkv", embeddings, values))
    return saturate(torch.einsum("bnhk,bnkv->bnhv", queries, lambdas))
