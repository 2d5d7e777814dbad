"""What a model predicts, by its configuration, and what a data set has the truth of."""

from __future__ import annotations

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from lambda_det.errors import ConfigError

__all__ = ["evaluated", "predictions"]

# Of other architectures, those of other projects, instances are expected as of most.
_PREDICTIONS = {
    "SemanticSegmentor": ("semantic",),
    "PanopticFPN": ("instances", "semantic", "panoptic"),
}
# What is in a data set, by Detectron2's evaluator_type; of others, instances
_TRUTH = {
    "sem_seg": ("semantic",),
    "cityscapes_sem_seg": (),  # needs cityscapesscripts
    "cityscapes_panoptic_seg": (),
    "ade20k_panoptic_seg": (),  # without the files that the COCO form of the truth needs
    "coco_panoptic_seg": ("instances", "semantic", "panoptic"),
}


def predictions(cfg: CfgNode) -> tuple[str, ...]:
    """Some of "instances", "semantic" and "panoptic"."""
    return _PREDICTIONS.get(cfg.MODEL.META_ARCHITECTURE, ("instances",))


def evaluated(cfg: CfgNode, dataset_name: str) -> tuple[str, ...]:
    """Which of the predictions can be compared with the truth of a data set.

    Raises:
        ConfigError: none of them.
    """
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    predicted = predictions(cfg)
    result = tuple(name for name in predicted if name in _TRUTH.get(kind, ("instances",)))
    if not result:
        raise ConfigError(
            f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE} predicts "
            f"{' and '.join(predicted)} segments, which cannot be evaluated on {dataset_name}, of "
            f"evaluator_type {kind}; name another data set in DATASETS.TEST."
        )
    return result
