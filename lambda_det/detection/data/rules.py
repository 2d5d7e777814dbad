"""Why a data set cannot be used by a detector: one table of rules, each about one data set."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.config import option
from lambda_det.detection.data.predictions import Detector, evaluated, is_known, predictions
from lambda_det.detection.data.report import Report
from lambda_det.errors import ConfigError, DataError, UserError, listed, printable, refused

__all__ = ["RULES", "Instances", "UsedData", "no_truth"]


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


class UsedData(NamedTuple):
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


class Rule(NamedTuple):
    """Why a data set is refused.

    Attributes:
        splits: whether it applies to data to "train" on, to "test" on, or both.
        needs: the kind of ground truth that it is about; "" for any.
        error: the class of the error.
        fault: a sentence about a data set; None where the detector can use it.
        in_training: whether it applies only where there are data to train on as well.
    """

    splits: tuple[str, ...]
    needs: str
    error: type[UserError]
    fault: Callable[[UsedData], str | None]
    in_training: bool = False

    def is_for(self, data: UsedData, is_training: bool) -> bool:
        applies = data.split in self.splits and (is_training or not self.in_training)
        return applies and data.needs(self.needs)


_COCO_KEYPOINTS = 17
# predictions that cannot be learnt from data of an evaluator_type
_WITHOUT = {
    **dict.fromkeys(("coco", "lvis", "pascal_voc"), ("semantic", "semantic masks")),
    **dict.fromkeys(("sem_seg", "cityscapes_sem_seg"), ("instances", "instances")),
}


def no_truth(data: UsedData, where: str = "") -> str | None:
    """The fault of a data set that lacks what the detector learns from, or None."""
    detector = data.detector
    prediction, lacking = _WITHOUT.get(data.meta("evaluator_type"), ("", ""))
    if prediction not in predictions(detector.architecture):
        return None
    return (
        f"{detector.keys['architecture']} {detector.architecture} learns from {lacking}, and "
        f"{data.name} has none; name another data set in {detector.keys[data.split]}{where}."
    )


def _another(field_name: str, what: str, key: str) -> Callable[[UsedData], str | None]:
    """The fault of a data set whose number differs from a field of the detector, or None."""

    def fault(data: UsedData) -> str | None:
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


def _no_keypoints(data: UsedData) -> str | None:
    if None not in (data.meta("keypoint_names"), data.meta("keypoint_flip_map")):
        return None
    return (
        f"MODEL.KEYPOINT_ON is on, but the data set {data.name} names no keypoints; give its JSON "
        'file a category with a list of names, "keypoints", register it with keypoint_names and '
        "keypoint_flip_map, or set MODEL.KEYPOINT_ON False."
    )


def _other_sigmas(data: UsedData) -> str | None:
    sigmas, names = data.detector.sigmas or _COCO_KEYPOINTS, data.meta("keypoint_names")
    if sigmas == len(names):
        return None
    return (
        f"TEST.KEYPOINT_OKS_SIGMAS holds {sigmas} numbers (those of COCO if it is empty), but "
        f"{data.name} has {len(names)} keypoints; give one for each, such as 0.05."
    )


def _no_key(data: UsedData) -> str | None:
    instances = data.instances()
    # A model of another project may learn from other keys.
    if instances is None or instances.has_key or not is_known(data.detector.architecture):
        return None
    return (
        f'{data.name}: no image has the key "annotations", so that there is nothing to train on; '
        "add it, with an empty list where an image has no object."
    )


def _no_boxes(data: UsedData) -> str | None:
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


def _no_objects(data: UsedData) -> str | None:
    instances = data.instances()
    if instances is None or instances.objects:
        return None
    return (
        f"{instances.source} holds no annotations to measure by (crowds and unusable boxes do not "
        f"count), so that nothing can be evaluated on {data.name}; add some, or name another data "
        f"set in {data.detector.keys['test']}."
    )


def _no_masks(data: UsedData) -> str | None:
    instances = data.instances()
    if instances is None or not data.masks():
        return None
    if not 0 < instances.annotations == instances.unmasked:
        return None
    key = data.detector.keys["masks"]
    return f"{key} is on, but no annotation of {data.name} has a mask; set {option(key, False)}."


def _other_ids(data: UsedData) -> str | None:
    instances, classes = data.instances(), data.detector.num_classes
    if instances is None or classes is None:
        return None
    # Detectron2 would cut a number such as 0.5 to a whole one
    outside = [number for number in instances.foreign_ids if number not in range(classes)]
    if not outside:
        return None
    number, image = outside[0], printable(instances.foreign_ids[outside[0]])
    return (
        f"{data.name}: an object in {image} has the category_id {number}, but "
        f"{data.detector.keys['num_classes']} is {classes}; number the classes from 0 to "
        f"{classes - 1}, or set the key to their number."
    )


_TRAIN, _TEST, _BOTH = ("train",), ("test",), ("train", "test")
# in the order in which they are checked
# fmt: off
RULES = (
    Rule(_TRAIN, "", ConfigError, no_truth),
    Rule(_BOTH, "semantic", ConfigError, _another(
        "semantic_classes", "classes of semantic masks", "stuff_classes")),
    Rule(_BOTH, "semantic", ConfigError, _another(
        "ignored_label", "for pixels without a class", "ignore_label")),
    Rule(_BOTH, "keypoints", ConfigError, _no_keypoints),
    Rule(_BOTH, "keypoints", ConfigError, _another("keypoints", "keypoints", "keypoint_names")),
    Rule(_TEST, "keypoints", ConfigError, _other_sigmas),
    Rule(_BOTH, "", ConfigError, _another("num_classes", "categories", "thing_classes")),
    Rule(_TRAIN, "instances", DataError, _no_key),
    Rule(_TRAIN, "instances", DataError, _no_boxes),
    Rule(_TEST, "instances", DataError, _no_objects),
    # an evaluation alone has the AP of boxes where there are no masks
    Rule(_BOTH, "instances", ConfigError, _no_masks, in_training=True),
    Rule(_BOTH, "instances", ConfigError, _other_ids),
)
# fmt: on
