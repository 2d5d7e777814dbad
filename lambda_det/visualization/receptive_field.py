"""The effective receptive field: which pixels a position of a feature map depends on."""

from __future__ import annotations

import torch
from torch import Tensor

from lambda_det.errors import ConfigError

__all__ = ["radius", "receptive_field"]


def receptive_field(
    output: Tensor, image: Tensor, position: tuple[int, int], *, draws: int = 8, seed: int = 0
) -> Tensor:
    """The effective receptive field of one position (Luo et al. 2016, Section 2).

    There it is the gradient of the output at that position by the pixels, in absolute value, for an
    output gradient of 1. A feature map has many channels, and of these with one gradient some would
    cancel out; so each draw gives the channels gradients from N(0, 1). With many draws the mean
    absolute value tends to the norm of the Jacobian's column of a pixel times sqrt(2 / pi).

    Args:
        output: [1, C, H, W], computed from ``image``.
        image: [1, channels, height, width], requires grad.
        position: (y, x) on the map of ``output``.
        draws: of random gradients.
        seed: of these draws.

    Returns:
        [height, width], the mean over the draws and the channels of the image.

    Raises:
        ConfigError: the position is not on the map.
    """
    y, x = position
    height, width = output.shape[-2:]
    if not (0 <= y < height and 0 <= x < width):
        raise ConfigError(f"Position ({y}, {x}) is not on the map of {height}x{width} positions.")
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
    """The distance from ``position`` within which ``share`` of the sum of a field lies, in pixels.

    Args:
        field: [H, W], not negative.
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
