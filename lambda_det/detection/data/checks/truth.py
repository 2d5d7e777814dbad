"""Whether data sets have the keypoints and masks that a configuration trains and evaluates."""

from __future__ import annotations

from collections.abc import Sequence

from detectron2.data import MetadataCatalog

from lambda_det.detection.data.predictions import Detector, evaluated, predictions
from lambda_det.errors import ConfigError

_COCO_KEYPOINTS = 17


def check_truth(detector: Detector, train: Sequence[str], test: Sequence[str]) -> None:
    """Refuse data sets without the ground truth that the model needs.

    Args:
        detector: what its configuration says.
        train: registered data sets to train on.
        test: registered data sets to evaluate on.

    Raises:
        ConfigError: a switch or a number in the config does not fit the data.
    """
    for name in train:
        _check_training(detector, name)
    for name in test:
        evaluated(detector, name)
    for name in dict.fromkeys((*train, *test)):
        if "semantic" in predictions(detector.architecture):
            _check_stuff(detector, name)
        if detector.keypoints is not None:
            _check_keypoints(detector, name, is_test=name in test)


def _check_training(detector: Detector, name: str) -> None:
    kind = MetadataCatalog.get(name).get("evaluator_type")
    needed = predictions(detector.architecture)
    lacking = None
    if "semantic" in needed and kind in ("coco", "lvis", "pascal_voc"):
        lacking = "semantic masks"
    if "instances" in needed and kind in ("sem_seg", "cityscapes_sem_seg"):
        lacking = "instances"
    if lacking:
        raise ConfigError(
            f"{detector.keys['architecture']} {detector.architecture} learns from {lacking}, and "
            f"{name} has none; name another data set in {detector.keys['train']}."
        )


def _check_stuff(detector: Detector, name: str) -> None:
    metadata = MetadataCatalog.get(name)
    classes, ignored = metadata.get("stuff_classes"), metadata.get("ignore_label")
    here = detector.semantic_classes
    if None not in (classes, here) and len(classes) != here:
        raise ConfigError(
            f"{detector.keys['semantic_classes']} is {here}, but {name} has {len(classes)} "
            f"classes of semantic masks; set it to {len(classes)}."
        )
    here = detector.ignored_label
    if None not in (ignored, here) and ignored != here:
        raise ConfigError(
            f"{detector.keys['ignored_label']} is {here}, but the masks of {name} mark unlabelled "
            f"pixels with {ignored}; set it to {ignored}."
        )


def _check_keypoints(detector: Detector, name: str, *, is_test: bool) -> None:
    metadata = MetadataCatalog.get(name)
    names = metadata.get("keypoint_names")
    if names is None or metadata.get("keypoint_flip_map") is None:
        raise ConfigError(
            f"MODEL.KEYPOINT_ON is on, but the data set {name} names no keypoints; give its "
            'JSON file a category with a list of names, "keypoints", register it with '
            "keypoint_names and keypoint_flip_map, or set MODEL.KEYPOINT_ON False."
        )
    if detector.keypoints != len(names):
        raise ConfigError(
            f"{detector.keys['keypoints']} is {detector.keypoints}, but {name} has {len(names)} "
            f"keypoints; set it to {len(names)}."
        )
    sigmas = detector.sigmas or _COCO_KEYPOINTS
    if is_test and sigmas != len(names):
        raise ConfigError(
            f"TEST.KEYPOINT_OKS_SIGMAS holds {sigmas} numbers (those of COCO if it is empty), but "
            f"{name} has {len(names)} keypoints; give one for each, such as 0.05."
        )
