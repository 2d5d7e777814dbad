"""Whether data sets fit a detector, and each other; checked before a run starts.

What is asked of each data set by itself is a table in :mod:`.rules`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.config import option
from lambda_det.detection.data import classes
from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import check_segments_mode, read_panoptic
from lambda_det.detection.data.copies import REMEDY, shared_copies
from lambda_det.detection.data.predictions import Detector, evaluated
from lambda_det.detection.data.registration import check_files
from lambda_det.detection.data.report import (
    BROKEN,
    DOUBTFUL,
    MASK,
    NO_MASK,
    REPAIRED,
    UNUSABLE,
    Report,
)
from lambda_det.detection.data.rules import UsedData, refuse_no_truth, refuse_unfit
from lambda_det.errors import ConfigError, DataError, listed, refused
from lambda_det.weights.provenance import IMAGENET_PIXELS, PixelSettings

logger = logging.getLogger(__name__)

_MOST_COMPARED = 20_000  # images; of more, only the paths and not the files are compared
_SAMPLED = 100  # images of segments, at most, whose heads are read before a training


def check_datasets(cfg: CfgNode, *, train: bool, test: bool) -> None:
    """:func:`check_detector_data` for the data sets that a YAML configuration names.

    Args:
        cfg: the config of the run.
        train: check ``DATASETS.TRAIN``.
        test: check ``DATASETS.TEST``.

    Raises:
        ConfigError: the configuration does not fit the data.
        DataError: the data cannot be used.
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
            f"DATALOADER.SAMPLER_TRAIN {sampler} repeats no image: DATALOADER.REPEAT_THRESHOLD is "
            "0; give it the share of images below which a class is repeated, such as 0.001."
        )
    if train and test and cfg.TEST.LOSS:
        for name in cfg.DATASETS.TEST:
            refuse_no_truth(UsedData(name, "test", detector), ", or set TEST.LOSS False")


def check_pixels(pixels: PixelSettings) -> None:
    """Refuse a format of images that cannot be read, and warn of means for the other order.

    Raises:
        ConfigError: the format is unknown.
    """
    key = pixels.keys[0]
    what = f"{key} is {pixels.format!r}, which is no format of images"
    with refused(ConfigError, what, "it can be RGB, BGR, L or YUV-BT.601", Exception):
        # without a format each image would keep its own; further formats depend on Pillow's version
        convert_PIL_to_numpy(Image.new("RGB", (1, 1)), pixels.format or "none")
    reverse = {"RGB": "BGR", "BGR": "RGB"}.get(pixels.format)
    if reverse is None or len(pixels.mean) != 3:
        return
    if np.allclose(pixels.mean, IMAGENET_PIXELS.in_order(reverse).mean, rtol=0.01):
        logger.warning(
            f"{key} is {pixels.format}, but {pixels.keys[1]} {list(pixels.mean)} are ImageNet's "
            f"means in the order {reverse}; reverse them, unless the weights were trained so."
        )


def check_detector_data(
    detector: Detector, *, train: Sequence[str] | None, test: Sequence[str] | None
) -> None:
    """Refuse data sets that a detector cannot be trained or evaluated on.

    It is cheap enough for every run: it reads the annotations, and up to a thousand images of each
    data set that is evaluated.

    Args:
        detector: what its configuration says.
        train: names of data sets to train on; None for an evaluation without training.
        test: names of data sets to evaluate on; None if there is no evaluation.

    Raises:
        ConfigError: a name, a switch or a number of classes in the config does not fit the data.
        DataError: the data are missing or broken, or none of them can be used.
    """
    split, needed = ("test", test) if train is None else ("train", train)
    if needed is not None and not needed:
        raise ConfigError(f"{detector.keys[split]} names no data set; name one to {split} on.")
    trained, tested = _used(detector, train or (), test or (), few="few" if train else "sample")
    data = [*trained, *tested]
    _warn_of_copies(trained, tested)
    _say_what_is_left_out(trained)
    _refuse_other_classes(data)
    for one in tested:
        if "panoptic" in evaluated(detector, one.name):
            check_panoptic(MetadataCatalog.get(one.name))
    for one in data:
        refuse_unfit(one, in_training=bool(train))
    _refuse_nothing_to_learn(trained)
    _warn_of_unlearnt_classes(trained, tested)


