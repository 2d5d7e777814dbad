"""The output of both lambdas as one function of autograd, with few launches on a GPU.

There the operators of a layer take less time than the host needs to start them. Autograd's own
graph of the same sums has casts, transpositions and additions between them that this function
does not need: what computes the position output and its gradients adds the content lambda to the
position lambdas, and the two terms of the gradient of the values are added where they lie.

With q, k, V and E as in :mod:`lambda_det.layers.lambda_layer`, w the softmax of the keys over the
positions, P the position output, and n and m counting the positions of the map:

    c = w V                              the content lambda [k, v]
    y = P(q, V, E) + q c                 computed as one
    dc = q^T dy                          summed over queries and heads
    dq = dP/dq + dy c^T                  computed as one
    dV = dP/dV + w^T dc
    dk = w (dw - sum_m w dw)             with dw = dc V^T

All products have the inputs' dtype and sums in float32; in bfloat16 w is rounded once. In float16
most weights of a large map are subnormal, so there w, and its products with V, are float32. dk does
not depend on what dw has in common at all positions. So dw is made of the values' distances from a
mean of theirs, c of the first query depth: 16 bits would lose the differences beside values that
are all far from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lambda_det.layers.local import (
    as_taken,
    choose,
    crop_offsets,
    fused,
    query_first,
    unsupported,
    without_autocast,
)
from lambda_det.native import calls

# what can add a content lambda to the position lambdas
_MODULES = {"query_first": query_first, "fused": fused}


def implementation_of(
    name: str, queries: Tensor, keys: Tensor, values: Tensor, embedding: Tensor
) -> str | None:
    """The implementation of the position output that the function is to use; None if it cannot.

    Args:
        name: "auto" or the name of an implementation.
        queries: [b, H, W, h, k].
        keys: [b, H, W, k, u].
        values: [b, H, W, v, u].
        embedding: [k, u, r_y, r_x].
    """
    if not calls.is_eager_on_gpu(queries):
        return None
    dense = queries.stride(-1) == 1 and keys.shape[-1] == 1
    if not dense or len({queries.dtype, keys.dtype, values.dtype}) > 1 or queries.numel() == 0:
        return None
    embedding = crop_offsets(embedding, *queries.shape[1:3])
    if name == "auto":
        name = choose(queries, values, embedding)
    elif unsupported(name, queries, values, embedding):
        return None  # the position output refuses it with the reason
    if name == "fused" and type(queries) is not Tensor:
        return None  # they have no addresses; the operator knows such tensors
    return name if name in _MODULES else None


def joined_output(
    queries: Tensor, keys: Tensor, values: Tensor, embedding: Tensor, name: str
) -> Tensor:
    """The content output, with a softmax of the keys, plus the position output.

    Differentiable once. Inputs are dense in the channels, as in a map that is channels last, and so
    are gradients, except the gradient of the keys.

    Args:
        queries: [b, H, W, h, k].
        keys: [b, H, W, k, 1], of the queries' dtype.
        values: [b, H, W, v, 1], likewise.
        embedding: [k, 1, r_y, r_x] with odd r_y and r_x, used in the queries' dtype.
        name: "query_first" or "fused".

    Returns:
        [b, H, W, h, v].
    """
    embedding = crop_offsets(embedding, *queries.shape[1:3])
    with without_autocast(queries):
        return _JoinedOutput.apply(queries, keys, values, embedding, name)


class _JoinedOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, queries: Tensor, keys: Tensor, values: Tensor, embedding: Tensor, name: str
    ) -> Tensor:
        queries, values = queries.contiguous(), values.contiguous()
        # Over any dimension but the last PyTorch's softmax uses a fraction of a GPU
        weights = keys.flatten(1, 2).squeeze(-1).mT.contiguous()  # [b, k, m]
        wide = torch.float32 if weights.dtype == torch.float16 else weights.dtype
        weights = weights.softmax(-1, dtype=wide)
        v = values.flatten(1, 2).squeeze(-1)  # [b, m, v]
        content_lambda = (weights @ v.to(wide)).to(v.dtype)  # [b, k, v]
        ctx.name, ctx.embedding_dtype = name, embedding.dtype
        embedding = as_taken(name, embedding, queries.dtype)
        y = queries.new_empty((*queries.shape[:-1], v.shape[-1]))  # [b, H, W, h, v]
        _MODULES[name].fill_output(y, queries, values, embedding, content_lambda)
        ctx.save_for_backward(queries, values, embedding, weights, content_lambda)
        return y

    @staticmethod
    @calls.differentiable_once
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, values, embedding, weights, content_lambda = ctx.saved_tensors
        with without_autocast(grad):
            grad, wide = grad.contiguous(), weights.dtype
            of_queries, of_values = torch.empty_like(queries), torch.empty_like(values)
            of_embedding = embedding.new_empty(embedding.shape, dtype=ctx.embedding_dtype)
            _MODULES[ctx.name].fill_gradients(
                *(of_queries, of_values, of_embedding, grad),
                *(queries, values, embedding, content_lambda),
            )
            of_lambda = queries.flatten(1, 3).mT @ grad.flatten(1, 3)  # [b, k, v]
            v, of_lambda = values.flatten(1, 2).squeeze(-1).to(wide), of_lambda.to(wide)
            centred = v - content_lambda[:, :1]  # [b, m, v]
            of_weights = of_lambda @ centred.mT  # [b, k, m]
            of_keys = torch._softmax_backward_data(of_weights, weights, -1, wide)
            of_keys = of_keys.to(queries.dtype).mT.unflatten(1, queries.shape[1:3])  # [b, H, W, k]
            add_product(of_values.flatten(1, 2).squeeze(-1), weights.mT, of_lambda)
        return of_queries, of_keys[..., None], of_values, of_embedding, None


def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``target``, all [b, .., ..]; the product is of the factors' dtype."""
    if target.dtype == left.dtype:
        target.baddbmm_(left, right)
    else:
        target += left @ right
