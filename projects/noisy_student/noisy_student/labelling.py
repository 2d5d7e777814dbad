"""Pseudo-labels: a teacher's predictions, and the choice of those to learn from (Appendix F.3).

The paper follows Xie et al. (2020): keep confident predictions, and the same number of images of
each class.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from lambda_det.classification.data.sources import FileSource, image_files
from lambda_det.classification.data.transforms import TestTransform
from lambda_det.errors import ConfigError, DataError, WeightsError
from lambda_det.training.precision import Precision
from noisy_student.pseudo_labels import (
    PackedNames,
    PseudoLabels,
    read_pseudo_labels,
    row,
    write_pseudo_labels,
)
from noisy_student.teacher import Teacher

logger = logging.getLogger(__name__)

# the most classes that are kept of a prediction, and their least probability
_KEPT, _LOWEST = 10, 1e-3


@dataclass(frozen=True)
class Choice:
    """Which predictions become labels.

    Attributes:
        threshold: the lowest confidence, the teacher's softmax score.
        per_class: the number of images of each class, the most confident; 0: all.
        fill: repeat the images of classes that have fewer than ``per_class``.
    """

    threshold: float
    per_class: int = 0
    fill: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"--threshold is {self.threshold}; a confidence is from 0 to 1.")
        if self.per_class < 0:
            raise ConfigError(f"--per-class is {self.per_class}; give 0 (all of them) or more.")
        if self.fill and not self.per_class:
            raise ConfigError("--fill fills the classes up to --per-class images; also give that.")


@dataclass(frozen=True)
class Unlabelled:
    """Images to label.

    Attributes:
        root: the folder from which the names start, as an absolute path.
        names: paths of the images, sorted.
        sha256: of the names.
    """

    root: str
    names: PackedNames
    sha256: str


def list_images(root: str) -> Unlabelled:
    """All images below a folder, at any depth.

    Raises:
        DataError: there is no such folder, or no image in it.
    """
    if not os.path.isdir(root):
        raise DataError(f"There is no image folder {root}.")
    digest = hashlib.sha256()

    def digested() -> Iterator[str]:
        for name in sorted(image_files(root)):
            digest.update(os.fsencode(name) + b"\0")  # no name has a null byte
            yield name

    names = PackedNames(digested())
    if not len(names):
        raise DataError(f"There are no images in {root}.")
    return Unlabelled(os.path.abspath(root), names, digest.hexdigest())


class _Images(Dataset):
    """Images for the teacher, each with ""; or None and a sentence if it cannot be read."""

    def __init__(self, source: FileSource, transform: TestTransform) -> None:
        self._source = source
        self._transform = transform

    def __getitem__(self, index: int) -> tuple[np.ndarray | None, str]:
        try:
            return self._transform(self._source.load(index)), ""
        except DataError as error:
            return None, str(error)


def predict(
    teacher: Teacher,
    images: Unlabelled,
    predictions: Path,
    *,
    batch_size: int,
    workers: int,
) -> None:
    """Write the teacher's prediction for every image; an interrupted call is continued.

    Args:
        teacher: makes the predictions.
        images: the images to predict.
        predictions: a file of pseudo-labels, which grows batch by batch. It lacks the images that
            cannot be read.
        batch_size: images of one forward pass.
        workers: loader processes.

    Raises:
        DataError: the file is of another teacher or other images, or damaged.
        WeightsError: the teacher's scores are not finite.
    """
    names = images.names
    done = _resume(predictions, teacher, images)
    if done:
        logger.info(f"{done} of {len(names)} images are in {predictions} already")
    if done == len(names):
        return
    source = FileSource(images.root, names, np.zeros(len(names), np.int64), teacher.classes)
    loader = DataLoader(
        _Images(source, TestTransform(teacher.cfg)),
        batch_size=batch_size,
        sampler=range(done, len(names)),
        num_workers=workers,
        collate_fn=list,
    )
    progress = tqdm(total=len(names), initial=done, unit="image")
    with progress, predictions.open("a", encoding="utf-8", errors="surrogateescape") as file:
        for items in loader:
            for problem in filter(None, (problem for _, problem in items)):
                logger.warning("Skipped: %s", problem)
            here = [names[done + place] for place in range(len(items))]
            file.writelines(_lines(teacher, here, [image for image, _ in items]))
            file.flush()
            done += len(items)
            progress.update(len(items))


def _head(teacher: Teacher, images: Unlabelled) -> dict[str, Any]:
    """The head of the file: everything on which its lines depend."""
    made = (
        f"{teacher.description}, weights of SHA-256 {teacher.sha256}, {teacher.cfg.INPUT.SIZE} "
        f"pixels, crop {teacher.cfg.INPUT.TEST_CROP}, {len(images.names)} images with names of "
        f"SHA-256 {images.sha256}"
    )
    # JSON in ASCII, so that any path is a part of one line
    return {"classes": teacher.classes, "teacher": made, "root": json.dumps(images.root)}


def _resume(predictions: Path, teacher: Teacher, images: Unlabelled) -> int:
    """The number of images that are done. An incomplete last line is removed."""
    if not predictions.exists():
        predictions.parent.mkdir(parents=True, exist_ok=True)
        write_pseudo_labels(predictions, (), **_head(teacher, images))
        return 0
    with predictions.open("rb+") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n"):  # the process was killed
                break
            end += len(line)
        file.truncate(end)
    names = _read(predictions, teacher, images).names  # an error now is better than one after days
    if not len(names):
        return 0
    last = names[len(names) - 1]
    return next(place for place, name in enumerate(images.names, 1) if name == last)


def _read(predictions: Path, teacher: Teacher, images: Unlabelled) -> PseudoLabels:
    found = read_pseudo_labels(predictions)
    for key, now in _head(teacher, images).items():
        then = getattr(found, key)
        if then != now:
            raise DataError(
                f"{predictions} is of another teacher or of other images ({key} {then!r}, and now "
                f"{now!r}): remove it, or give another output."
            )
    return found


@torch.no_grad()
def _lines(teacher: Teacher, names: list[str], images: list[np.ndarray | None]) -> Iterator[str]:
    """One line for each image that is not None."""
    readable = [image for image in images if image is not None]
    if not readable:
        return
    device = torch.device(teacher.cfg.MODEL.DEVICE).type
    precision = Precision(device, torch.bfloat16 if device == "cuda" else None)
    with precision.autocast():
        scores = teacher.model({"images": torch.from_numpy(np.stack(readable))})
    best = scores.softmax(1).topk(min(_KEPT, scores.shape[1]))
    if not best.values.isfinite().all():
        raise WeightsError(
            f"The scores of {teacher.description} are not finite: take another teacher."
        )
    labelled = (name for name, image in zip(names, images, strict=True) if image is not None)
    for name, labels, values in zip(
        labelled, best.indices.tolist(), best.values.tolist(), strict=True
    ):
        pairs = zip(labels, values, strict=True)
        kept = [pair for place, pair in enumerate(pairs) if place == 0 or pair[1] >= _LOWEST]
        yield row(name, kept)


def select(
    predictions: Path, images: Unlabelled, output: Path, teacher: Teacher, choice: Choice
) -> np.ndarray:
    """Write the labels of the chosen predictions.

    Args:
        predictions: a complete file of :func:`predict`.
        images: the images of these predictions.
        output: the file of pseudo-labels to write.
        teacher: the teacher of these predictions.
        choice: which of them become labels.

    Returns:
        The number of lines of each class, int64 [classes].

    Raises:
        DataError: no prediction is confident enough, or the file is damaged or incomplete.
    """
    found = _read(predictions, teacher, images)
    labels, confidences = found.labels, found.probabilities[found.starts]
    chosen = _choose(labels, confidences, len(teacher.classes), choice)
    if not len(chosen):
        raise DataError(
            f"None of the {len(found.names)} images reaches a confidence of {choice.threshold} "
            f"(the highest is {confidences.max(initial=0):.3f}); lower --threshold."
        )
    spans = zip(chosen, found.starts[chosen], found.ends[chosen], strict=True)
    rows = (
        (found.names[n], zip(found.pairs[a:b], found.probabilities[a:b], strict=True))
        for n, a, b in spans
    )
    write_pseudo_labels(
        output,
        rows,
        classes=teacher.classes,
        teacher=teacher.description,
        root=images.root,
    )
    return np.bincount(labels[chosen], minlength=len(teacher.classes))


def _choose(
    labels: np.ndarray, confidences: np.ndarray, classes: int, choice: Choice
) -> np.ndarray:
    """Ascending indices of the chosen predictions; with ``fill`` some occur several times."""
    confident = np.flatnonzero(confidences >= choice.threshold)
    if not choice.per_class:
        return confident
    by_confidence = confident[np.argsort(-confidences[confident], kind="stable")]
    taken = []
    for label in range(classes):
        of_class = by_confidence[labels[by_confidence] == label][: choice.per_class]
        if choice.fill and len(of_class):
            of_class = np.resize(of_class, choice.per_class)
        taken.append(of_class)
    return np.sort(np.concatenate(taken))
