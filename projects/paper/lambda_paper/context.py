"""The dependence of an output on its input: a lambda layer's weights of its context, and receptive
fields.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.layers import LambdaLayer
from lambda_det.layers.lambda_layer import normalize_keys
from lambda_det.layers.local import crop_offsets
from lambda_det.layers.masked import spread


class Context:
    r"""The queries, keys and values that a lambda layer computes from one input, in float64.

    A lambda is a sum over the context. So each output is a weighted sum of the values, and the
    weights are the same for all |v| channels of a head (Equations 1 and 2, Section 3.3):

        y[n, h, v] = sum over m, u of (content[n, h, m, u] + position[n, h, m, u]) * V[m, v, u]
        content[n, h, m, u] = sum over k of q[n, h, k] * K[m, k, u], K normalised over m
        position[n, h, m, u] = sum over k of q[n, h, k] * E[k, u, m - n]

    The weights are the exact derivative of the output with respect to the values. They may be
    negative and do not sum to 1, so they are no attention map.

    Args:
        layer: used in evaluation mode. It is not changed.
        x: its input, [B, dim, H, W].
        mask: its padding mask, bool [B, 1, H, W], or None.

    Attributes:
        queries: [B, g, h, k, H, W]. The h heads of a group share keys, values and embeddings.
        keys: normalised over the positions, [B, g, k, u, H, W]; None without content lambda.
        values: [B, g, v, u, H, W].
    """

    def __init__(self, layer: LambdaLayer, x: Tensor, mask: Tensor | None = None) -> None:
        layer = deepcopy(layer).double().eval()
        x = x.double()
        groups, size = layer.heads if layer.multi_head else 1, x.shape[-2:]
        with torch.no_grad():
            parts = (part.permute(0, 3, 4, 1, 2) for part in layer.project(x))
            queries, keys, values = (part.unflatten(1, (groups, -1)) for part in parts)
            self.queries, self.values, self.keys = queries, values, None
            if layer.content is not None:
                valid = None if mask is None else mask.flatten(1).repeat_interleave(groups, 0)
                keys = keys.flatten(0, 1).flatten(3).permute(0, 3, 1, 2)  # [B * g, m, k, u]
                keys = normalize_keys(keys, layer.content.key_norm, valid).permute(0, 2, 3, 1)
                self.keys = keys.unflatten(0, (-1, groups)).unflatten(-1, size)
            self._offsets = None
            if layer.position is not None:
                embedding = spread(layer.position.embedding, layer.dilation)
                embedding = crop_offsets(embedding, *size)
                if not layer.multi_head:
                    embedding = embedding[None]
                pads = [
                    side - 1 - have // 2
                    for side, have in zip(size, embedding.shape[-2:], strict=True)
                ]
                # [g, k, u, 2H - 1, 2W - 1], zero outside the scope
                self._offsets = F.pad(embedding, (pads[1], pads[1], pads[0], pads[0]))
        self._inside = None if mask is None else mask[:, :, None, None]

    def content_weights(self, y: int, x: int) -> Tensor | None:
        """Weights of the content lambda for the output at (y, x): [B, heads, u, H, W], or None."""
        if self.keys is None:
            return None
        weights = torch.einsum("bghk,bgkuyx->bghuyx", self.queries[..., y, x], self.keys)
        return self._masked(weights)

    def position_weights(self, y: int, x: int) -> Tensor | None:
        """Weights of the position lambda for the output at (y, x): [B, heads, u, H, W], or None."""
        if self._offsets is None:
            return None
        height, width = self.queries.shape[-2:]
        embedding = self._offsets[
            ..., height - 1 - y : 2 * height - 1 - y, width - 1 - x : 2 * width - 1 - x
        ]
        weights = torch.einsum("bghk,gkuyx->bghuyx", self.queries[..., y, x], embedding)
        return self._masked(weights)

    def output(self, weights: Tensor) -> Tensor:
        """The weighted sum of the values: [B, heads, u, H, W] to [B, heads * v]."""
        groups = self.values.shape[1]
        grouped = weights.unflatten(1, (groups, -1))
        return torch.einsum("bghuyx,bgvuyx->bghv", grouped, self.values).flatten(1)

    def _masked(self, weights: Tensor) -> Tensor:
        """Reshape [B, g, h, u, H, W] to [B, heads, u, H, W] and set padding to 0."""
        weights = weights.flatten(1, 2)
        return weights if self._inside is None else weights * self._inside[:, 0]


def effective_positions(weights: Tensor) -> Tensor:
    """The effective number of positions with weight: exp of the entropy of their shares.

    Args:
        weights: [.., H, W], of any sign.

    Returns:
        [..], from 1 (one position has all the weight) to H * W (all have the same weight).
    """
    shares = weights.abs().flatten(-2)
    shares = shares / shares.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def receptive_field(
    output: Tensor, image: Tensor, position: tuple[int, int], *, draws: int = 8, seed: int = 0
) -> Tensor:
    """The effective receptive field of one position (Luo et al. 2016, Section 2).

    Luo et al. take the absolute gradient with respect to the pixels for an output gradient of 1. On
    the many channels of a feature map, equal gradients would partly cancel. So each draw takes the
    gradients of the channels from N(0, 1). With many draws, the mean absolute value of a pixel
    tends to sqrt(2 / pi) times the norm of its column of the Jacobian.

    Args:
        output: [1, C, H, W], computed from ``image``.
        image: [1, channels, height, width], requires grad.
        position: (y, x) on the map of ``output``.
        draws: number of random gradients.
        seed: of the random gradients.

    Returns:
        [height, width], the mean over the draws and the channels of the image.
    """
    y, x = position
    generator = torch.Generator().manual_seed(seed)
    at_position = output[0, :, y, x]
    total = torch.zeros_like(image[0, 0])
    for _ in range(draws):
        weights = torch.randn(len(at_position), generator=generator, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(
            at_position, image, weights.to(at_position), retain_graph=True
        )
        total += gradient[0].abs().mean(0)
    return total / draws


def radius(field: Tensor, position: tuple[float, float], share: float) -> float:
    """The distance from ``position``, in pixels, within which ``share`` of the field's sum lies.

    Args:
        field: [H, W], no negative values.
        position: (y, x).
        share: from 0 to 1.

    Returns:
        The distance; 0 for a field of zeros.
    """
    rows = torch.arange(field.shape[0], device=field.device, dtype=torch.float64) - position[0]
    columns = torch.arange(field.shape[1], device=field.device, dtype=torch.float64) - position[1]
    distances, order = torch.hypot(rows[:, None], columns[None]).flatten().sort()
    within = field.double().flatten()[order].cumsum(0)
    if not within[-1] > 0:
        return 0.0
    return float(distances[(within < share * within[-1]).sum().clamp(max=len(within) - 1)])