def check_registered(detector: Detector, train: Sequence[str], test: Sequence[str]) -> None:
    """Refuse registered data sets that are missing or broken, for any model.

    Args:
        detector: its architecture says what it learns.
        train, test: names of data sets to train and to evaluate on.

    Raises:
        ConfigError: a name is not registered.
        DataError: a data set is missing or cannot be used, or has other classes than those to train
            on; or these are files without an object, and the detector is known to learn from
            objects.
    """
    trained, tested = _used(detector, train, test, few="sample")
    if train:
        _refuse_other_classes([*trained, *tested])
    if all(one.report for one in trained):  # reading others may take long
        _refuse_nothing_to_learn(trained)
    _warn_of_copies(trained, tested)
    _warn_of_unlearnt_classes(trained, tested)


# ------------------------------------------------------------------------------- the files of each
def _used(
    detector: Detector, train: Sequence[str], test: Sequence[str], *, few: str
) -> Iterator[list[UsedData]]:
    """The data sets to train on and then those to evaluate on, each with the report on its file."""
    # ``few`` images to evaluate on are opened: an evaluation ends at a broken one, perhaps after a
    # whole training
    reports = {
        name: _check_registered(name, detector, few if name in test else "sample")
        for name in dict.fromkeys([*train, *test])
    }
    for split, names in (("train", train), ("test", test)):
        yield [UsedData(name, split, detector, reports[name]) for name in names]


def _check_registered(name: str, detector: Detector, images: str) -> Report | None:
    """The report on a registered data set, or None where it is not COCO instances."""
    files = check_files(name)
    if files is None:
        return None
    report = check_coco(*files, files=images)
    logger.info(
        f"{report.json_file}: {report.images} images, {report.annotations} annotations "
        f"({report.crowds} crowds) of {len(report.categories)} categories."
    )
    if refusal := report.refusal():
        raise DataError(refusal)
    if broken := report.findings.get(BROKEN):  # images are read as a whole to evaluate on them
        raise DataError(f"{report.json_file}: {broken.first[0]}")
    for kind, finding in report.of(UNUSABLE, REPAIRED, DOUBTFUL).items():
        if kind in (MASK, NO_MASK) and not detector.masks:
            continue
        logger.warning(
            f"{report.json_file}: {finding.count} x {kind.text}; the first: {finding.first[0]}."
        )
    names = MetadataCatalog.get(name).get("thing_classes")
    if names is not None and list(names) != report.classes:
        raise DataError(
            f"{report.json_file} holds {len(report.categories)} categories "
            f"({listed(report.classes, 5)}) that differ from those of the data set "
            f"{name} ({listed(names, 5)}); give your own data with --train-json and "
            "--train-images, or --test-json and --test-images."
        )
    return report


