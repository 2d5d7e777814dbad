"""Whether data sets fit a detector: one table of rules, which is checked before a run starts."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.config import option
from lambda_det.detection.data import classes
from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import check_segments_mode, read_panoptic
from lambda_det.detection.data.copies import shared_copies
from lambda_det.detection.data.predictions import Detector, evaluated, is_known, predictions
from lambda_det.detection.data.registration import check_files
from lambda_det.detection.data.report import DOUBTFUL, MASK, REPAIRED, UNUSABLE, Report
from lambda_det.errors import (
    ConfigError,
    DataError,
    UserError,
    counted,
    listed,
    printable,
    refused,
)
from lambda_det.weights.provenance import IMAGENET_PIXELS, PixelSettings

logger = logging.getLogger(__name__)

_MOST_COMPARED = 20_000  # pictures; of more, only the paths and not the files are compared


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
            fault = _no_truth(_Data(name, "test", detector), ", or set TEST.LOSS False")
            if fault:
                raise ConfigError(fault)


def check_pixels(pixels: PixelSettings) -> None:
    """Refuse a format of images that cannot be read, and warn of means for the other order.

    Raises:
        ConfigError: the format is unknown.
    """
    key = pixels.keys[0]
    try:
        # without a format each image would keep its own; further formats depend on Pillow's version
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
    if train is not None and not train:
        raise ConfigError(f"{detector.keys['train']} names no data set; name one to train on.")
    if train is None and test is not None and not test:
        raise ConfigError(f"{detector.keys['test']} names no data set; name one to evaluate on.")
    train, test = tuple(train or ()), tuple(test or ())
    reports = {
        # an evaluation ends at a broken image, perhaps after a whole training
        name: _check_registered(name, detector, "few" if train and name in test else "sample")
        for name in dict.fromkeys(train + test)
    }
    for name in test:
        _warn_of_copies(name, reports, train)
    for name in train if detector.filters_empty else ():
        if (report := reports[name]) and report.empty:
            logger.info(
                f"{name}: {report.empty} of {report.images} images hold no object and are left out "
                f"of training; {option(detector.keys['filters_empty'], False)} keeps them as "
                "background."
            )
    read = functools.cache(Instances.of_records)
    data = [
        _Data(name, split, detector, reports[name], read)
        for split, chosen in (("train", train), ("test", test))
        for name in chosen
    ]
    predicted, has_keypoints = predictions(detector.architecture), detector.keypoints is not None
    for key, words, is_read in (
        ("thing_classes", "classes", "instances" in predicted),
        ("stuff_classes", "semantic classes", "semantic" in predicted),
        ("keypoint_names", "keypoints", has_keypoints),
        ("keypoint_flip_map", "keypoint_flip_map", has_keypoints),
    ):
        # nothing is flipped in a test
        those = [d for d in data if key != "keypoint_flip_map" or d.split == "train"]
        lists = [(classes.file_of(d.name), d.meta(key)) for d in those if d.meta(key) is not None]
        for (source, there), (place, here) in itertools.pairwise(lists if is_read else ()):
            classes.refuse_others(words, place, here, source, there)
    for one in data:
        if one.split == "test" and "panoptic" in evaluated(detector, one.name):
            check_panoptic(MetadataCatalog.get(one.name))
    # an evaluation alone has box AP where there are no masks
    rules = [rule for rule in _RULES if train or rule.fault is not _no_masks]
    for rule, one in itertools.product(rules, data):
        applies = one.split in rule.splits and one.needs(rule.needs)
        if applies and (fault := rule.fault(one)):
            raise rule.error(fault)
    _check_something_is_learnt([one for one in data if one.split == "train"])
    for name in test:
        _check_learnt_classes(name, reports, train)
    for one in data:
        instances = one.instances() if one.masks() and one.needs("instances") else None
        if instances is not None and 0 < instances.unmasked < instances.annotations:
            logger.warning(
                f"{one.name}: {instances.unmasked} annotations without a mask take their box."
            )


def _check_something_is_learnt(data: Sequence[_Data]) -> None:
    """Refuse data without an object, on which a detector would learn background alone.

    Args:
        data: all data sets to train on.

    Raises:
        DataError: the detector is known to learn instances, and no data set has any.
    """
    sources = [one.instances() for one in data if one.needs("instances")]
    if sources and all(i is not None and i.has_key and not i.objects for i in sources):
        names = ", ".join(one.name for one in data)
        text = (
            f"{names} hold{'' if len(data) > 1 else 's'} no annotation to train on "
            "(crowds and boxes without area do not count); add some."
        )
        if is_known(data[0].detector.architecture):
            raise DataError(text)
        # A model of another project may learn from pictures alone
        logger.warning(text)


def _warn_of_copies(name: str, reports: Mapping[str, Report | None], train: Sequence[str]) -> None:
    """Warn of pictures to evaluate on that are also trained on, as the same file or as a copy."""
    sources = [report for other in train if (report := reports[other])]
    report = reports[name]
    if report is None or not sources:
        return
    files = [file["file_name"] for file in report.files]
    learnt = [file["file_name"] for source in sources for file in source.files]
    if len(learnt) + len(files) > _MOST_COMPARED:
        known = set(learnt)
        pairs = [(file, file) for file in files if file in known]
    else:
        pairs, _ = shared_copies({"train": learnt, "test": files})
    if pairs:
        cases = (copy if copy == one else f"{copy} as {one}" for copy, one in pairs)
        logger.warning(
            f"{len(pairs)} of {len(files)} pictures of {name} ({report.json_file}) are also "
            f"trained on, so its results say little of new pictures: {listed(cases)}"
        )


def _check_learnt_classes(
    name: str, reports: Mapping[str, Report | None], train: Sequence[str]
) -> None:
    """Warn of classes to evaluate on that no object to train on has.

    Raises:
        DataError: as :func:`unlearnt_classes`.
    """
    sources = [reports[other] for other in train]
    report = reports[name]
    if report is None or not sources or None in sources:
        return
    if unlearnt := unlearnt_classes(report, sources, listed(train)):
        logger.warning(
            f"{counted(len(unlearnt), 'class')} of {name} ({report.json_file}) without an object "
            f"in {listed(train)}, so that AP counts 0 for {listed(unlearnt, 5)}"
        )


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
    learnt = {
        c for source in sources for number, c in source.categories.items() if source.counts[number]
    }
    classes = [c for number, c in report.categories.items() if report.counts[number]]
    unlearnt = [c for c in classes if c not in learnt]
    if learnt and classes and unlearnt == classes:
        raise DataError(
            f"{report.json_file} has objects of {listed(classes, 5)}, and {train} of none of these "
            f"but of {listed(sorted(learnt), 5)}; evaluate on data with the same classes, or train "
            "with --single-class if all objects are of one kind."
        )
    return unlearnt


def check_registered(detector: Detector, train: Sequence[str], test: Sequence[str]) -> None:
    """Refuse registered data sets that are missing or broken, for any model.

    Args:
        detector: its architecture says what it learns.
        train, test: names of data sets to train and to evaluate on.

    Raises:
        ConfigError: a name is not registered.
        DataError: a data set is missing or cannot be used, or those to train on are files without
            an object, and the detector is known to learn from objects.
    """
    reports = {
        name: _check_registered(name, detector, "sample") for name in dict.fromkeys([*train, *test])
    }
    if all(reports[name] for name in train):  # reading others may take long
        _check_something_is_learnt([_Data(n, "train", detector, reports[n]) for n in train])
    for name in test:
        _warn_of_copies(name, reports, train)
        _check_learnt_classes(name, reports, train)


def _check_registered(name: str, detector: Detector, images: str) -> Report | None:
    """The report on a registered data set, or None where it is not COCO instances."""
    files = check_files(name)
    if files is None:
        return None
    report = check_coco(*files, files=images)
    logger.info(
        f"{name}: {counted(report.images, 'image')}, {counted(report.annotations, 'annotation')} "
        f"({counted(report.crowds, 'crowd')}) of {counted(len(report.categories), 'category')}."
    )
    if refusal := report.refusal():
        raise DataError(refusal)
    for kind, finding in report.of(UNUSABLE, REPAIRED, DOUBTFUL).items():
        if kind == MASK and not detector.masks:
            continue
        logger.warning(
            f"{report.json_file}: {finding.count} x {kind.text}; the first: {finding.first[0]}."
        )
    names = MetadataCatalog.get(name).get("thing_classes")
    if names is not None and list(names) != list(report.categories.values()):
        raise DataError(
            f"{report.json_file} holds {len(report.categories)} categories "
            f"({listed(report.categories.values(), 5)}) that are not those of the data set {name} "
            f"({listed(names, 5)}); give your own data with --train-json and --train-images, or "
            "--test-json and --test-images."
        )
    return report


class Instances(NamedTuple):
    """The instances of a data set, in numbers.

    Attributes:
        source: their place, for messages.
        annotations: number of annotations, with crowds.
        objects: number of annotations to train on: they are no crowds, and have a box.
        unmasked: annotations without a mask.
        has_key: whether any image has the key "annotations".
        ids: each category_id of objects, with an image that has it; only for records.
    """

    source: str
    annotations: int
    objects: int
    unmasked: int
    has_key: bool
    ids: dict[Any, str]

    @classmethod
    def of_report(cls, report: Report) -> Instances:
        """The instances of a COCO file."""
        annotations = report.usable + report.crowds
        unmasked = annotations - report.masks
        return cls(report.json_file, annotations, report.usable, unmasked, True, {})

    @classmethod
    def of_records(cls, name: str) -> Instances | None:
        """The instances of a registered data set of any kind; None where it gives no list of
        images.

        Raises:
            DataError: it cannot be read.
        """
        advice = "put its files there, or correct how it is registered"
        errors = (OSError, ImportError, AssertionError)
        with refused(DataError, f"The data set {name} cannot be read", advice, *errors):
            records = DatasetCatalog.get(name)
        if not isinstance(records, list):
            return None
        annotations = [(a, r) for r in records for a in r.get("annotations", ())]
        objects = [(a, r) for a, r in annotations if not a.get("iscrowd", 0)]
        ids: dict[Any, str] = {}
        for annotation, record in objects:
            number = annotation.get("category_id")
            # the text that the message shows, for values that are no numbers
            key = number if isinstance(number, Real) else repr(number)
            ids.setdefault(key, record.get("file_name", ""))
        unmasked = sum(not a.get("segmentation") for a, _ in annotations)
        has_key = any("annotations" in record for record in records)
        return cls(name, len(annotations), len(objects), unmasked, has_key, ids)


class _Data(NamedTuple):
    """A data set and what a detector does with it.

    Attributes:
        name: under which it is registered.
        split: what it is for, "train" or "test".
        detector: what its configuration says.
        report: on its file; None where it has no file in COCO's format.
        read: gives the instances that a registered data set loads.
    """

    name: str
    split: str
    detector: Detector
    report: Report | None = None
    read: Callable[[str], Instances | None] = Instances.of_records

    def meta(self, key: str) -> Any:
        value = MetadataCatalog.get(self.name).get(key)
        if key == "thing_classes" and value is None and self.report:
            return list(self.report.categories.values())
        return value

    def needs(self, kind: str) -> bool:
        """Whether the detector learns from, or is measured by, ground truth of a kind."""
        if kind == "keypoints":
            return self.detector.keypoints is not None
        if kind == "instances" and self.split == "test":
            return kind in evaluated(self.detector, self.name)
        return not kind or kind in predictions(self.detector.architecture)

    def masks(self) -> bool:
        """Whether masks are learnt or measured; Pascal VOC measures boxes."""
        measured = self.split == "train" or self.meta("evaluator_type") != "pascal_voc"
        return self.detector.masks and measured

    def instances(self) -> Instances | None:
        # Detectron2 gives COCO's panoptic form a file of instances only for the evaluation. The
        # form with "separated" in its name has semantic masks in addition to the instances.
        is_panoptic = self.meta("evaluator_type") == "coco_panoptic_seg"
        in_file = self.split == "test" or not is_panoptic or self.meta("sem_seg_root") is not None
        return Instances.of_report(self.report) if self.report and in_file else self.read(self.name)


class _Rule(NamedTuple):
    """Why a data set is refused.

    Attributes:
        splits: whether it applies to data to "train" on, to "test" on, or both.
        needs: the kind of ground truth that it is about; "" for any.
        error: the class of the error.
        fault: a sentence about a data set; None where the detector can use it.
    """

    splits: tuple[str, ...]
    needs: str
    error: type[UserError]
    fault: Callable[[_Data], str | None]


_COCO_KEYPOINTS = 17
_SAMPLED = 100  # number of images of segments whose heads are read before a training
# predictions that cannot be learnt from data of an evaluator_type
_WITHOUT = {
    **dict.fromkeys(("coco", "lvis", "pascal_voc"), ("semantic", "semantic masks")),
    **dict.fromkeys(("sem_seg", "cityscapes_sem_seg"), ("instances", "instances")),
}


def _no_truth(data: _Data, where: str = "") -> str | None:
    detector = data.detector
    prediction, lacking = _WITHOUT.get(data.meta("evaluator_type"), ("", ""))
    if prediction not in predictions(detector.architecture):
        return None
    return (
        f"{detector.keys['architecture']} {detector.architecture} learns from {lacking}, and "
        f"{data.name} has none; name another data set in {detector.keys[data.split]}{where}."
    )


def _another(field_name: str, what: str, key: str) -> Callable[[_Data], str | None]:
    """The fault of a data set whose number differs from a field of the detector, or None."""

    def fault(data: _Data) -> str | None:
        value, here = data.meta(key), getattr(data.detector, field_name)
        is_list = isinstance(value, (list, tuple))
        number = len(value) if is_list else value
        if number is None or here is None or number == here:
            return None
        names = f" ({listed(value, 5)})" if is_list else ""
        place = data.detector.keys.get(field_name)
        return (
            f"{place} is {here}, but {data.name} has {number} {what}{names}; set {place} to "
            f"{number}."
        )

    return fault


def _no_keypoints(data: _Data) -> str | None:
    if None not in (data.meta("keypoint_names"), data.meta("keypoint_flip_map")):
        return None
    return (
        f"MODEL.KEYPOINT_ON is on, but the data set {data.name} names no keypoints; give its JSON "
        'file a category with a list of names, "keypoints", register it with keypoint_names and '
        "keypoint_flip_map, or set MODEL.KEYPOINT_ON False."
    )


def _other_sigmas(data: _Data) -> str | None:
    sigmas, names = data.detector.sigmas or _COCO_KEYPOINTS, data.meta("keypoint_names")
    if sigmas == len(names):
        return None
    return (
        f"TEST.KEYPOINT_OKS_SIGMAS holds {sigmas} numbers (those of COCO if it is empty), but "
        f"{data.name} has {len(names)} keypoints; give one for each, such as 0.05."
    )


def _no_key(data: _Data) -> str | None:
    instances = data.instances()
    # A model of another project may learn from other keys.
    if instances is None or instances.has_key or not is_known(data.detector.architecture):
        return None
    return (
        f'{data.name}: no image has the key "annotations", so that there is nothing to train on; '
        "add it, with an empty list where an image has no object."
    )


def _no_boxes(data: _Data) -> str | None:
    instances = data.instances()
    if instances is None or instances.objects or data.report:
        return None
    given = DatasetCatalog[data.name].__wrapped__()  # before some images were left out
    number = sum(not a.get("iscrowd", 0) for r in given for a in r.get("annotations") or ())
    if not number:
        return None
    return (
        f"{data.name}: none of {number} annotations has a box to train on; each needs a "
        '"bbox" of four numbers in pixels and a "bbox_mode", such as BoxMode.XYWH_ABS.'
    )


def _no_objects(data: _Data) -> str | None:
    instances = data.instances()
    if instances is None or instances.objects:
        return None
    return (
        f"{instances.source} holds no annotations to measure by (crowds and unusable boxes do not "
        f"count), so that nothing can be evaluated on {data.name}; add some, or name another data "
        f"set in {data.detector.keys['test']}."
    )


def _no_masks(data: _Data) -> str | None:
    instances = data.instances()
    if instances is None or not data.masks():
        return None
    if not 0 < instances.annotations == instances.unmasked:
        return None
    key = data.detector.keys["masks"]
    return f"{key} is on, but no annotation of {data.name} has a mask; set {option(key, False)}."


def _other_ids(data: _Data) -> str | None:
    instances, classes = data.instances(), data.detector.num_classes
    if instances is None or classes is None:
        return None
    # Detectron2 would cut a number such as 0.5 to a whole one
    outside = [number for number in instances.ids if number not in range(classes)]
    if not outside:
        return None
    return (
        f"{data.name}: an object in {printable(instances.ids[outside[0]])} has the category_id "
        f"{outside[0]}, but {data.detector.keys['num_classes']} is {classes}; number the classes "
        f"from 0 to {classes - 1}, or set the key to their number."
    )


_TRAIN, _TEST, _BOTH = ("train",), ("test",), ("train", "test")
# in the order in which they are checked
# fmt: off
_RULES = (
    _Rule(_TRAIN, "", ConfigError, _no_truth),
    _Rule(_BOTH, "semantic", ConfigError, _another(
        "semantic_classes", "classes of semantic masks", "stuff_classes")),
    _Rule(_BOTH, "semantic", ConfigError, _another(
        "ignored_label", "for pixels without a class", "ignore_label")),
    _Rule(_BOTH, "keypoints", ConfigError, _no_keypoints),
    _Rule(_BOTH, "keypoints", ConfigError, _another("keypoints", "keypoints", "keypoint_names")),
    _Rule(_TEST, "keypoints", ConfigError, _other_sigmas),
    _Rule(_BOTH, "", ConfigError, _another("num_classes", "categories", "thing_classes")),
    _Rule(_TRAIN, "instances", DataError, _no_key),
    _Rule(_TRAIN, "instances", DataError, _no_boxes),
    _Rule(_TEST, "instances", DataError, _no_objects),
    _Rule(_BOTH, "instances", ConfigError, _no_masks),
    _Rule(_BOTH, "instances", ConfigError, _other_ids),
)
# fmt: on


def check_panoptic(metadata: Any) -> None:
    """Check a panoptic file and the heads of some of its images; the evaluation reads all images.

    Raises:
        DataError: the file is not in COCO's format, or an image of segments is not RGB.
    """
    entries = list(read_panoptic(metadata.panoptic_json)[0].values())
    for entry in entries[:: -(-len(entries) // _SAMPLED) or 1]:
        path = os.path.join(metadata.panoptic_root, entry["file_name"])
        try:
            with PathManager.open(path, "rb") as file:
                mode = Image.open(file).mode
        except Exception:  # Pillow may raise anything; the evaluation says what is wrong
            continue
        check_segments_mode(path, mode)
