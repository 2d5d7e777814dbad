"""The data of ``lambda-det evaluate``: a part of the run's, of another data set, or labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from detectron2.config import CfgNode
from omegaconf import DictConfig

from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.saved_run import SavedRun
from lambda_det.errors import ConfigError, DataError, listed
from lambda_det.own_data.coco_files import identifying_stem
from lambda_det.own_data.labels import (
    COCO,
    as_coco,
    as_single_class,
    give_all_classes,
    refuse_address,
)
from lambda_det.own_data.layouts import find_images, find_parts
from lambda_det.own_data.run_data import FOLDER, read_sources

__all__ = ["DataToEvaluate", "choose_data"]


class DataToEvaluate(NamedTuple):
    """What is evaluated on.

    Attributes:
        name: of its results' folder.
        labels: a file in COCO's format.
        images: the folder of its images.
        source: the user's own labels.
    """

    name: str
    labels: Path
    images: Path
    source: str

    def copied_to(self, folder: Path) -> DataToEvaluate:
        """The same data with the labels in a folder."""
        copied = folder / f"{self.name}.json"
        if copied.absolute() != self.labels.absolute():
            copied.write_bytes(self.labels.read_bytes())
        return self._replace(labels=copied)


def choose_data(
    saved: SavedRun,
    home: Path,
    data: str | None,
    part: str | None,
    labels: str | None,
    images: str | None,
    temporary: Path,
) -> DataToEvaluate | None:
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
    if bool(data) + bool(labels) > 1 or (images and not labels) or (labels and part):
        raise ConfigError("Give --data with or without --part, or --json with or without --images.")
    if isinstance(saved.config, DictConfig):
        if data or labels or part:
            raise ConfigError(
                "The run of a LazyConfig is evaluated on the data that its nodes say: change "
                "dataloader.test, and evaluate with --eval-only and train.init_checkpoint."
            )
        return None
    for place in (data, labels, images):
        refuse_address(place or "")
    if labels:
        return _of_labels(saved, home, labels, images, temporary)
    if data:
        return _of_folder(saved, home, data, part, temporary)
    return _of_run(saved, home, part)


def _of_labels(
    saved: SavedRun, home: Path, labels: str, images: str | None, temporary: Path
) -> DataToEvaluate:
    if not Path(labels).exists():
        raise DataError(f"The labels {labels} of --json do not exist.")
    pictures = images or str(find_images(labels))
    has_single_class = _has_single_class(home)
    classes = () if has_single_class else _classes_of(saved)
    (file,) = as_coco((labels, pictures), folder=temporary, classes=classes)
    _check(file, pictures)
    if has_single_class:
        file = as_single_class(file, temporary)
    return _named(file, pictures, labels)


def _of_folder(
    saved: SavedRun, home: Path, data: str, part: str | None, temporary: Path
) -> DataToEvaluate:
    form, places, _ = find_parts(data, folder=temporary, to_train=False)
    parts = {place.name: place for place in places}
    chosen = parts[_chosen(parts, part, data)]
    file = str(chosen.labels)
    _check(file, str(chosen.images))
    if _has_single_class(home):
        file = as_single_class(file, temporary)
    elif form != COCO:
        # only this part: another one may have objects of classes that the run does not have
        content = read_json(file)
        give_all_classes([content], _classes_of(saved))
        Path(file).write_text(json.dumps(content), "utf-8")
    return _named(file, str(chosen.images), chosen.source)


def _of_run(saved: SavedRun, home: Path, part: str | None) -> DataToEvaluate | None:
    parts = _parts_of_run(saved.config, home)
    if not parts and part is None:
        return None
    part = _chosen(parts, part, str(home))
    advice = (
        f"{home} keeps the labels of its part {part} as they were when it began; correct your own, "
        f"and evaluate with --data DIR --part {part}."
    )
    _check(*parts[part][:2], advice)
    return _named(*parts[part])


def _chosen(parts: Mapping[str, Any], part: str | None, where: str) -> str:
    """The name of the part to evaluate on: the test part, or the only existing one.

    Raises:
        DataError: the part that is asked for does not exist.
    """
    if part is None:
        return next(name for name in ("test", "val", "train") if name in parts)
    if part not in parts:
        raise DataError(
            f"{where} has no part {part}, only {listed(parts)}; name other data with --data or "
            "--json."
        )
    return part


def _classes_of(saved: SavedRun) -> Sequence[str]:
    """The classes of a run in their order.

    Most formats list no classes: their objects' classes would be sorted, and some may be missing.
    """
    return saved.classes.get("thing_classes", ())


def _has_single_class(home: Path) -> bool:
    """Whether a run was trained with ``--single-class``."""
    return read_sources(home).get("single_class", False)


def _parts_of_run(cfg: CfgNode, home: Path) -> dict[str, tuple[str, str, str]]:
    """The parts of the data that were prepared for a run."""
    files = {"train": ("TRAIN_JSON", "TRAIN_IMAGES"), "val": ("TEST_JSON", "TEST_IMAGES")}
    parts = {name: tuple(cfg.DATASETS[key] for key in keys) for name, keys in files.items()}
    if rest := read_sources(home).get("rest"):
        parts["test"] = (str(home / FOLDER / rest[0]), rest[1])
    return {name: (file, images, file) for name, (file, images) in parts.items() if file}


def _check(labels: str, images: str, advice: str = "") -> None:
    """Refuse labels by the user's own file, before they are copied.

    Args:
        labels: a file in COCO's format; where one of our readers made it, it names its source.
        images: the folder of its images.
        advice: the end of the message.

    Raises:
        DataError: the labels are refused, or there is nothing to measure by.
    """
    try:
        report = file_report(labels, images)
        refusal = report.refusal()
    except DataError as error:
        refusal = str(error)
    else:
        if not refusal and not report.usable:
            refusal = (
                f"{report.json_file} holds no objects to measure by; label some, or name other "
                "data with --data or --json."
            )
    if refusal:
        raise DataError(f"{refusal} {advice}".rstrip())


def _named(labels: str, images: str, source: str) -> DataToEvaluate:
    """Add a name that identifies the content of the labels."""
    path = Path(labels)
    return DataToEvaluate(identifying_stem(path), path, Path(images), source)
