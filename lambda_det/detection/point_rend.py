"""PointRend on batches without any object, which large-scale jitter makes now and then."""

from __future__ import annotations

from detectron2.structures import Instances
from torch import Tensor, nn

__all__ = ["bear_empty_batches"]


def bear_empty_batches(model: nn.Module) -> None:
    """Let each mask head of PointRend in ``model`` train on a batch without foreground.

    Detectron2's fails there, as it joins an empty list of labels.
    """
    for module in model.modules():
        # By name: the project is a part of Detectron2, and its repository has it for itself, too
        if type(module).__name__ == "PointRendMaskHead":
            module.__class__ = _bearing(type(module))


def _bearing(head: type[nn.Module]) -> type[nn.Module]:
    class _PointRendMaskHead(head):
        def _sample_train_points(
            self, coarse_mask: Tensor, instances: list[Instances]
        ) -> tuple[Tensor, Tensor]:
            if sum(map(len, instances)) == 0:
                points = self.mask_point_train_num_points
                return coarse_mask.new_zeros(0, points, 2), coarse_mask.new_zeros(0, points)
            return super()._sample_train_points(coarse_mask, instances)

    return _PointRendMaskHead
