"""Why a data set cannot be used by a detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.config import option
from lambda_det.detection.data.predictions import Detector, evaluated, is_known, predictions
from lambda_det.detection.data.report import Report
from lambda_det.errors import ConfigError, DataError, UserError, listed, printable, refused


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


def faults(data: UsedData, *, in_training: bool) -> Iterator[UserError]:
    """Why a data set is refused, what is nearest to its cause first.

    Args:
        in_training: whether there are data to train on.
    """
    if data.split == "train" and (fault := no_truth(data)):
        yield ConfigError(fault)
    if data.needs("keypoints"):
        yield from _of_keypoints(data)
    for kind, field_name, what, key in _NUMBERS:
        value, here = data.meta(key), getattr(data.detector, field_name)
        is_list = isinstance(value, (list, tuple))
        number = len(value) if is_list else value
        if data.needs(kind) and None not in (number, here) and number != here:
            names = f" ({listed(value, 5)})" if is_list else ""
            place = data.detector.keys.get(field_name)
            yield ConfigError(
                f"{place} is {here}, but {data.name} has {number} {what}{names}; set {place} to "
                f"{number}."
            )
    if data.needs("instances") and (instances := data.instances()) is not None:
        yield from _of_instances(data, instances, in_training)


def _of_keypoints(data: UsedData) -> Iterator[UserError]:
    names = data.meta("keypoint_names")
    sigmas = data.detector.sigmas or _COCO_KEYPOINTS
    if None in (names, data.meta("keypoint_flip_map")):
        yield ConfigError(
            f"MODEL.KEYPOINT_ON is on, but the data set {data.name} names no keypoints; give its "
            'JSON file a category with a list of names, "keypoints", register it with '
            "keypoint_names and keypoint_flip_map, or set MODEL.KEYPOINT_ON False."
        )
    elif data.split == "test" and data.detector.keypoints == len(names) != sigmas:
        yield ConfigError(
            f"TEST.KEYPOINT_OKS_SIGMAS holds {sigmas} numbers (those of COCO if it is empty), but "
            f"{data.name} has {len(names)} keypoints; give one for each, such as 0.05."
        )


def _of_instances(data: UsedData, instances: Instances, in_training: bool) -> Iterator[UserError]:
    keys, name, is_training = data.detector.keys, data.name, data.split == "train"
    # A model of another project may learn from other keys
    if is_training and not instances.has_key and is_known(data.detector.architecture):
        yield DataError(
            f'{name}: no image has the key "annotations", so that there is nothing to train on; '
            "add it, with an empty list where an image has no object."
        )
    if not is_training and not instances.objects:
        yield DataError(
            f"{instances.source} holds no annotations to measure by (crowds and unusable boxes do "
            f"not count), so that nothing can be evaluated on {name}; add some, or name another "
            f"data set in {keys['test']}."
        )
    # an evaluation alone has the AP of boxes where there are no masks
    if in_training and data.masks() and 0 < instances.annotations == instances.unmasked:
        switch = option(keys["masks"], False)
        yield ConfigError(
            f"{keys['masks']} is on, but no annotation of {name} has a mask; set {switch}."
        )
    classes = data.detector.num_classes
    # Detectron2 would cut a number such as 0.5 to a whole one
    outside = (
        [] if classes is None else [n for n in instances.foreign_ids if n not in range(classes)]
    )
    for number in outside:
        yield ConfigError(
            f"{name}: an object in {printable(instances.foreign_ids[number])} has the category_id "
            f"{number}, but {keys['num_classes']} is {classes}; number the classes from 0 to "
            f"{classes - 1}, or set the key to their number."
        )
