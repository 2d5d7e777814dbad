"""The classes of a run: kept in its checkpoints, and met by name in all data that follow."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.predictions import Detector, predictions
from lambda_det.detection.data.registration import is_coco
from lambda_det.errors import DataError, UserError, listed

__all__ = ["align", "describe", "of_checkpoint", "renumbered", "write_categories"]

logger = logging.getLogger(__name__)

ENTRY = "dataset"  # of a checkpoint
# Detectron2's names of what a data set says of its classes
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
_THING_IDS = "thing_dataset_id_to_contiguous_id"
_IDS = {"thing_ids": _THING_IDS, "stuff_ids": "stuff_dataset_id_to_contiguous_id"}
_FILE = "categories.json"  # beside the results of an evaluation


def describe(datasets: Iterable[str]) -> dict[str, Any]:
    """What registered data sets say of their classes, as plain values.

    Returns:
        Names, colours, keypoints and ignored label under Detectron2's keys, and the ids of the data
        set in the order of the classes, as thing_ids and stuff_ids. Of each the first that a data
        set has.
    """
    found: dict[str, Any] = {}
    for name in datasets:
        if name not in DatasetCatalog:
            continue
        metadata = MetadataCatalog.get(name)
        known = {key: metadata.get(key) for key in _KEPT}
        known["thing_classes"] = _thing_classes(name)
        for key, source in _IDS.items():
            ids = metadata.get(source)
            known[key] = ids and sorted(ids, key=ids.get)
        for key, value in known.items():
            if value is not None:
                found.setdefault(key, _plain(value))
    return found


def _thing_classes(name: str) -> list[str] | None:
    """Of a registered data set; those of its file where it was not read yet."""
    known = MetadataCatalog.get(name).get("thing_classes")
    if known is None and is_coco(name):
        try:
            metadata = MetadataCatalog.get(name)
            report = check_coco(metadata.json_file, metadata.image_root, files="none")
        except UserError:  # the check of the data reports it
            return None
        known = list(report.categories.values())
    return None if known is None else list(known)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def of_checkpoint(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint says of the classes that it was trained on; None where it says nothing.

    Args:
        content: of the file. Checkpoints of other projects and of earlier versions say nothing.
    """
    entry = content.get(ENTRY)
    if not isinstance(entry, Mapping):
        return None
    names = entry.get("thing_classes", [])
    well_formed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return dict(entry) if well_formed else None


def align(detector: Detector, datasets: Iterable[str], run: Mapping[str, Any], source: str) -> None:
    """Number the classes of registered data sets as a run has them, which are found by name.

    What they load from then on, and their metadata, have the order of the run.

    Args:
        detector: only what it predicts is compared.
        datasets: those that are not registered are left out.
        run: of :func:`describe`.
        source: where ``run`` is from, for messages.

    Raises:
        DataError: a data set has other classes, or its semantic masks or keypoints another order,
            which cannot be changed here.
    """
    predicted = predictions(detector.architecture)
    in_order = ["stuff_classes"] if "semantic" in predicted else []
    in_order += ["keypoint_names"] if detector.keypoints is not None else []
    for name in dict.fromkeys(datasets):
        if name not in DatasetCatalog:
            continue
        for key in in_order:
            here, there = MetadataCatalog.get(name).get(key), run.get(key)
            if None not in (here, there) and list(here) != list(there):
                raise _differ(key, name, here, source, there)
        here, there = _thing_classes(name), run.get("thing_classes")
        if "instances" not in predicted or None in (here, there) or here == there:
            continue
        if sorted(here) != sorted(there):
            raise _differ("classes", name, here, source, there)
        _renumber(name, here, there)
        logger.info(f"The classes of {name} are in another order than in {source}: taken by name")


def _differ(
    what: str, name: str, here: Sequence[str], source: str, there: Sequence[str]
) -> DataError:
    number = next(
        (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b),
        min(len(here), len(there)),
    )
    return DataError(
        f"The {what} of {name} ({listed(here, 8)}) are not those of {source} "
        f"({listed(there, 8)}), first in number {number}; give data with the same, or start "
        "another run with these."
    )


def _ids(name: str) -> dict[Any, int] | None:
    """The places of a data set's own category ids among its classes; None where it has none."""
    metadata = MetadataCatalog.get(name)
    ids = metadata.get(_THING_IDS)
    if ids is None and is_coco(name):
        report = check_coco(metadata.json_file, metadata.image_root, files="none")
        ids = {key: place for place, key in enumerate(report.categories)}
    return ids


def _renumber(name: str, here: list[str], there: list[str]) -> None:
    """Let a registered data set have the classes ``here`` in the order ``there``."""
    places: dict[str, list[int]] = {}
    for number, label in enumerate(there):
        places.setdefault(label, []).append(number)
    new = [places[label].pop(0) for label in here]  # by the number of now
    ids = _ids(name)
    before, load = MetadataCatalog.pop(name), DatasetCatalog.pop(name)
    values = {"file_classes": here, **before.as_dict(), "thing_classes": list(there)}
    if len(colours := values.get("thing_colors") or ()) == len(new):
        values["thing_colors"] = [colours[number] for number in np.argsort(new)]
    if ids is not None:
        values[_THING_IDS] = {key: new[place] for key, place in ids.items()}
    after = MetadataCatalog[name] = Metadata(**values)

    @functools.wraps(load)
    def load_renumbered() -> list[dict[str, Any]]:
        MetadataCatalog[name] = before  # what loads a data set may set what it was
        try:
            records = load()
        finally:
            MetadataCatalog[name] = after
        return [_renumbered(record, new) for record in records]

    DatasetCatalog.register(name, load_renumbered)


def _renumbered(record: dict[str, Any], new: Sequence[int]) -> dict[str, Any]:
    if "annotations" not in record:
        return record
    annotations = [{**a, "category_id": new[a["category_id"]]} for a in record["annotations"]]
    return {**record, "annotations": annotations}


# ------------------------------------------------------------------ beside the results of COCO's AP
def write_categories(folder: str, metadata: Metadata) -> None:
    """Write which ids of results in COCO's format have which name, beside them."""
    ids = metadata.get(_THING_IDS)
    names = metadata.get("thing_classes")
    if ids and names:
        content = [{"id": key, "name": names[place]} for key, place in ids.items()]
        Path(folder, _FILE).write_text(json.dumps(content), "utf-8")


def renumbered(
    entries: list[dict[str, Any]], results: str | Path, dataset: str
) -> list[dict[str, Any]]:
    """Results in COCO's format with the ids that a registered data set has for their names now.

    Args:
        entries: as they were written.
        results: their file; the names are in one beside it, where it is not of an earlier version.
        dataset: that was evaluated.
    """
    try:
        written = json.loads(Path(results).with_name(_FILE).read_text("utf-8"))
        names = {entry["id"]: entry["name"] for entry in written}
    except (OSError, ValueError, KeyError, TypeError):
        return entries
    now, ids = _thing_classes(dataset), _ids(dataset)
    if now is None or ids is None:
        return entries
    id_of = {now[place]: key for key, place in ids.items()}
    new = {key: id_of.get(name, key) for key, name in names.items()}
    if missing := [name for name in names.values() if name not in id_of]:
        raise DataError(
            f"{results} has predictions of {listed(missing, 8)}, which {dataset} does not have now "
            f"({listed(now, 8)}); evaluate the run again on these data."
        )
    return [{**e, "category_id": new.get(e["category_id"], e["category_id"])} for e in entries]
