"""PointRend on batches without any object, which large-scale jitter makes now and then."""

from __future__ import annotations

import sys

from detectron2.structures import Instances
from torch import Tensor, nn

__all__ = ["bear_empty_batches"]


def bear_empty_batches(model: nn.Module) -> None:
    """Let each mask head of PointRend in ``model`` train on a batch without foreground.

    Detectron2's fails there, as it joins an empty list of labels.
    """
    project = sys.modules.get("detectron2.projects.point_rend")
    if project is None:  # so there is no such head in the model
        return

    class _PointRendMaskHead(project.PointRendMaskHead):
        def _sample_train_points(
            self, coarse_mask: Tensor, instances: list[Instances]
        ) -> tuple[Tensor, Tensor]:
            if sum(map(len, instances)) == 0:
                points = self.mask_point_train_num_points
                return coarse_mask.new_zeros(0, points, 2), coarse_mask.new_zeros(0, points)
            return super()._sample_train_points(coarse_mask, instances)

    for module in model.modules():
        if type(module) is project.PointRendMaskHead:
            module.__class__ = _PointRendMaskHead
