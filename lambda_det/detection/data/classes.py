"""The classes of a run: kept in its checkpoints, and compared with the classes of later data."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.data.registration import given_name, is_coco
from lambda_det.errors import DataError, UserError, listed

ENTRY = "dataset"  # of a checkpoint
# Detectron2's names for the facts about the classes of a data set
_KEPT = (
    "thing_classes",
    "thing_colors",
    "stuff_classes",
    "stuff_colors",
    "ignore_label",
    "keypoint_names",
    "keypoint_flip_map",
    "keypoint_connection_rules",
)
# The facts that must be the same in all data: what needs them, and what messages call them
_COMPARED = (
    ("instances", "thing_classes", "classes"),
    ("semantic", "stuff_classes", "semantic classes"),
    ("keypoints", "keypoint_names", "keypoints"),
)
_IDS = {
    "thing_ids": "thing_dataset_id_to_contiguous_id",
    "stuff_ids": "stuff_dataset_id_to_contiguous_id",
}


def facts_of(datasets: Iterable[str]) -> dict[str, Any]:
    """The facts about the classes of registered data sets, as plain values.

    Returns:
        Names, colours, keypoints and ignored label under Detectron2's keys, and the ids of the data
        set in the order of the classes, as thing_ids and stuff_ids. Each is from the first data set
        that has it.
    """
    facts: dict[str, Any] = {}
    for name in datasets:
        if name not in DatasetCatalog:
            continue
        metadata = MetadataCatalog.get(name)
        of_set = {key: metadata.get(key) for key in _KEPT}
        if of_set["thing_classes"] is None and is_coco(name):  # it was not read yet
            with contextlib.suppress(UserError):  # the check of the data reports it
                report = file_report(metadata.json_file, metadata.image_root)
                of_set["thing_classes"] = report.classes
        for key, source in _IDS.items():
            ids = metadata.get(source)
            of_set[key] = ids and sorted(ids, key=ids.get)
        for key, value in of_set.items():
            if value is not None:
                facts.setdefault(key, _plain(value))
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def of_checkpoint(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The classes on which a checkpoint was trained; None where it does not record them.

    Args:
        content: of the file. Checkpoints of other projects do not record them.
    """
    entry = content.get(ENTRY)
    return dict(entry) if isinstance(entry, Mapping) else None


def check(detector: Detector, datasets: Iterable[str], run: Mapping[str, Any], source: str) -> None:
    """Refuse registered data sets unless they have the classes of a run in the same order.

    Args:
        detector: only classes of its predictions are compared.
        datasets: data sets that are not registered are left out.
        run: of :func:`facts_of`.
        source: where ``run`` is from, for messages.

    Raises:
        DataError: a data set has other classes, semantic classes or keypoints, or another order.
    """
    for name in dict.fromkeys(datasets):
        facts = facts_of([name])
        for kind, key, words in _COMPARED:
            if detector.predicts(kind) and key in facts and run.get(key) is not None:
                refuse_others(words, given_name(name), facts[key], source, run[key])


def refuse_others(
    what: str, place: str, here: Sequence[str], source: str, there: Sequence[str]
) -> None:
    """Refuse a list of classes or keypoints that differs from another one; the message has what
    one of both lists alone has, or what stands in other places.

    Args:
        what: "classes", "keypoints".
        place, source: where the lists are from, for the message.
        here, there: the lists.

    Raises:
        DataError: they differ.
    """
    pairs = [(one, other) for one, other in itertools.zip_longest(here, there) if one != other]
    if not pairs:
        return
    alone, missing = Counter(here) - Counter(there), Counter(there) - Counter(here)
    difference = f"the first alone has {listed(alone, 8)}, and the second {listed(missing, 8)}"
    if not (alone or missing):
        difference = f"only in order, {listed((f'{one} for {other}' for one, other in pairs), 8)}"
    raise DataError(
        f"The {what} of {place} differ from those of {source}: {difference}; give data with the "
        "same in the same order, which is by their ids in COCO's format, or start another run "
        "with these."
    )
