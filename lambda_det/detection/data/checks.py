"""Checks of a run's configuration against its data sets, before the run starts."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.config import option
from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import check_segments_mode, read_panoptic
from lambda_det.detection.data.instances import check_instances
from lambda_det.detection.data.predictions import Detector, evaluated, predictions
from lambda_det.detection.data.registration import check_files
from lambda_det.detection.data.report import BAD_BOX, Report
from lambda_det.errors import ConfigError, DataError, printable
from lambda_det.weights.import_names import IMAGENET_PIXELS
from lambda_det.weights.provenance import PixelSettings

logger = logging.getLogger(__name__)


def check_datasets(cfg: CfgNode, *, train: bool, test: bool) -> None:
    """:func:`check_detector_data` for the data sets that a YAML configuration names.

    Args:
        cfg: the config of the run.
        train: check ``DATASETS.TRAIN``.
        test: check ``DATASETS.TEST``.
    """
    detector = Detector.from_config(cfg)
    check_pixels(PixelSettings.from_config(cfg))
    check_detector_data(
        detector,
        train=cfg.DATASETS.TRAIN if train else None,
        test=cfg.DATASETS.TEST if test else None,
    )
    sampler = cfg.DATALOADER.SAMPLER_TRAIN
    if train and sampler == "RepeatFactorTrainingSampler" and cfg.DATALOADER.REPEAT_THRESHOLD == 0:
        logger.warning(
            "DATALOADER.SAMPLER_TRAIN %s repeats no image while DATALOADER.REPEAT_THRESHOLD is 0; "
            "give it the share of images below which a class is repeated, such as 0.001.",
            sampler,
        )
    if train and test and cfg.TEST.LOSS:
        for name in cfg.DATASETS.TEST:
            _check_training(detector, name, f"{detector.keys['test']}, or set TEST.LOSS False")


def check_pixels(pixels: PixelSettings) -> None:
    """Refuse a format of images that cannot be read, and warn of means for the other order.

    Raises:
        ConfigError: nobody knows the format.
    """
    key = pixels.keys[0]
    try:
        # Without one, each image would keep its own. Pillow has more formats, by its version.
        convert_PIL_to_numpy(Image.new("RGB", (1, 1)), pixels.format or "none")
    except Exception as error:
        raise ConfigError(
            f"{key} is {pixels.format!r}, which is no format of images; it can be RGB, BGR, L or "
            "YUV-BT.601."
        ) from error
    reverse = {"RGB": "BGR", "BGR": "RGB"}.get(pixels.format)
    if reverse is None or len(pixels.mean) != 3:
        return
    if np.allclose(pixels.mean, IMAGENET_PIXELS.in_order(reverse).mean, rtol=0.01):
        logger.warning(
            "%s is %s, but %s %s are ImageNet's means in the order %s; reverse them, unless the "
            "weights were trained so.",
            key,
            pixels.format,
            pixels.keys[1],
            list(pixels.mean),
            reverse,
        )


def check_detector_data(
    detector: Detector, *, train: Sequence[str] | None, test: Sequence[str] | None
) -> None:
    """Refuse data sets that a detector cannot be trained or evaluated on.

    It is cheap enough for every run: it reads the annotations, and of images at most the
    heads of a hundred.

    Args:
        detector: what its configuration says.
        train: names of data sets to train on; None for an evaluation alone.
        test: names of data sets to evaluate on; None if there is no evaluation.

    Raises:
        ConfigError: a name, a switch or a number of classes in the config does not fit the data.
        DataError: the data are missing or broken.
    """
    if train is not None and not train:
        raise ConfigError(f"{detector.keys['train']} names no data set; name one to train on.")
    if train is None and test is not None and not test:
        raise ConfigError(f"{detector.keys['test']} names no data set; name one to evaluate on.")
    train, test = tuple(train or ()), tuple(test or ())
    reports = {name: _check_registered(name) for name in dict.fromkeys(train + test)}
    for name in train:
        _say_left_out(detector, name, reports[name])
    check_ground_truth(detector, train, test)
    _check_classes(detector, reports)
    check_instances(detector, reports, train, test)


def _check_registered(name: str) -> Report | None:
    """The report on a registered data set, or None where it is not COCO instances."""
    files = check_files(name)
    if files is None:
        return None
    json_file, image_root = files
    report = check_coco(json_file, image_root, files="sample")
    logger.info(
        "%s: %d images, %d annotations (%d crowds) of %d categories.",
        name,
        report.images,
        report.annotations,
        report.crowds,
        len(report.categories),
    )
    refusal = report.refusal()
    if refusal:
        raise DataError(refusal)
    for kind, problem in report.of(BAD_BOX).items():
        logger.warning(
            "%s: %d x %s, left out of training or cut at the border; the first: %s.",
            json_file,
            problem.count,
            kind,
            problem.first[0],
        )
    metadata = MetadataCatalog.get(name)
    # Those of the file, where a run has them in another order
    names = metadata.get("file_classes", metadata.get("thing_classes"))
    if names is not None and list(names) != list(report.categories.values()):
        raise DataError(
            f"{json_file} holds {len(report.categories)} categories "
            f"({_some(report.categories.values())}) that are not those of the data set {name} "
            f"({_some(names)}); give your own data with --train-json and --train-images, or "
            "--test-json and --test-images."
        )
    return report


def _say_left_out(detector: Detector, name: str, report: Report | None) -> None:
    """Say how many images are not trained on, and how they can be."""
    if report is not None and report.empty and detector.filters_empty:
        key = detector.keys["filters_empty"]
        logger.info(
            f"{name}: {report.empty} of {report.images} images hold no object and are left out of "
            f"training; {option(key, False)} keeps them as background."
        )


def _check_classes(detector: Detector, reports: dict[str, Report | None]) -> None:
    classes = {
        name: MetadataCatalog.get(name).get("thing_classes")
        or (list(report.categories.values()) if report else None)
        for name, report in reports.items()
    }
    if "instances" in predictions(detector.architecture):
        _check_order("classes", classes)
    if detector.num_classes is None:
        return
    key = detector.keys["num_classes"]
    for name, names in classes.items():
        if names is not None and detector.num_classes != len(names):
            raise ConfigError(
                f"{key} is {detector.num_classes}, but {name} has {len(names)} categories "
                f"({_some(names)}); set {key} to {len(names)}."
            )


def _check_order(what: str, lists: dict[str, Sequence[Any] | None]) -> None:
    """Refuse data sets that number the same things otherwise; None of one that does not say."""
    known = {name: list(items) for name, items in lists.items() if items is not None}
    for (first, one), (second, other) in itertools.pairwise(known.items()):
        for number, (here, there) in enumerate(itertools.zip_longest(one, other)):
            if here != there:
                raise DataError(
                    f"The {what} of {first} and {second} differ, first in number {number}: "
                    f"{here!r:.80} and {there!r:.80}; use data sets with the same {what} in the "
                    "same order."
                )


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(map(printable, names[:limit])) + (", ..." if len(names) > limit else "")


_COCO_KEYPOINTS = 17
_SAMPLED = 100  # images of segments whose heads are read before a training


def check_ground_truth(detector: Detector, train: Sequence[str], test: Sequence[str]) -> None:
    """Refuse data sets without the ground truth that the model needs.

    Args:
        detector: what its configuration says.
        train: registered data sets to train on.
        test: registered data sets to evaluate on.

    Raises:
        ConfigError: a switch or a number in the config does not fit the data.
        DataError: a panoptic file is not in COCO's format, or an image of segments is not RGB.
    """
    for name in train:
        _check_training(detector, name, detector.keys["train"])
    for name in test:
        if "panoptic" in evaluated(detector, name):
            _check_panoptic(MetadataCatalog.get(name))
    names = dict.fromkeys((*train, *test))
    for name in names:
        if "semantic" in predictions(detector.architecture):
            _check_stuff(detector, name)
        if detector.keypoints is not None:
            _check_keypoints(detector, name, is_test=name in test)
    if "semantic" in predictions(detector.architecture):
        _check_order("stuff_classes", _metadata("stuff_classes", names))
    if detector.keypoints is not None:
        _check_order("keypoint_names", _metadata("keypoint_names", names))
        # Those of a test set are not read.
        _check_order("keypoint_flip_map", _metadata("keypoint_flip_map", train))


def _check_panoptic(metadata: Any) -> None:
    """Look at the file, and at the heads of some of its images; the evaluation reads them all."""
    entries = list(read_panoptic(metadata.panoptic_json)[0].values())
    for entry in entries[:: -(-len(entries) // _SAMPLED) or 1]:
        path = os.path.join(metadata.panoptic_root, entry["file_name"])
        try:
            with PathManager.open(path, "rb") as file:
                mode = Image.open(file).mode
        except Exception:  # Pillow may raise anything; the evaluation says what is wrong
            continue
        check_segments_mode(path, mode)


def _metadata(key: str, names: Iterable[str]) -> dict[str, Any]:
    """What registered data sets have under a key, by their names; None where it is missing."""
    return {name: MetadataCatalog.get(name).get(key) for name in names}


def _check_training(detector: Detector, name: str, where: str) -> None:
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
            f"{name} has none; name another data set in {where}."
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
