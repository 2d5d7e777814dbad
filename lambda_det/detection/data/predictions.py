"""What a configured model predicts, and which of it a data set can evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from lambda_det.detection.registry import ARCHITECTURES, EVALUATORS, Architecture, Evaluator
from lambda_det.errors import ConfigError


@dataclass(frozen=True)
class Detector:
    """The facts of a detector's configuration that concern its data.

    Attributes:
        architecture: the name of the model's class.
        num_classes: of its instances; None if unknown.
        masks: whether it learns masks.
        keypoints: how many it predicts of an object; None if it predicts none.
        semantic_classes, ignored_label: of semantic masks; None if unknown.
        filters_empty: whether images without an object are left out of training.
        sigmas: how many numbers TEST.KEYPOINT_OKS_SIGMAS holds; 0 for COCO's.
        keys: the user's keys for these, and for the data sets to "train" and to "test" on.
    """

    architecture: str
    num_classes: int | None = None
    masks: bool = False
    keypoints: int | None = None
    semantic_classes: int | None = None
    ignored_label: int | None = None
    filters_empty: bool = False
    sigmas: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> Detector:
        model = cfg.MODEL
        classes = _architecture(model.META_ARCHITECTURE).num_classes
        count = model[classes.split(".")[1]].NUM_CLASSES if classes else None
        return cls(
            architecture=model.META_ARCHITECTURE,
            num_classes=count,
            masks=model.MASK_ON,
            keypoints=model.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if model.KEYPOINT_ON else None,
            semantic_classes=model.SEM_SEG_HEAD.NUM_CLASSES,
            ignored_label=model.SEM_SEG_HEAD.IGNORE_VALUE,
            filters_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            sigmas=len(cfg.TEST.KEYPOINT_OKS_SIGMAS),
            keys={
                "architecture": "MODEL.META_ARCHITECTURE",
                "num_classes": classes,
                "masks": "MODEL.MASK_ON",
                "keypoints": "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS",
                "semantic_classes": "MODEL.SEM_SEG_HEAD.NUM_CLASSES",
                "ignored_label": "MODEL.SEM_SEG_HEAD.IGNORE_VALUE",
                "filters_empty": "DATALOADER.FILTER_EMPTY_ANNOTATIONS",
                "train": "DATASETS.TRAIN",
                "test": "DATASETS.TEST",
            },
        )

    @property
    def is_known(self) -> bool:
        """Whether its class of models is of Detectron2 itself, and not of another project."""
        return self.architecture in ARCHITECTURES

    def predicts(self, kind: str) -> bool:
        """Whether it predicts "instances", "semantic" segments, "panoptic" ones or "keypoints"."""
        if kind == "keypoints":
            return self.keypoints is not None
        return kind in predictions(self.architecture)


def _architecture(name: str) -> Architecture:
    return ARCHITECTURES.get(name, Architecture())


def predictions(architecture: str) -> tuple[str, ...]:
    """The predictions of models of a class: some of "instances", "semantic" and "panoptic"."""
    return _architecture(architecture).predictions


def evaluated(detector: Detector, dataset_name: str) -> tuple[str, ...]:
    """Which of the predictions can be compared with the ground truth of a data set.

    Raises:
        ConfigError: none of them.
    """
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    predicted = predictions(detector.architecture)
    there = EVALUATORS.get(kind, Evaluator()).ground_truth
    result = tuple(name for name in predicted if name in there)
    if not result:
        raise ConfigError(
            f"{detector.keys['architecture']} {detector.architecture} predicts "
            f"{' and '.join(predicted)} segments, which cannot be evaluated on {dataset_name} with "
            f"the evaluator_type {kind}; name another data set in {detector.keys['test']}."
        )
    return result
