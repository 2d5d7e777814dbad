"""The instances of data sets: what there is of them, and whether a detector can use it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.config import option
from lambda_det.detection.data.predictions import Detector, evaluated, is_known, predictions
from lambda_det.detection.data.records import usable_box
from lambda_det.detection.data.report import Report
from lambda_det.errors import ConfigError, DataError, UserError, printable, reason

logger = logging.getLogger(__name__)


@dataclass
class Instances:
    """What a data set holds of instances.

    Attributes:
        source: where they are, for messages.
        annotations, crowds: how many there are; crowds are annotations, too.
        unmasked: annotations without a mask.
        usable: whether one that is no crowd has a box to train on.
        has_key: whether any image has the key "annotations".
        ids: each category_id of those that are no crowds, with an image of it; of records alone.
    """

    source: str
    annotations: int = 0
    crowds: int = 0
    unmasked: int = 0
    usable: bool = False
    has_key: bool = False
    ids: dict[Any, str] = field(default_factory=dict)

    @classmethod
    def of_report(cls, report: Report) -> Instances:
        """Those of a COCO file."""
        unmasked = report.problems.get("annotation without segmentation")
        return cls(
            source=report.json_file,
            annotations=report.annotations,
            crowds=report.crowds,
            unmasked=unmasked.count if unmasked else 0,
            usable=report.usable > 0,
            has_key=True,
        )

    @classmethod
    def of_records(cls, name: str) -> Instances | None:
        """Those of a registered data set of any kind; None where it gives no list of images.

        Raises:
            DataError: it cannot be read.
        """
        try:
            records = DatasetCatalog.get(name)
        except (OSError, ImportError, AssertionError) as error:
            raise DataError(
                f"The data set {name} cannot be read ({reason(error)}); put its files there, or "
                "correct how it is registered."
            ) from error
        if not isinstance(records, list):
            return None
        found = cls(source=name)
        for record in records:
            found.has_key |= "annotations" in record
            for annotation in record.get("annotations", ()):
                found._add(annotation, record)
        return found

    def _add(self, annotation: dict[str, Any], record: dict[str, Any]) -> None:
        self.annotations += 1
        # A mask may be an array, which has no truth value
        mask = annotation.get("segmentation")
        self.unmasked += mask is None or len(mask) == 0
        if annotation.get("iscrowd", 0):
            self.crowds += 1
            return
        self.usable = self.usable or usable_box(annotation) is not None
        number = annotation.get("category_id")
        # Of what is no number, the text that the message shows
        key = number if isinstance(number, Real) else repr(number)
        self.ids.setdefault(key, record.get("file_name", ""))

    def outside(self, classes: int | None) -> list[Any]:
        """The values of category_id that are not from 0 to ``classes`` - 1."""
        if classes is None:
            return []
        return [n for n in self.ids if not (isinstance(n, Real) and 0 <= n < classes)]


class _Rule(NamedTuple):
    """Why the instances of a data set are refused.

    Attributes:
        splits: whether it holds for data to "train" on, to "test" on, or both.
        error: the class of the error.
        is_broken: whether a detector cannot use them.
        sentence: of the detector, the instances and the name of the data set.
    """

    splits: tuple[str, ...]
    error: type[UserError]
    is_broken: Callable[[Detector, Instances], bool]
    sentence: Callable[[Detector, Instances, str], str]


def _name_outside(detector: Detector, found: Instances, name: str) -> str:
    number, classes = found.outside(detector.num_classes)[0], detector.num_classes
    return (
        f"{name}: an object in {printable(found.ids[number])} has the category_id {number}, but "
        f"{detector.keys['num_classes']} is {classes}; number the classes from 0 to "
        f"{classes - 1}, or set the key to their number."
    )


# In the order in which they are asked
_RULES = (
    _Rule(
        ("train",),
        DataError,
        # A model of another project may learn from other keys.
        lambda d, i: not i.has_key and is_known(d.architecture),
        lambda d, i, name: (
            f'{name}: no image has the key "annotations", so that there is nothing to train on; '
            "add it, with an empty list where an image has no object."
        ),
    ),
    _Rule(
        ("train",),
        DataError,
        lambda d, i: i.annotations > i.crowds and not i.usable,
        lambda d, i, name: (
            f"{name}: none of {i.annotations} annotations has a box to train on; each needs a "
            '"bbox" of four numbers in pixels and a "bbox_mode", such as BoxMode.XYWH_ABS.'
        ),
    ),
    _Rule(
        ("train", "test"),
        ConfigError,
        lambda d, i: d.masks and 0 < i.annotations == i.unmasked,
        lambda d, i, name: (
            f"{d.keys['masks']} is on, but no annotation of {name} has a mask; set "
            f"{option(d.keys['masks'], False)}."
        ),
    ),
    _Rule(
        ("train", "test"),
        ConfigError,
        lambda d, i: bool(i.outside(d.num_classes)),
        _name_outside,
    ),
    _Rule(
        ("test",),
        DataError,
        lambda d, i: i.annotations == i.crowds,
        lambda d, i, name: (
            f"{i.source} holds no annotations{' but crowds' if i.crowds else ''}, so that nothing "
            f"can be evaluated on {name}; add some, or name another data set in {d.keys['test']}."
        ),
    ),
)


def check_instances(
    detector: Detector,
    reports: dict[str, Report | None],
    train: Sequence[str],
    test: Sequence[str],
) -> None:
    """Refuse data sets whose instances a detector cannot be trained or evaluated on.

    Args:
        detector: what its configuration says.
        reports: by the name of the data set; None of those that are not in COCO format, which are
            read as they are registered.
        train: registered data sets to train on.
        test: registered data sets to evaluate on.

    Raises:
        ConfigError: a switch or a number of classes in the config does not fit them.
        DataError: they are missing, or none of them can be used.
    """
    read = functools.cache(Instances.of_records)

    def find(name: str, *, in_file: bool) -> Instances | None:
        report = reports[name]
        return Instances.of_report(report) if report and in_file else read(name)

    learnt: dict[str, Instances | None] = {}
    if "instances" in predictions(detector.architecture):
        learnt = {name: find(name, in_file=_loads_instances(name)) for name in train}
    for name, found in learnt.items():
        _refuse("train", detector, name, found)
    if learnt and all(i is not None and i.has_key and not i.usable for i in learnt.values()):
        raise DataError(
            f"{', '.join(learnt)} hold{'' if len(learnt) > 1 else 's'} no annotation to train on "
            "(crowds and boxes without area do not count); add some."
        )
    for name in test:
        if "instances" in evaluated(detector, name):
            # The measure of Pascal VOC has no masks.
            has_masks = MetadataCatalog.get(name).get("evaluator_type") != "pascal_voc"
            measured = replace(detector, masks=detector.masks and has_masks)
            _refuse("test", measured, name, find(name, in_file=True))


def _loads_instances(name: str) -> bool:
    """Whether a data set loads the instances of its file: COCO's panoptic form does not.

    Detectron2 gives that form a file of instances for its evaluation alone. The form with
    "separated" in its name has semantic masks beside the instances.
    """
    metadata = MetadataCatalog.get(name)
    is_panoptic = metadata.get("evaluator_type") == "coco_panoptic_seg"
    return not is_panoptic or metadata.get("sem_seg_root") is not None


def _refuse(split: str, detector: Detector, name: str, found: Instances | None) -> None:
    if found is None:
        return
    for rule in _RULES:
        if split in rule.splits and rule.is_broken(detector, found):
            raise rule.error(rule.sentence(detector, found, name))
    if detector.masks and found.unmasked:
        logger.warning("%s: %d annotations without a mask take their box.", name, found.unmasked)
