"""The two convolutions of Figure 5: they build every position's lambda, then apply it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers.saturation import saturate


def conv_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """The (n+1)-d convolution, in which the value depth is one more spatial dimension.

    See :func:`lambda_det.layers.local.local_position_output`.
    """
    lambdas = F.conv3d(
        values.permute(0, 4, 3, 1, 2),  # [b, u, v, H, W]
        embedding[:, :, None],  # [k, u, 1, r_y, r_x]
        padding=(0, embedding.shape[-2] // 2, embedding.shape[-1] // 2),
    )
    return saturate(torch.einsum("byxhk,bkvyx->byxhv", queries, saturate(lambdas)))


def depthwise_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """The n-d depthwise convolution with k outputs per value channel.

    See :func:`lambda_det.layers.local.local_position_output`.
    """
    value_depth = values.shape[3]
    lambdas = F.conv2d(
        values.flatten(3).permute(0, 3, 1, 2),  # [b, (v, u), H, W]
        embedding.repeat(value_depth, 1, 1, 1),  # [(v, k), u, r_y, r_x]
        padding=(embedding.shape[-2] // 2, embedding.shape[-1] // 2),
        groups=value_depth,
    )
    lambdas = saturate(lambdas).unflatten(1, (value_depth, -1))
    return saturate(torch.einsum("byxhk,bvkyx->byxhv", queries, lambdas))
