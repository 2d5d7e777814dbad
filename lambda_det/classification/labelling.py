"""Pseudo-labels: a teacher's predictions, and the choice of those to learn from (Appendix E.2).

The paper follows Xie et al. (2020): keep what the teacher is sure of, and as many images of each
class.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lambda_det.classification.data.folder import FileSource, image_files
from lambda_det.classification.data.names import PackedNames
from lambda_det.classification.data.pseudo_labels import (
    write_pseudo_labels,
)
from lambda_det.classification.data.transforms import TestTransform
from lambda_det.classification.teacher import Teacher
from lambda_det.engine.precision import Precision
from lambda_det.errors import ConfigError, DataError

__all__ = ["Choice", "predict", "select"]

logger = logging.getLogger(__name__)

_HEAD = "# lambda_det predictions 1\t"
_SECONDS_BETWEEN_LINES = 10


@dataclass(frozen=True)
class Choice:
    """Which predictions become labels.

    Attributes:
        threshold: the least confidence, the teacher's softmax score.
        per_class: at most so many images of each class, the surest; 0 for all.
        fill: repeat the images of classes that have fewer than ``per_class``, in turn.
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
            raise ConfigError("--fill fills the classes up to --per-class images; give that, too.")


class _Images(Dataset):
    """Images for the teacher; None for one that cannot be read."""

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
    root: str,
    predictions: Path,
    *,
    batch_size: int,
    workers: int,
    max_unreadable: int,
) -> None:
    """Let the teacher look at every image below ``root``, and go on where it was stopped.

    Args:
        teacher: whom to ask.
        root: folder of images, at any depth.
        predictions: file of one line for each image, which grows batch by batch.
        batch_size: images at a time.
        workers: loader processes.
        max_unreadable: images that may be skipped, each named in the log.

    Raises:
        DataError: there are no images, more cannot be read than may be, or the file is of another
            teacher or other images.
    """
    names = PackedNames(sorted(image_files(root)))
    if not len(names):
        raise DataError(f"There are no images in {root}.")
    head = f"{_HEAD}{teacher.description}\t{os.path.abspath(root)}\t{len(names)} images"
    done = _resume(predictions, head, len(names))
    if done:
        logger.info(f"{done} of {len(names)} images are in {predictions} already")
    if done == len(names):
        return
    source = FileSource(root, names, np.zeros(len(names), np.int64), teacher.classes)
    loader = DataLoader(
        _Images(source, TestTransform(teacher.cfg)),
        batch_size=batch_size,
        sampler=range(done, len(names)),
        num_workers=workers,
        collate_fn=list,
    )
    unreadable = 0
    with predictions.open("a", encoding="utf-8", errors="surrogateescape") as file:
        progress = _Progress(done, len(names))
        for items in loader:
            for _, problem in items:
                if problem:
                    unreadable += 1
                    logger.warning("Skipped: %s", problem)
            if unreadable > max_unreadable:
                raise DataError(
                    f"{unreadable} images could not be read, and --max-unreadable is "
                    f"{max_unreadable}: mend them, or raise it; what was done is kept in "
                    f"{predictions}."
                )
            file.writelines(_lines(teacher, [image for image, _ in items]))
            file.flush()
            done += len(items)
            progress.show(done)


def _resume(predictions: Path, head: str, images: int) -> int:
    """How many images are done; the file then ends with a whole line."""
    if not predictions.exists():
        predictions.parent.mkdir(parents=True, exist_ok=True)
        predictions.write_text(f"{head}\n", encoding="utf-8", errors="surrogateescape")
        return 0
    with predictions.open("rb+") as file:
        first = file.readline().decode("utf-8", errors="surrogateescape").rstrip("\n")
        if first != head:
            raise DataError(
                f"{predictions} is of another teacher or of other images ({first!r:.200}, now it "
                f"would be {head!r:.200}): remove it, or give another output."
            )
        lines, end = 0, file.tell()
        for line in file:
            if not line.endswith(b"\n"):  # cut off by a kill
                break
            lines, end = lines + 1, end + len(line)
        file.truncate(end)
    if lines > images:
        raise DataError(f"{predictions} has more lines than there are images; remove it.")
    return lines


@torch.no_grad()
def _lines(teacher: Teacher, images: list[np.ndarray | None]) -> Iterator[str]:
    """One line for each image: label and confidence, or -1 and 0 where there is no image."""
    there = [image for image in images if image is not None]
    labels, confidences = iter(()), iter(())
    if there:
        device = torch.device(teacher.cfg.MODEL.DEVICE).type
        precision = Precision(device, torch.bfloat16 if device == "cuda" else None)
        with precision.autocast():
            scores = teacher.model({"images": torch.from_numpy(np.stack(there))})
        best = scores.softmax(1).max(1)
        labels, confidences = iter(best.indices.tolist()), iter(best.values.tolist())
    for image in images:
        yield "-1\t0\n" if image is None else f"{next(labels)}\t{next(confidences):.6f}\n"


class _Progress:
    """Says now and then how far it is."""

    def __init__(self, first: int, total: int) -> None:
        self._first, self._total = first, total
        self._start = self._shown = time.monotonic()

    def show(self, done: int) -> None:
        now = time.monotonic()
        if done < self._total and now - self._shown < _SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        speed = (done - self._first) / max(now - self._start, 1e-9)
        left = timedelta(seconds=int((self._total - done) / max(speed, 1e-9)))
        logger.info(f"{done} of {self._total} images, {speed:.0f} img/s, left {left}")


def select(
    predictions: Path, root: str, output: Path, teacher: Teacher, choice: Choice
) -> np.ndarray:
    """Write the labels of the predictions that are sure enough, the same number for each class.

    Args:
        predictions: a complete file of :func:`predict`.
        root: the folder that it was made of.
        output: the file of pseudo-labels to write.
        teacher: whose predictions they are.
        choice: which to take.

    Returns:
        How many lines each class has, int64 [classes].

    Raises:
        DataError: no prediction is sure enough.
    """
    names = PackedNames(sorted(image_files(root)))
    table = np.loadtxt(predictions, skiprows=1, delimiter="\t", ndmin=2, comments=None)
    labels, confidences = table[:, 0].astype(np.int64), table[:, 1]
    chosen = _choose(labels, confidences, len(teacher.classes), choice)
    if not len(chosen):
        raise DataError(
            f"None of the {len(names)} images reaches a confidence of {choice.threshold} (the "
            f"highest is {confidences.max():.3f}); lower --threshold."
        )
    write_pseudo_labels(
        output,
        ((names[int(i)], int(labels[i]), float(confidences[i])) for i in chosen),
        classes=teacher.classes,
        teacher=teacher.description,
        root=os.path.abspath(root),
    )
    return np.bincount(labels[chosen], minlength=len(teacher.classes))


def _choose(
    labels: np.ndarray, confidences: np.ndarray, classes: int, choice: Choice
) -> np.ndarray:
    """Ascending indices of the predictions to take; some several times with ``fill``."""
    sure = np.flatnonzero((labels >= 0) & (confidences >= choice.threshold))
    if not choice.per_class:
        return sure
    surest_first = sure[np.argsort(-confidences[sure], kind="stable")]
    taken = []
    for label in range(classes):
        of_class = surest_first[labels[surest_first] == label][: choice.per_class]
        if choice.fill and len(of_class):
            of_class = np.resize(of_class, choice.per_class)
        taken.append(of_class)
    return np.sort(np.concatenate(taken))
