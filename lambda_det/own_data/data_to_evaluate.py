"""The data of ``lambda-det evaluate``: a part of the run's, of another data set, or labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from omegaconf import DictConfig

from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.saved_run import SavedRun
from lambda_det.errors import ConfigError, DataError, suggest
from lambda_det.own_data.labels.conversion import as_single_class, give_all_classes
from lambda_det.own_data.labels.table import COCO
from lambda_det.own_data.layouts import Part, as_coco, find_parts
from lambda_det.own_data.run_data import FOLDER, read_sources


def choose_data(
    saved: SavedRun,
    home: Path,
    data: str | None,
    part: str | None,
    labels: str | None,
    images: str | None,
    temporary: Path,
) -> Part | None:
    """The data that the flags name; None for the data on which the run is evaluated.

    Args:
        saved: the run.
        home: its folder.
        data, part, labels, images: as of :func:`lambda_det.own_data.evaluate.evaluate`.
        temporary: a folder for labels that are converted.

    Raises:
        ConfigError: flags do not go together.
        DataError: there is no such part, or it has objects of classes that the run does not have.
    """
    if (labels and (data or part)) or (images and not labels):
        raise ConfigError("Give --data with or without --part, or --json with or without --images.")
    if isinstance(saved.config, DictConfig):
        if data or labels or part:
            raise ConfigError(
                "The run of a LazyConfig is evaluated on the data that its nodes say: change "
                "dataloader.test, and evaluate with --eval-only and train.init_checkpoint."
            )
        return None
    if not (data or labels):
        return _of_run(saved.config, home, part)
    has_single_class = read_sources(home).get("single_class", False)
    # Most formats list no classes: their objects' classes would be sorted, and some may be missing
    classes = () if has_single_class else saved.classes.get("thing_classes", ())
    if labels:
        (found,) = as_coco((labels, images), folder=temporary, classes=classes)
        chosen = Part(*found, labels)
    else:
        chosen = _of_folder(data, part, temporary, classes)
    _check(chosen)
    if has_single_class:
        chosen = chosen._replace(labels=as_single_class(chosen.labels, temporary))
    return chosen


def _of_folder(data: str, part: str | None, temporary: Path, classes: Sequence[str]) -> Part:
    form, parts, _ = find_parts(data, folder=temporary, to_train=False)
    chosen = parts[_chosen(parts, part, data)]
    if form != COCO and classes:
        # only this part: another one may have objects of classes that the run does not have
        content = read_json(chosen.labels)
        give_all_classes([content], classes)
        Path(chosen.labels).write_text(json.dumps(content), "utf-8")
    return chosen


def _of_run(cfg: CfgNode, home: Path, part: str | None) -> Part | None:
    """A part of the data that were prepared for a run; None where there are none."""
    data = cfg.DATASETS
    parts = {
        "train": (data.TRAIN_JSON, data.TRAIN_IMAGES),
        "val": (data.TEST_JSON, data.TEST_IMAGES),
    }
    if rest := read_sources(home).get("rest"):
        parts["test"] = (str(home / FOLDER / rest[0]), rest[1])
    parts = {name: place for name, place in parts.items() if place[0]}
    if not parts and part is None:
        return None
    part = _chosen(parts, part, str(home))
    labels, images = parts[part]
    chosen = Part(labels, images, labels)
    advice = (
        f"{home} keeps the labels of its part {part} as they were when it began; correct your own, "
        f"and evaluate with --data DIR --part {part}."
    )
    _check(chosen, advice)
    return chosen


def _chosen(parts: Mapping[str, Any], part: str | None, where: str) -> str:
    """The name of the part to evaluate on: the test part, or the only existing one."""
    if part is None:
        return next(name for name in ("test", "val", "train") if name in parts)
    if part not in parts:
        raise DataError(f"{where} has no part {part}{suggest(part, parts)}")
    return part


def _check(data: Part, advice: str = "") -> None:
    """Refuse labels, and a part without an object, naming the user's own file."""
    try:
        report = file_report(data.labels, data.images)
        refusal = report.refusal()
        if not refusal and not report.usable:
            refusal = (
                f"{report.json_file} holds no objects to measure by; label some, or name other "
                "data with --data or --json."
            )
    except DataError as error:
        refusal = str(error)
    if refusal:
        raise DataError(f"{refusal} {advice}".rstrip())
