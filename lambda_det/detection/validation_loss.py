"""The losses of training on the test images, without random numbers or updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from lambda_det.distributed.signals import UntilAsked
from lambda_det.native.calls import copied
from lambda_det.training.precision import Precision
from lambda_det.training.randomness import Purpose, seed_all, seeded


@torch.no_grad()
def mean_losses(
    model: nn.Module, batches: Iterable[list[dict]], precision: Precision
) -> dict[str, float]:
    """The mean losses over the images of all processes.

    The heads draw the regions from which they learn. Here they draw the same regions each time.

    Args:
        model: a detector of Detectron2's, which gives losses by name in training.
        batches: images with their ground truth, at the size of a test and without augmentation.
        precision: of the forward pass.

    Returns:
        The losses by name, and their sum as "total_loss"; nothing without images.

    Raises:
        DataError: an image cannot be read.
        StopRequest: a signal asked a process to stop.
    """
    sums, images = Counter(), 0
    model = _with_losses(model)
    # The heads' own numbers do not belong to the training. Its steps set a GPU's generator
    # themselves.
    with EventStorage(), seeded(Purpose.VALIDATION, 0):
        for batch in UntilAsked(batches, "Losses on"):
            seed_all(Purpose.VALIDATION, 0, images, device=precision.device)
            with precision.autocast():
                losses = model(batch)
            sums.update({name: len(batch) * float(loss) for name, loss in losses.items()})
            images += len(batch)
    shares = comm.all_gather((dict(sums), images))
    total, count = Counter(), sum(n for _, n in shares)
    for share, _ in shares:
        total.update(share)
    means = {name: value / count for name, value in total.items()}
    return {**means, "total_loss": sum(means.values())} if count else {}


def _with_losses(model: nn.Module) -> nn.Module:
    """A copy that gives losses while its backbone and its norms are as in a test."""
    # It draws no images, and the divisor of a RetinaNet's losses stays as in the training
    model = copied(model).train()
    for module in model.modules():
        if "vis_period" in vars(module):
            module.vis_period = 0
        # norms, dropout and other modules without children differ between training and test
        if module is not model and not list(module.children()):
            module.training = False
    if hasattr(model, "backbone"):
        model.backbone.eval()
    return model
