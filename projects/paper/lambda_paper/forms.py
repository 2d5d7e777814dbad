"""Special forms of lambdas: cumulative sums for masking the future, channel and spatial attention.

Letters are those of :mod:`lambda_det.layers.lambda_layer`. n and m count positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def causal_output(queries: Tensor, keys: Tensor, values: Tensor, embeddings: Tensor) -> Tensor:
    """The masked lambda layer of Figure 6 where each query sees its past and itself.

    Figure 6 notes that "a cumulative sum may be faster for masking the future". The content lambda
    of position n is

        sum over m <= n of exp(K[m, k]) V[m, v] / sum over m <= n of exp(K[m, k])

    so both sums of all positions are one cumulative sum each, with [b, n, k, v] numbers and without
    the pairs of positions of the general form. They are made in float64: a key may be smaller than
    the largest by 700 before its weight is 0. The position lambdas have no such form.

    Args:
        queries: [b, n, h, k].
        keys: [b, n, k], not normalised.
        values: [b, n, v].
        embeddings: [n, m, k], of each pair of positions.

    Returns:
        [b, n, h, v] in the queries' dtype.
    """
    largest = keys.amax(1, keepdim=True)
    weights = (keys - largest).double().exp()
    sums = (weights[..., None] * values[:, :, None].double()).cumsum(1)  # [b, n, k, v]
    content_lambdas = (sums / weights.cumsum(1)[..., None]).to(queries.dtype)
    past = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device).tril()
    seen = embeddings * past[..., None]
    position_lambdas = torch.einsum("nmk,bmv->bnkv", seen, values)
    return torch.einsum("bnhk,bnkv->bnhv", queries, content_lambdas + position_lambdas)


def channel_attention(queries: Tensor, weights: Tensor) -> Tensor:
    """Squeeze-and-excitation as a lambda layer (Appendix D.4).

    The lambda diag(w_1, .., w_k) is the same for all positions: y[n, k] = w[k] q[n, k].

    Args:
        queries: [b, n, k], the positions of a feature map.
        weights: [b, k], made from the whole map, like the excitation of squeeze-and-excitation.

    Returns:
        [b, n, k].
    """
    return queries * weights[:, None]


def spatial_attention(queries: Tensor, weights: Tensor) -> Tensor:
    """Attention over positions as a lambda layer (Appendix D.4).

    The lambda w_n I is a scalar for each position: y[n, k] = w[n] q[n, k].

    Args:
        queries: [b, n, k], the positions of a feature map.
        weights: [b, n], made from all channels, such as those of :class:`SpatialWeights`.

    Returns:
        [b, n, k].
    """
    return queries * weights[..., None]


class SpatialWeights(nn.Module):
    """The weight of each position, of Woo et al. (2018): a convolution of channel statistics.

    Args:
        side: of the convolution.

    Shape:
        x: [B, C, H, W]; output: [B, H, W], between 0 and 1.
    """

    def __init__(self, side: int = 7) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 1, side, padding=side // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        statistics = torch.stack([x.mean(1), x.amax(1)], dim=1)
        return self.convolution(statistics).sigmoid()[:, 0]
