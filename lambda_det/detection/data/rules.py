"""Why a data set cannot be used by a detector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.config import option
from lambda_det.detection.data.predictions import Detector, evaluated
from lambda_det.detection.data.registration import given_name
from lambda_det.detection.data.report import Report
from lambda_det.errors import ConfigError, DataError, listed, printable, refused


class Instances(NamedTuple):
    """The instances of a data set, in numbers.

    Attributes:
        source: their place, for messages.
        annotations: number of annotations, with crowds.
        objects: number of annotations to train on: they are no crowds, and have a box.
        unmasked: annotations without a mask.
        has_key: whether any image has the key "annotations".
        foreign_ids: each category_id of objects that somebody else numbered, with an image that has
            it; none where :func:`read_coco` numbered them.
    """

    source: str
    annotations: int
    objects: int
    unmasked: int
    has_key: bool
    foreign_ids: dict[Any, str]

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


@dataclass
class UsedData:
    """A data set and what a detector does with it.

    Attributes:
        name: under which it is registered.
        split: what it is for, "train" or "test".
        detector: what its configuration says.
        report: on its file; None where it has no file in COCO's format.
    """

    name: str
    split: str
    detector: Detector
    report: Report | None = None

    @property
    def given(self) -> str:
        """What its user calls it."""
        return given_name(self.name)

    def meta(self, key: str) -> Any:
        value = MetadataCatalog.get(self.name).get(key)
        if key == "thing_classes" and value is None and self.report:
            return self.report.classes
        return value

    def needs(self, kind: str) -> bool:
        """Whether the detector learns from, or is measured by, ground truth of a kind."""
        if kind == "instances" and self.split == "test":
            return kind in evaluated(self.detector, self.name)
        return not kind or self.detector.predicts(kind)

    def masks(self) -> bool:
        """Whether masks are learnt or measured; Pascal VOC measures boxes."""
        measured = self.split == "train" or self.meta("evaluator_type") != "pascal_voc"
        return self.detector.masks and measured

    @cached_property
    def instances(self) -> Instances | None:
        # Detectron2 gives COCO's panoptic form a file of instances only for the evaluation. The
        # form with "separated" in its name has semantic masks in addition to the instances.
        is_panoptic = self.meta("evaluator_type") == "coco_panoptic_seg"
        in_file = self.split == "test" or not is_panoptic or self.meta("sem_seg_root") is not None
        if self.report and in_file:
            return Instances.of_report(self.report)
        return Instances.of_records(self.name)


_COCO_KEYPOINTS = 17
# predictions that cannot be learnt from data of an evaluator_type
_WITHOUT = {
    **dict.fromkeys(("coco", "lvis", "pascal_voc"), ("semantic", "semantic masks")),
    **dict.fromkeys(("sem_seg", "cityscapes_sem_seg"), ("instances", "instances")),
}
# The numbers of a detector that data have as well: the kind of ground truth, the field of the
# detector, the words, and the key of the metadata
_NUMBERS = (
    ("semantic", "semantic_classes", "classes of semantic masks", "stuff_classes"),
    ("semantic", "ignored_label", "for pixels without a class", "ignore_label"),
    ("keypoints", "keypoints", "keypoints", "keypoint_names"),
    ("", "num_classes", "categories", "thing_classes"),
)


def refuse_no_truth(data: UsedData, where: str = "") -> None:
    """Refuse a data set that lacks what the detector learns from."""
    detector = data.detector
    prediction, lacking = _WITHOUT.get(data.meta("evaluator_type"), ("", ""))
    if detector.predicts(prediction):
        raise ConfigError(
            f"{detector.keys['architecture']} {detector.architecture} learns from {lacking}, and "
            f"{data.given} has none; name another data set in {detector.keys[data.split]}{where}."
        )


def refuse_unfit(data: UsedData, *, in_training: bool) -> None:
    """Refuse a data set for what is nearest to the cause.

    Args:
        in_training: whether there are data to train on.
    """
    if data.split == "train":
        refuse_no_truth(data)
    if data.needs("keypoints"):
        _refuse_keypoints(data)
    for kind, field_name, what, key in _NUMBERS:
        value, here = data.meta(key), getattr(data.detector, field_name)
        is_list = isinstance(value, (list, tuple))
        number = len(value) if is_list else value
        if data.needs(kind) and None not in (number, here) and number != here:
            names = f" ({listed(value, 5)})" if is_list else ""
            place = data.detector.keys.get(field_name)
            raise ConfigError(
                f"{place} is {here}, but {data.given} has {number} {what}{names}; set {place} to "
                f"{number}."
            )
    if data.needs("instances") and data.instances is not None:
        _refuse_instances(data, data.instances, in_training)


def _refuse_keypoints(data: UsedData) -> None:
    names = data.meta("keypoint_names")
    sigmas = data.detector.sigmas or _COCO_KEYPOINTS
    if None in (names, data.meta("keypoint_flip_map")):
        raise ConfigError(
            f"MODEL.KEYPOINT_ON is on, but {data.given} names no keypoints; give its "
            'JSON file a category with a list of names, "keypoints", register it with '
            "keypoint_names and keypoint_flip_map, or set MODEL.KEYPOINT_ON False."
        )
    if data.split == "test" and data.detector.keypoints == len(names) != sigmas:
        raise ConfigError(
            f"TEST.KEYPOINT_OKS_SIGMAS holds {sigmas} numbers (those of COCO if it is empty), but "
            f"{data.given} has {len(names)} keypoints; give one for each, such as 0.05."
        )


def _refuse_instances(data: UsedData, instances: Instances, in_training: bool) -> None:
    keys, name, is_training = data.detector.keys, data.given, data.split == "train"
    # A model of another project may learn from other keys
    if is_training and not instances.has_key and data.detector.is_known:
        raise DataError(
            f'{name}: no image has the key "annotations", so that there is nothing to train on; '
            "add it, with an empty list where an image has no object."
        )
    if not is_training and not instances.objects:
        raise DataError(
            f"{instances.source} holds no annotations to measure by (crowds and unusable boxes do "
            f"not count), so that nothing can be evaluated on {name}; add some, or name another "
            f"data set in {keys['test']}."
        )
    # an evaluation alone has the AP of boxes where there are no masks
    if in_training and data.masks() and 0 < instances.annotations == instances.unmasked:
        switch = option(keys["masks"], False)
        raise ConfigError(
            f"{keys['masks']} is on, but no annotation of {name} has a mask; set {switch}."
        )
    classes = data.detector.num_classes
    for number, image in instances.foreign_ids.items():
        # Detectron2 would cut a number such as 0.5 to a whole one
        if classes is not None and number not in range(classes):
            raise ConfigError(
                f"{name}: an object in {printable(image)} has the category_id {number}, but "
                f"{keys['num_classes']} is {classes}; number the classes from 0 to {classes - 1}, "
                "or set the key to their number."
            )
