"""The exponential moving average of the weights, which is what gets evaluated and exported."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

__all__ = ["ExponentialAverage"]


class ExponentialAverage:
    """Averages a model's weights step by step: w' <- d w' + (1 - d) w.

    After n steps d = min(decay, (1 + n) / (10 + n)), as TensorFlow has it with ``num_updates``.
    A constant 0.9999 would keep 6 % of the random initial weights at the end of the 28k steps of 90
    epochs. Running statistics are averaged alike.

    PyTorch's ``AveragedModel`` counts in a tensor, so that the ramp would wait for the GPU at each
    step; timm's ``ModelEmaV3`` gives the same numbers and does not keep the count in its state.

    Args:
        model: what is trained.
        average: a copy of it, which from now on holds the average.
        decay: the limit of d.
    """

    def __init__(self, model: nn.Module, average: nn.Module, decay: float) -> None:
        self._model = model
        self.average = average.requires_grad_(False).eval()
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages, values = [], []
        # Not over the state dict, in which a parameter that layers share stands several times
        for average, value in zip(_tensors(self.average), _tensors(self._model), strict=True):
            if average.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.average.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state["model"])
        self.updates = state["updates"]


def _tensors(model: nn.Module) -> chain[torch.Tensor]:
    return chain(model.parameters(), model.buffers())
