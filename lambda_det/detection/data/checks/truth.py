"""Whether data sets have the keypoints and masks that a configuration trains and evaluates."""

from __future__ import annotations

from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from lambda_det.detection.data.predictions import evaluated, predictions
from lambda_det.errors import ConfigError

_COCO_KEYPOINTS = 17


def check_truth(cfg: CfgNode, train: Sequence[str], test: Sequence[str]) -> None:
    """Refuse data sets without the truth that the model needs.

    Args:
        cfg: the config of the run.
        train: registered data sets to train on.
        test: registered data sets to evaluate on.

    Raises:
        ConfigError: a switch or a number in the config does not fit the data.
    """
    for name in train:
        _check_training(cfg, name)
    for name in test:
        evaluated(cfg, name)
    for name in dict.fromkeys((*train, *test)):
        if "semantic" in predictions(cfg):
            _check_stuff(cfg, name)
        if cfg.MODEL.KEYPOINT_ON:
            _check_keypoints(cfg, name, is_test=name in test)


def _check_training(cfg: CfgNode, name: str) -> None:
    kind = MetadataCatalog.get(name).get("evaluator_type")
    needed = predictions(cfg)
    lacking = None
    if "semantic" in needed and kind in ("coco", "lvis", "pascal_voc"):
        lacking = "semantic masks"
    if "instances" in needed and kind in ("sem_seg", "cityscapes_sem_seg"):
        lacking = "instances"
    if lacking:
        raise ConfigError(
            f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE} learns from {lacking}, and "
            f"{name} has none; name another data set in DATASETS.TRAIN."
        )


def _check_stuff(cfg: CfgNode, name: str) -> None:
    head = cfg.MODEL.SEM_SEG_HEAD
    metadata = MetadataCatalog.get(name)
    classes, ignored = metadata.get("stuff_classes"), metadata.get("ignore_label")
    if classes is not None and len(classes) != head.NUM_CLASSES:
        raise ConfigError(
            f"MODEL.SEM_SEG_HEAD.NUM_CLASSES is {head.NUM_CLASSES}, but {name} has {len(classes)} "
            f"classes of semantic masks; set it to {len(classes)}."
        )
    if ignored is not None and ignored != head.IGNORE_VALUE:
        raise ConfigError(
            f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE is {head.IGNORE_VALUE}, but the masks of {name} mark "
            f"unlabelled pixels with {ignored}; set it to {ignored}."
        )


def _check_keypoints(cfg: CfgNode, name: str, *, is_test: bool) -> None:
    metadata = MetadataCatalog.get(name)
    names = metadata.get("keypoint_names")
    if names is None or metadata.get("keypoint_flip_map") is None:
        raise ConfigError(
            f"MODEL.KEYPOINT_ON is on, but the data set {name} names no keypoints; give its "
            'JSON file a category with a list of names, "keypoints", register it with '
            "keypoint_names and keypoint_flip_map, or set MODEL.KEYPOINT_ON False."
        )
    count = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    if count != len(names):
        raise ConfigError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {count}, but {name} has {len(names)} "
            f"keypoints; set it to {len(names)}."
        )
    sigmas = len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or _COCO_KEYPOINTS
    if is_test and sigmas != len(names):
        raise ConfigError(
            f"TEST.KEYPOINT_OKS_SIGMAS holds {sigmas} numbers (those of COCO if it is empty), but "
            f"{name} has {len(names)} keypoints; give one for each, such as 0.05."
        )
