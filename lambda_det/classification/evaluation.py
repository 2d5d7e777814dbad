"""Accuracy, counted exactly over all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.distributed.signals import UntilAsked
from lambda_det.training.precision import Precision


@torch.no_grad()
def evaluate_accuracy(
    models: Mapping[str, nn.Module], loader: Iterable[Mapping[str, Tensor]], precision: Precision
) -> dict[str, float]:
    """Evaluate on every image of the loaders of all processes, each read and counted once.

    Counts are summed instead of the processes' means, because batches may be of unequal size.

    Args:
        models: each gives scores [B, classes] for a batch; left in evaluation mode.
        loader: of this process; it may be empty on some.
        precision: of the forward pass.

    Returns:
        By model, such as "raw_top1": percent of the images whose label has the highest score
        ("top1") or one of the five highest ("top5"); mean cross-entropy without label smoothing
        ("loss").

    Raises:
        StopRequest: a signal asked a process to stop.
    """
    # For each model: images, label first, label in five, loss. A process has no batch if there are
    # more processes than images.
    totals = torch.zeros(len(models), 4, dtype=torch.float64, device=precision.device)
    for model in models.values():
        model.eval()
    for batch in UntilAsked(loader):
        for total, model in zip(totals, models.values(), strict=True):
            with precision.autocast():
                scores = model(batch)
            total += _count(scores, batch["labels"].to(scores.device))
    if comm.get_world_size() > 1:
        dist.all_reduce(totals)
    values = totals[:, 1:] * totals.new_tensor([100, 100, 1]) / totals[:, :1]
    names = [f"{model}_{name}" for model in models for name in ("top1", "top5", "loss")]
    return dict(zip(names, values.flatten().tolist(), strict=True))


def _count(scores: Tensor, labels: Tensor) -> Tensor:
    """[4]: images, those whose label is first, those whose label is in five, sum of the losses."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    losses = F.cross_entropy(scores.double(), labels, reduction="sum")
    return torch.stack([losses.new_tensor(len(labels)), hits[:, 0].sum(), hits.sum(), losses])
