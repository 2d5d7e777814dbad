"""Replace the lambda layers of other projects by ours, weights included."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambda_det.layers.lambda_layer import LambdaLayer

__all__ = ["convert_lambda_layers"]

logger = logging.getLogger(__name__)


@dataclass
class _Parts:
    """A foreign layer in our terms.

    Attributes:
        heads, query_depth, intra_depth: |h|, |k| and |u|.
        projection: [queries + keys + values, dim, 1, 1]; keys are rows (u, k), values rows (u, v).
        bias: of the projection, or None.
        query_norm, value_norm: batch norms; the channels of the second are (u, v).
        embedding: [k, u, r_y, r_x].
        position_bias: [k] or None.
        is_global: whether the embedding spans a whole map instead of a local scope.
        pool: what follows the layer inside its module, or None.
    """

    heads: int
    query_depth: int
    intra_depth: int
    projection: Tensor
    bias: Tensor | None
    query_norm: nn.Module
    value_norm: nn.Module
    embedding: Tensor
    position_bias: Tensor | None = None
    is_global: bool = False
    pool: nn.Module | None = None


def _timm(layer: nn.Module) -> _Parts:
    """``timm.layers.LambdaLayer``."""
    is_global = layer.conv_lambda is None
    if is_global:
        embedding, bias = layer.pos_emb.permute(2, 0, 1)[:, None], None
    else:
        embedding, bias = layer.conv_lambda.weight.squeeze(4), layer.conv_lambda.bias
    pool = None if isinstance(layer.pool, nn.Identity) else layer.pool
    return _Parts(
        layer.num_heads,
        layer.dim_qk,
        1,
        layer.qkv.weight,
        layer.qkv.bias,
        layer.norm_q,
        layer.norm_v,
        embedding,
        bias,
        is_global,
        pool,
    )


def _lucidrains(layer: nn.Module) -> _Parts:
    """``lambda_networks.LambdaLayer`` of the package lambda-networks."""
    is_global = not layer.local_contexts
    if is_global:
        embedding, bias = layer.rel_pos_emb.permute(2, 3, 0, 1), None
    else:
        embedding, bias = layer.pos_conv.weight.squeeze(2), layer.pos_conv.bias
    weights = [layer.to_q.weight, layer.to_k.weight, layer.to_v.weight]
    return _Parts(
        layer.heads,
        len(layer.to_q.weight) // layer.heads,
        layer.u,
        torch.cat(weights),
        None,
        layer.norm_q,
        layer.norm_v,
        embedding,
        bias,
        is_global,
    )


def _d_li14(layer: nn.Module) -> _Parts:
    """``lambda_layer.LambdaLayer`` of d-li14/lambda.pytorch, and its copies."""
    return _Parts(
        layer.Nh,
        layer.dk,
        layer.du,
        layer.conv_qkv.weight,
        layer.conv_qkv.bias,
        layer.norm_q,
        layer.norm_v,
        layer.lambda_conv.weight.squeeze(2),
        layer.lambda_conv.bias,
        pool=layer.avgpool if layer.stride > 1 else None,
    )


# By the attributes that a layer has, since copies of the files have other names and places
_READERS: tuple[tuple[tuple[str, ...], Callable[[nn.Module], _Parts]], ...] = (
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
    replaced: dict[nn.Module, nn.Module] = {}  # layers that are used twice stay shared
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child not in replaced and (read := _reader_of(child)) is not None:
                replaced[child] = _convert(child, read(child), implementation)
            if child in replaced:
                setattr(parent, name, replaced[child])
    if (read := _reader_of(model)) is not None:
        return _convert(model, read(model), implementation)
    logger.info(f"Replaced {len(replaced)} lambda layers")
    return model


def _reader_of(module: nn.Module | None) -> Callable[[nn.Module], _Parts] | None:
    for names, read in _READERS:
        if all(hasattr(module, name) for name in names):
            return read
    return None


@torch.no_grad()
def _convert(source: nn.Module, parts: _Parts, implementation: str) -> nn.Module:
    depth, intra = parts.query_depth, parts.intra_depth
    query_rows, key_rows = parts.heads * depth, depth * intra
    queries, keys, values = parts.projection.split(
        [query_rows, key_rows, len(parts.projection) - query_rows - key_rows]
    )
    sides = parts.embedding.shape[-2:]
    layer = LambdaLayer(
        parts.projection.shape[1],
        len(values) // intra * parts.heads,
        query_depth=depth,
        heads=parts.heads,
        intra_depth=intra,
        scope=None if parts.is_global else tuple(sides),
        map_size=tuple((side + 1) // 2 for side in sides) if parts.is_global else None,
        position_bias=parts.position_bias is not None,
        norm="",
        implementation=implementation,
    ).to(parts.projection)
    layer.query_norm, layer.value_norm = map(copy.deepcopy, (parts.query_norm, parts.value_norm))
    # Rows (u, k) and (u, v) become (k, u) and (v, u)
    key_order, value_order = (
        torch.arange(len(rows)).view(intra, -1).T.flatten() for rows in (keys, values)
    )
    layer.qkv.weight.copy_(torch.cat([queries, keys[key_order], values[value_order]]))
    layer.position.embedding.copy_(parts.embedding)
    if parts.position_bias is not None:
        layer.position.bias.copy_(parts.position_bias)
    _reorder(layer.value_norm, value_order)
    if parts.bias is not None:
        # Batch norms and the softmax over positions remove a constant
        query_bias, _, value_bias = parts.bias.split(layer.rows)
        layer.query_norm.running_mean -= query_bias
        layer.value_norm.running_mean -= value_bias[value_order]
    converted = layer if parts.pool is None else nn.Sequential(layer, parts.pool)
    return converted.train(source.training)


def _reorder(norm: nn.Module, order: Tensor) -> None:
    """Put the channels of a norm in another order."""
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.ndim == 1:
            tensor.copy_(tensor[order])