def check_panoptic(metadata: Any) -> None:
    """Check a panoptic file and the heads of some of its images; the evaluation reads all images.

    Raises:
        DataError: the file is not in COCO's format, or an image of segments is not RGB.
    """
    entries = list(read_panoptic(metadata.panoptic_json)[0].values())
    for entry in entries[:: len(entries) // _SAMPLED + 1]:
        path = os.path.join(metadata.panoptic_root, entry["file_name"])
        try:
            with PathManager.open(path, "rb") as file:
                mode = Image.open(file).mode
        except Exception:  # Pillow may raise anything; the evaluation says what is wrong
            continue
        check_segments_mode(path, mode)


# ---------------------------------------------------------------------- what only all of them show
def _warn_of_copies(trained: Sequence[UsedData], tested: Sequence[UsedData]) -> None:
    """Warn of images to evaluate on that are also trained on, or their copies or films."""
    learnt = [path for one in trained if one.report for path in one.report.paths]
    for one in tested:
        if not (learnt and one.report):
            continue
        files = one.report.paths
        if len(learnt) + len(files) > _MOST_COMPARED:
            known = set(learnt)
            pairs, kinds = {file: file for file in files if file in known}, "as the same file"
        else:
            pairs, kinds = shared_copies({"train": learnt, "test": files})
        if pairs:
            cases = (copy if copy == file else f"{copy} as {file}" for copy, file in pairs.items())
            logger.warning(
                f"{len(pairs)} of {len(files)} images of {one.given} are also trained on, {kinds}, "
                f"so results on these are too good: {listed(cases)}. {REMEDY}"
            )


def _say_what_is_left_out(trained: Sequence[UsedData]) -> None:
    for one in trained:
        report = one.report
        if one.detector.filters_empty and report and report.empty:
            key = option(one.detector.keys["filters_empty"], False)
            logger.info(
                f"{one.given}: {report.empty} of {report.images} images hold no object and are "
                f"left out of training; {key} keeps them as background."
            )


def _refuse_other_classes(data: Sequence[UsedData]) -> None:
    """Refuse data sets of other classes, semantic classes or keypoints, or in another order."""
    for one, other in itertools.combinations(data, 2):
        facts, source = classes.facts_of([one.name]), one.given
        classes.check(one.detector, [other.name], facts, source)


def _refuse_nothing_to_learn(trained: Sequence[UsedData]) -> None:
    """Refuse data without an object, on which a detector would learn background alone."""
    sources = [one.instances for one in trained if one.needs("instances")]
    if sources and all(i is not None and i.has_key and not i.objects for i in sources):
        text = (
            f"{', '.join(one.given for one in trained)}: no annotation to train on (crowds, and "
            "boxes without area or bbox_mode, do not count); add some."
        )
        if trained[0].detector.is_known:
            raise DataError(text)
        # A model of another project may learn from images alone
        logger.warning(text)


def _warn_of_unlearnt_classes(trained: Sequence[UsedData], tested: Sequence[UsedData]) -> None:
    """Warn of classes that no object to train on has; refuse as :func:`unlearnt_classes` does."""
    sources = [one.report for one in trained]
    if not sources or None in sources:
        return
    train = listed(one.given for one in trained)
    names, learnt = sources[0].classes, _learnt(sources)
    if unlearnt := [name for name in names if name not in learnt]:
        logger.warning(
            f"{len(unlearnt)} of {len(names)} classes have no object in {train} and are not "
            f"learnt: {listed(unlearnt, 5)}"
        )
    for one in tested:
        if one.report and (unlearnt := unlearnt_classes(one.report, sources, train)):
            logger.warning(
                f"{len(unlearnt)} classes of {one.given} without an "
                f"object in {train}, so that AP counts 0 for {listed(unlearnt, 5)}"
            )


def _learnt(sources: Iterable[Report]) -> set[str]:
    """The classes of which there are objects."""
    return {c for one in sources for number, c in one.categories.items() if one.counts[number]}


def unlearnt_classes(report: Report, sources: Sequence[Report], train: str) -> list[str]:
    """The classes to evaluate on that no object to train on has.

    Args:
        report: of the data to evaluate on.
        sources: reports of the data to train on.
        train: the names of those, for messages.

    Raises:
        DataError: these are all classes, as of two folders that are called valid and invalid, and
            there are objects of other classes to train on.
    """
    learnt = _learnt(sources)
    classes = [c for number, c in report.categories.items() if report.counts[number]]
    unlearnt = [c for c in classes if c not in learnt]
    if learnt and classes and unlearnt == classes:
        raise DataError(
            f"{report.json_file} has objects of {listed(classes, 5)}, and {train} of none of these "
            f"but of {listed(sorted(learnt), 5)}; evaluate on data with the same classes, or train "
            "with --single-class if all objects are of one kind."
        )
    return unlearnt
