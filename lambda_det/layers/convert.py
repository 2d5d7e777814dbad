"""Replace the lambda layers of other projects by ours, weights included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambda_det.layers.lambda_layer import LambdaLayer
from lambda_det.native.calls import put_in


@dataclass(kw_only=True)
class _Weights:
    """The weights and sizes of a foreign layer in our terms."""

    heads: int  # |h|
    query_depth: int  # |k|
    intra_depth: int  # |u|
    projection: Tensor  # [queries + keys + values, dim, 1, 1]; rows (h, k), (u, k) and (u, v)
    projection_bias: Tensor | None
    embedding: Tensor  # [k, u, r_y, r_x]
    position_bias: Tensor | None  # [k]
    is_global: bool = False  # the embedding spans a whole map instead of a local scope
    pool: nn.Module | None = None  # what follows the layer inside its module


def _timm(layer: nn.Module) -> _Weights:
    """``timm.layers.LambdaLayer``."""
    conv = layer.conv_lambda
    return _Weights(
        heads=layer.num_heads,
        query_depth=layer.dim_qk,
        intra_depth=1,
        projection=layer.qkv.weight,
        projection_bias=layer.qkv.bias,
        embedding=conv.weight.squeeze(4) if conv else layer.pos_emb.permute(2, 0, 1)[:, None],
        position_bias=conv.bias if conv else None,
        is_global=conv is None,
        pool=None if isinstance(layer.pool, nn.Identity) else layer.pool,
    )


def _lucidrains(layer: nn.Module) -> _Weights:
    """``lambda_networks.LambdaLayer`` of the package lambda-networks."""
    conv = layer.pos_conv if layer.local_contexts else None
    return _Weights(
        heads=layer.heads,
        query_depth=len(layer.to_q.weight) // layer.heads,
        intra_depth=layer.u,
        projection=torch.cat([layer.to_q.weight, layer.to_k.weight, layer.to_v.weight]),
        projection_bias=None,
        embedding=conv.weight.squeeze(2) if conv else layer.rel_pos_emb.permute(2, 3, 0, 1),
        position_bias=conv.bias if conv else None,
        is_global=conv is None,
    )


def _d_li14(layer: nn.Module) -> _Weights:
    """``lambda_layer.LambdaLayer`` of d-li14/lambda.pytorch, and its copies."""
    return _Weights(
        heads=layer.Nh,
        query_depth=layer.dk,
        intra_depth=layer.du,
        projection=layer.conv_qkv.weight,
        projection_bias=layer.conv_qkv.bias,
        embedding=layer.lambda_conv.weight.squeeze(2),
        position_bias=layer.lambda_conv.bias,
        pool=layer.avgpool if layer.stride > 1 else None,
    )


# A layer is recognised by its attributes, because copies of the files have other names and places.
_READERS: tuple[tuple[tuple[str, ...], Callable[[nn.Module], _Weights]], ...] = (
    (("qkv", "norm_q", "norm_v", "conv_lambda", "pos_emb", "dim_qk", "num_heads", "pool"), _timm),
    (("to_q", "to_k", "to_v", "norm_q", "norm_v", "local_contexts", "u", "heads"), _lucidrains),
    (("conv_qkv", "lambda_conv", "norm_q", "norm_v", "Nh", "dk", "du", "stride"), _d_li14),
)


def convert_lambda_layers(model: nn.Module, *, implementation: str = "auto") -> nn.Module:
    """Replace the lambda layers of timm, lambda-networks and d-li14/lambda.pytorch by ours.

    The output stays the same, in training and in evaluation, up to rounding. Ours take maps of any
    size; layers with global embeddings take maps up to the size that they were made for.

    Args:
        model: changed in place.
        implementation: of the local position output, see :mod:`lambda_det.layers.local`.

    Returns:
        ``model``, or if it is such a layer itself, ours. Optimisers have to be created afterwards,
        because the parameters are new.
    """
    replaced = {  # layers that are used twice stay shared
        layer: _convert(layer, read(layer), implementation)
        for layer in model.modules()
        for names, read in _READERS
        if all(hasattr(layer, name) for name in names)
    }
    return put_in(model, replaced)


@torch.no_grad()
def _convert(source: nn.Module, weights: _Weights, implementation: str) -> nn.Module:
    depth, intra = weights.query_depth, weights.intra_depth
    query_rows, key_rows = weights.heads * depth, depth * intra
    queries, keys, values = weights.projection.split(
        [query_rows, key_rows, len(weights.projection) - query_rows - key_rows]
    )
    sides = weights.embedding.shape[-2:]
    layer = LambdaLayer(
        weights.projection.shape[1],
        len(values) // intra * weights.heads,
        query_depth=depth,
        heads=weights.heads,
        intra_depth=intra,
        scope=None if weights.is_global else sides,
        map_size=tuple((side + 1) // 2 for side in sides) if weights.is_global else None,
        position_bias=weights.position_bias is not None,
        norm="",
        implementation=implementation,
    ).to(weights.projection)
    # The channels of its second norm are (u, v)
    layer.query_norm, layer.value_norm = map(copy.deepcopy, (source.norm_q, source.norm_v))
    # Rows (u, k) and (u, v) become (k, u) and (v, u)
    key_order, value_order = (
        torch.arange(len(rows)).view(intra, -1).T.flatten() for rows in (keys, values)
    )
    layer.qkv.weight.copy_(torch.cat([queries, keys[key_order], values[value_order]]))
    layer.position.embedding.copy_(weights.embedding)
    if weights.position_bias is not None:
        layer.position.bias.copy_(weights.position_bias)
    for tensor in (*layer.value_norm.parameters(), *layer.value_norm.buffers()):
        if tensor.ndim == 1:
            tensor.copy_(tensor[value_order])
    if weights.projection_bias is not None:
        # Batch norms and the softmax over positions remove a constant
        query_bias, _, value_bias = weights.projection_bias.split(layer.rows)
        layer.query_norm.running_mean -= query_bias
        layer.value_norm.running_mean -= value_bias[value_order]
    layer = layer if weights.pool is None else nn.Sequential(layer, weights.pool)
    return layer.train(source.training)
